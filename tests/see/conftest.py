"""What tests of this folder ask for by name."""

from collections.abc import Iterator

import pytest

from tests.see.watching import nothing_left


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    """After a test nothing of a watcher is registered anywhere."""
    yield
    assert nothing_left()
