"""Read the bundled data set once for all tests."""

import pytest

from pfedbayes.data import Pool, load_published


@pytest.fixture(scope="session")
def mnist() -> Pool:
    return load_published("mnist")
