"""Downloads of published data sets from a server on this machine."""

import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from published_files import (
    BATCH,
    CACHE,
    TEST,
    TRAIN,
    cifar_bytes,
    fashion_bytes,
    gzipped,
    one_line,
    sha256,
    tar,
)

from pfedbayes.data import load_published, published
from pfedbayes.errors import UserError

PUBLISHED = [download for source in published.SOURCES.values() for download in source.downloads]
pytestmark = pytest.mark.usefixtures("sandbox")


class Site:
    """A publisher on this machine: `files` are served, those in `cut` break off half way."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.asked: list[str] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.lstrip("/")
                site.asked.append(name)
                if name not in site.files:
                    self.send_error(404)
                    return
                content = site.files[name]
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the client may leave before the end
                    self.wfile.write(content[: len(content) // 2] if name in site.cut else content)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"

    def publish(self, monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, bytes]) -> None:
        """Make this the publisher of the set `name`."""
        self.files = dict(files)
        downloads = tuple(
            published.Download(self.url + file, sha256(content), len(content)) for file, content in files.items()
        )
        replaced = dataclasses.replace(published.SOURCES[name], downloads=downloads)
        monkeypatch.setitem(published.SOURCES, name, replaced)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    thread = threading.Thread(target=site.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield site
    site.server.shutdown()
    site.server.server_close()
    thread.join()


class TestDownload:
    def test_fashion(self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = gzipped(fashion_bytes())
        site.publish(monkeypatch, "fashion-mnist", files)
        seen: list[tuple[str, int, int]] = []
        pool = load_published("fashion-mnist", progress=lambda *report: seen.append(report))
        assert len(pool.x) == TRAIN + TEST
        assert {name: (done, total) for name, done, total in seen} == {
            name: (len(content), len(content)) for name, content in files.items()
        }
        folder = tmp_path / CACHE / "fashion-mnist"
        assert sorted(file.name for file in folder.iterdir()) == sorted(files)
        site.asked.clear()
        assert torch.equal(load_published("fashion-mnist").x, pool.x)
        assert site.asked == []

    def test_cifar(self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        site.publish(monkeypatch, "cifar10", {"cifar-10-binary.tar.gz": tar(cifar_bytes())})
        assert len(load_published("cifar10").x) == 6 * BATCH
        assert (tmp_path / CACHE / "cifar10" / "cifar-10-binary.tar.gz").is_file()

    def test_wrong_checksum(self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        site.publish(monkeypatch, "cifar10", {"cifar-10-binary.tar.gz": tar(cifar_bytes())})
        size = len(site.files["cifar-10-binary.tar.gz"])
        site.files["cifar-10-binary.tar.gz"] = b"x" * size
        with pytest.raises(UserError, match="checksum") as error:
            load_published("cifar10")
        assert sha256(b"x" * size) in one_line(error)
        assert list((tmp_path / CACHE / "cifar10").iterdir()) == []

    def test_an_answer_without_end_is_left(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        site.publish(monkeypatch, "cifar10", {"cifar-10-binary.tar.gz": b"short"})
        site.files["cifar-10-binary.tar.gz"] = b"x" * 10_000_000
        seen: list[int] = []
        with pytest.raises(UserError, match="checksum"):
            load_published("cifar10", progress=lambda *report: seen.append(report[1]))
        assert max(seen) <= published.CHUNK

    def test_the_publishers_are_asked_over_https_and_checked_by_sha256(self) -> None:
        for download in PUBLISHED:
            assert download.url.startswith("https://")
            assert len(bytes.fromhex(download.sha256)) == hashlib.sha256().digest_size
            assert download.size > 0

    def test_cut_off_and_continued(self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = gzipped(fashion_bytes())
        site.publish(monkeypatch, "fashion-mnist", files)
        site.cut = {"t10k-images-idx3-ubyte.gz"}
        with pytest.raises(UserError, match=r"was interrupted after \d+ of \d+ bytes: run again") as error:
            load_published("fashion-mnist")
        assert "t10k-images-idx3-ubyte.gz" in one_line(error)
        complete = ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]
        assert sorted(file.name for file in (tmp_path / CACHE / "fashion-mnist").iterdir()) == complete
        site.cut = set()
        site.asked.clear()
        assert len(load_published("fashion-mnist").x) == TRAIN + TEST
        assert sorted(site.asked) == ["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]

    def test_not_there_any_more(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        site.publish(monkeypatch, "cifar10", {"cifar-10-binary.tar.gz": b""})
        site.files.clear()
        with pytest.raises(UserError, match=r"could not be downloaded \(Not Found\)") as error:
            load_published("cifar10")
        one_line(error)

    def test_no_network(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        site.url = "http://127.0.0.1:1/"  # nothing listens there
        site.publish(monkeypatch, "fashion-mnist", gzipped(fashion_bytes()))
        with pytest.raises(UserError, match="could not be downloaded") as error:
            load_published("fashion-mnist")
        for way in ("refused", "--data-dir or PFEDBAYES_DATA", "dataset-fashion-mnist", "connect to the network"):
            assert way in one_line(error)

    def test_a_cache_that_cannot_be_written(self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        site.publish(monkeypatch, "cifar10", {"cifar-10-binary.tar.gz": b""})
        (tmp_path / "cache").write_text("a file where the folder should be")
        with pytest.raises(UserError, match="could not be downloaded") as error:
            load_published("cifar10")
        one_line(error)
