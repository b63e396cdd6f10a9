"""Published image data sets in their published formats.

MNIST is part of the package. The others are searched for on this machine and otherwise downloaded from their
publishers over HTTPS. Local files are checked for their structure, downloads by their SHA-256 checksum.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import lzma
import math
import os
import struct
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pfedbayes.data.pool import Pool
from pfedbayes.errors import UserError

NUM_CLASSES = 10  # of every data set here
NETWORK_TIMEOUT = 10.0  # seconds without an answer
CHUNK = 1 << 18

DownloadProgress = Callable[[str, int, int], None]
"""Called during a download: name of the file, bytes received, and bytes expected (0 if unknown)."""


@dataclass(frozen=True)
class PublishedFile:
    """A file with a header and `count` records: images, labels, or labels each followed by its image."""

    name: str
    header: bytes
    count: int
    """Number of records."""
    width: int
    """Bytes of one record."""

    @property
    def length(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + self.count * self.width


@dataclass(frozen=True)
class Download:
    """A file to download, its SHA-256 checksum and its size."""

    url: str
    sha256: str
    size: int
    """Bytes of the file."""

    @property
    def file_name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Source:
    """A published data set: its files, where to find them, and where to download them."""

    files: tuple[PublishedFile, ...]
    """The files, training files first. They may be gzipped, or be in the published archive."""
    shape: tuple[int, int, int]
    """Channels, height and width of an image."""
    folders: tuple[str, ...]
    """Usual names of the folder with the files; the cache uses the first."""
    downloads: tuple[Download, ...]
    archive: str | None = None
    """Name of the published archive."""
    system_folder: str | None = None
    """Folder of Debian's package."""
    system_package: str | None = None
    """Name of Debian's package."""


def idx_files(train: int, test: int, side: int) -> tuple[PublishedFile, ...]:
    """Return the four files of MNIST and its successors, in the idx format: big-endian magic number and sizes first."""
    return tuple(
        file
        for part, count in (("train", train), ("t10k", test))
        for file in (
            PublishedFile(
                f"{part}-images-idx3-ubyte", struct.pack(">4I", 0x803, count, side, side), count, side * side
            ),
            PublishedFile(f"{part}-labels-idx1-ubyte", struct.pack(">2I", 0x801, count), count, 1),
        )
    )


def cifar_files(count: int) -> tuple[PublishedFile, ...]:
    """Return the six files of CIFAR-10's binary version: label, then the red, green and blue planes; no header."""
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    return tuple(PublishedFile(name, b"", count, 1 + 3 * 32 * 32) for name in names)


# The publisher's repository at a fixed commit: its site offers the same files without HTTPS only.
FASHION_SITE = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/b2617bb6d3ffa2e429640350f613e3291e10b141/"
    "data/fashion/"
)
SOURCES = {
    "fashion-mnist": Source(
        files=idx_files(60_000, 10_000, 28),
        shape=(1, 28, 28),
        folders=("fashion-mnist",),
        downloads=(
            Download(
                FASHION_SITE + "train-images-idx3-ubyte.gz",
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                26_421_880,
            ),
            Download(
                FASHION_SITE + "train-labels-idx1-ubyte.gz",
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                29_515,
            ),
            Download(
                FASHION_SITE + "t10k-images-idx3-ubyte.gz",
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                4_422_102,
            ),
            Download(
                FASHION_SITE + "t10k-labels-idx1-ubyte.gz",
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                5_148,
            ),
        ),
        system_folder="/usr/share/datasets/fashion-mnist",
        system_package="dataset-fashion-mnist",
    ),
    "cifar10": Source(
        files=cifar_files(10_000),
        shape=(3, 32, 32),
        folders=("cifar10", "cifar-10-batches-bin"),
        downloads=(
            Download(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                170_052_171,
            ),
        ),
        archive="cifar-10-binary.tar.gz",
    ),
}

MNIST_IMAGES = 70_000
MNIST_TRAIN_IMAGES = 60_000
MNIST_FIRST_LABELS = [5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5, 3, 6, 1, 7]  # first labels of its training file


