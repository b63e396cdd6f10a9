import dataclasses
from pathlib import Path

import pytest
from published_files import BATCH, SIDE, TEST, TRAIN

from pfedbayes.data import Pool, load_published, published


@pytest.fixture(scope="session")
def mnist() -> Pool:
    """The bundled data set, read once for all tests."""
    return load_published("mnist")


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the sets of this machine, its cache or its proxy, and the sets are small."""
    monkeypatch.delenv("PFEDBAYES_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    small = {
        "fashion-mnist": dataclasses.replace(
            published.SOURCES["fashion-mnist"],
            files=published.idx_files(TRAIN, TEST, SIDE),
            system_folder=str(tmp_path / "debian"),
            downloads=(),
        ),
        "cifar10": dataclasses.replace(published.SOURCES["cifar10"], files=published.cifar_files(BATCH), downloads=()),
    }
    monkeypatch.setattr(published, "SOURCES", small)
