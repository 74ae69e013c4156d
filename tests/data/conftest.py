"""Real data sets lie where the tester says: `pytest tests/data --data FOLDER`."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data", type=Path, metavar="FOLDER", help="folder of real data sets, for tests marked `real`")


@pytest.fixture
def real_data(request: pytest.FixtureRequest) -> Path:
    """The folder of real data sets."""
    folder = request.config.getoption("--data", default=None)
    if folder is None:
        pytest.skip("no real data sets: give their folder with `pytest tests/data --data FOLDER`")
    return Path(folder)
