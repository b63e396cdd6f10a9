"""The bundled set is read once for all tests."""

import pytest

from pfedbayes.data import Pool, load


@pytest.fixture(scope="session")
def mnist() -> Pool:
    return load("mnist")
