"""Fixtures of the tests of `regard.see`."""

from collections.abc import Iterator

import pytest

from tests.see.watch_helpers import no_hooks_left


@pytest.fixture
def check_hooks_removed() -> Iterator[None]:
    """Check after a test that no hook of `watch` remains."""
    yield
    assert no_hooks_left()