def load_published(
    name: str, data_dir: str | Path | None = None, *, download: bool = True, progress: DownloadProgress | None = None
) -> Pool:
    """Load a published data set: "mnist", "fashion-mnist" or "cifar10".

    The last two are searched for in data_dir, in the folder PFEDBAYES_DATA, in the user's cache and in the folder of
    Debian's package. If none of them has the files, they are downloaded into the cache.
    """
    if name == "mnist":
        return _load_bundled_mnist()
    if name not in SOURCES:
        raise UserError(f'unknown data set "{name}": choose "mnist", "fashion-mnist" or "cifar10"')
    source = SOURCES[name]
    folder = _locate(source, data_dir)
    if folder is None:
        if not download:
            raise UserError(f"{name} is not on this machine: {_ways_to_get(source)}")
        folder = _download(name, source, progress)
    pool = _assemble(source, _read_files(source, folder))
    if name == "fashion-mnist" and pool.y[: len(MNIST_FIRST_LABELS)].tolist() == MNIST_FIRST_LABELS:
        raise UserError(f"{folder} holds MNIST, not Fashion-MNIST: give another folder")
    return pool


@dataclass(frozen=True)
class Availability:
    """Whether a published data set is on this machine."""

    name: str
    images: int
    """Number of images."""
    found: str | None
    """Its folder, "bundled", or None."""
    how_to_get: str
    """How to get a set that is not there; else empty."""


def available(data_dir: str | Path | None = None) -> list[Availability]:
    """Return what `load_published` would find on this machine, without reading it."""
    records = [Availability("mnist", MNIST_IMAGES, "bundled", "")]
    for name, source in SOURCES.items():
        images = sum(file.count for file in source.files if file.width > 1)
        try:
            folder = _locate(source, data_dir)
        except UserError as error:
            records.append(Availability(name, images, None, str(error)))
        else:
            found = None if folder is None else str(folder)
            records.append(Availability(name, images, found, _ways_to_get(source) if folder is None else ""))
    return records


def _ways_to_get(source: Source) -> str:
    """Return the three ways to get a set that is not on this machine."""
    if source.system_package:
        second = f"install Debian's package {source.system_package}"
    else:
        second = f"put {source.files[0].name} .. {source.files[-1].name} into {_cache(source)}"
    return (
        f"give the folder of its published files with --data-dir or PFEDBAYES_DATA, or {second}, "
        "or connect to the network and run again to download it"
    )


def _cache_base() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pfedbayes"


def _cache(source: Source) -> Path:
    return _cache_base() / source.folders[0]


def _locate(source: Source, data_dir: str | Path | None) -> Path | None:
    """Return the first folder that holds all files of a set."""
    if data_dir and not Path(data_dir).is_dir():
        raise UserError(f"the data folder {data_dir} does not exist: correct --data-dir or create the folder")
    cache = _cache_base()
    bases = [Path(base) for base in (data_dir, os.environ.get("PFEDBAYES_DATA")) if base]
    folders = [base / name for base in (*bases, cache) for name in (*source.folders, ".")]
    if source.system_folder:
        folders.append(Path(source.system_folder))
    for folder in folders:
        try:
            missing = _missing(source, folder)
            complete = not missing or _archive(source, folder) is not None
        except OSError as error:
            raise UserError(f"{folder} cannot be read ({error.strerror}): check its permissions") from error
        if complete:
            return folder
        # After an interrupted download the cache may hold only some of the files.
        if len(missing) < len(source.files) and not folder.is_relative_to(cache):
            raise UserError(f"{folder} lacks {missing[0]}: add it or give another folder")
    return None


def _missing(source: Source, folder: Path) -> list[str]:
    return [
        file.name
        for file in source.files
        if not (folder / file.name).is_file() and not (folder / f"{file.name}.gz").is_file()
    ]


def _archive(source: Source, folder: Path) -> Path | None:
    return folder / source.archive if source.archive and (folder / source.archive).is_file() else None


def _read_files(source: Source, folder: Path) -> list[NDArray[np.uint8]]:
    """Return the records of a set: one array (count, width) per file."""
    archive = _archive(source, folder)
    if archive and _missing(source, folder):
        return _read_archive(source, archive)
    records = []
    for file in source.files:
        path = folder / file.name
        if not path.is_file():
            path = folder / f"{file.name}.gz"
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
                content = stream.read(file.length + 1)  # one byte more than expected, to detect longer files
        except (OSError, EOFError, zlib.error) as error:
            raise _damaged(str(path), f"cannot be read ({error})") from error
        records.append(_records(file, content, source.shape, str(path)))
    return records


def _read_archive(source: Source, path: Path) -> list[NDArray[np.uint8]]:
    """Return the records of a set from the published archive, in one pass and without unpacking it to disk."""
    wanted = {file.name: file for file in source.files}
    records = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                file = wanted.get(Path(member.name).name)
                stream = archive.extractfile(member) if file and member.isfile() else None
                if file and stream:
                    content = stream.read(file.length + 1)
                    records[file.name] = _records(file, content, source.shape, f"{file.name} in {path}")
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise _damaged(str(path), f"cannot be read ({error})") from error
    for name in wanted:
        if name not in records:
            raise _damaged(str(path), f"does not contain {name}")
    return [records[name] for name in wanted]


def _records(file: PublishedFile, content: bytes, shape: tuple[int, int, int], where: str) -> NDArray[np.uint8]:
    """Check header, length and labels of one file, and return its records (count, width)."""
    if not content.startswith(file.header):
        raise _damaged(where, f"does not begin like {file.name}: wrong magic number or sizes")
    if len(content) != file.length:
        extent = "more than" if len(content) > file.length else f"{len(content)} of"
        raise _damaged(where, f"has {extent} the {file.length} bytes of {file.name}")
    records = np.frombuffer(content, np.uint8, offset=len(file.header)).reshape(file.count, file.width)
    if file.width != math.prod(shape) and records[:, 0].max() >= NUM_CLASSES:
        raise _damaged(where, f"has the label {records[:, 0].max()}, but labels are 0 to {NUM_CLASSES - 1}")
    return records


def _damaged(where: str, what: str) -> UserError:
    return UserError(f"{where} {what}: replace it by the published file, or delete it and run again")


def _assemble(source: Source, files: list[NDArray[np.uint8]]) -> Pool:
    """Return the pool of the records, whether images and labels share a file or not."""
    pixels = math.prod(source.shape)
    images = [records[:, -pixels:] for records in files if records.shape[1] >= pixels]
    labels = [records[:, 0] for records in files if records.shape[1] != pixels]
    x = torch.from_numpy(np.concatenate(images)).reshape(-1, *source.shape)
    y = torch.from_numpy(np.concatenate(labels).astype(np.int64))
    return Pool(x, y, NUM_CLASSES, official_train_count=len(x) - len(images[-1]))


def _load_bundled_mnist() -> Pool:
    """Load MNIST as written by scripts/bundle_mnist.py: all images, training then test, followed by all labels."""
    try:
        packed = resources.files("pfedbayes.data").joinpath("bundled/mnist.xz").read_bytes()
        content = bytearray(lzma.decompress(packed))
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise UserError(f"the MNIST file inside the package cannot be read ({error}): reinstall the package") from error
    pixels = MNIST_IMAGES * 28 * 28
    flat = torch.frombuffer(content, dtype=torch.uint8)
    if len(flat) != pixels + MNIST_IMAGES or int(flat[pixels:].max()) >= NUM_CLASSES:
        raise UserError("the MNIST file inside the package is damaged: reinstall the package")
    x, y = flat[:pixels].reshape(-1, 1, 28, 28), flat[pixels:].to(torch.int64)
    return Pool(x, y, NUM_CLASSES, MNIST_TRAIN_IMAGES)


def _download(name: str, source: Source, progress: DownloadProgress | None) -> Path:
    """Download the missing files of a set into the cache, and return its folder there."""
    folder = _cache(source)
    for item in source.downloads:
        if not (folder / item.file_name).is_file():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _fetch(item, folder / item.file_name, progress)
            except (OSError, http.client.HTTPException) as error:
                cause = getattr(error, "reason", error)
                if isinstance(error, urllib.error.HTTPError):
                    error.close()  # releases the connection
                raise UserError(
                    f"{name} is not on this machine and {item.url} could not be downloaded ({cause}): "
                    + _ways_to_get(source)
                ) from error
    return folder


def _fetch(item: Download, target: Path, progress: DownloadProgress | None) -> None:
    """Download one file. `target` appears only when it is complete and has the published checksum."""
    digest, received = hashlib.sha256(), 0
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        part = Path(file.name)
        try:
            # The URL comes from SOURCES, so its scheme cannot read a local file.
            with urllib.request.urlopen(item.url, timeout=NETWORK_TIMEOUT) as answer:  # noqa: S310
                while received <= item.size and (chunk := answer.read(CHUNK)):
                    file.write(chunk)
                    digest.update(chunk)
                    received += len(chunk)
                    if progress:
                        progress(target.name, received, item.size)
            if received < item.size:
                raise UserError(f"{item.url} was interrupted after {received} of {item.size} bytes: run again")
            if digest.hexdigest() != item.sha256:
                raise UserError(
                    f"{item.url} has the checksum {digest.hexdigest()} instead of {item.sha256}: run again, "
                    "or give the published files with --data-dir"
                )
            file.flush()
            os.fsync(file.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
