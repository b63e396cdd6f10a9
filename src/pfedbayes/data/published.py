"""Where the examples come from: published sets of images in their published formats, and two synthetic sets.

MNIST is part of the package. The others are looked for on this machine and otherwise downloaded from their
publishers. Files found on the machine are checked for their structure, downloads by their published checksum.
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
from torch import Tensor

from pfedbayes.errors import UserError

NUM_CLASSES = 10  # of every published set here
NETWORK_TIMEOUT = 10.0  # seconds without an answer
CHUNK = 1 << 18

Progress = Callable[[str, int, int], None]
"""Called while a file comes in: its name, the bytes received, and the bytes expected (0: not known)."""


@dataclass(frozen=True, eq=False)
class Pool:
    """All examples of one set, those of the training file first, in file order.

    x: (M, C, H, W) uint8 images or (M, features) float32; y: (M,) int64 labels or (M, 1) float32 targets.
    num_classes is None for regression; official_train_count is the number of rows from the training file.
    """

    x: Tensor
    y: Tensor
    num_classes: int | None
    official_train_count: int


@dataclass(frozen=True)
class PublishedFile:
    """A header and then `count` records of `width` bytes: an image, a label, or a label followed by its image."""

    name: str
    header: bytes
    count: int
    width: int

    @property
    def length(self) -> int:
        return len(self.header) + self.count * self.width


@dataclass(frozen=True)
class Download:
    url: str
    md5: str

    @property
    def file_name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Source:
    """A published set: the files it consists of, where they may lie and where they come from.

    files: training files first; the files may be gzipped, or lie in the published archive.
    folders: the names a folder of this set usually has; the first is used in the cache.
    """

    files: tuple[PublishedFile, ...]
    shape: tuple[int, int, int]
    folders: tuple[str, ...]
    downloads: tuple[Download, ...]
    archive: str | None = None
    system_folder: str | None = None
    system_package: str | None = None


def idx_files(train: int, test: int, side: int) -> tuple[PublishedFile, ...]:
    """The four files of MNIST and its successors, in the idx format: big-endian magic number and sizes first."""
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
    """The six files of CIFAR-10's binary version: label, then the red, green and blue planes; no header."""
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    return tuple(PublishedFile(name, b"", count, 1 + 3 * 32 * 32) for name in names)


FASHION_SITE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
SOURCES = {
    "fashion-mnist": Source(
        files=idx_files(60_000, 10_000, 28),
        shape=(1, 28, 28),
        folders=("fashion-mnist",),
        downloads=(
            Download(FASHION_SITE + "train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            Download(FASHION_SITE + "train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
            Download(FASHION_SITE + "t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
            Download(FASHION_SITE + "t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
        system_folder="/usr/share/datasets/fashion-mnist",
        system_package="dataset-fashion-mnist",
    ),
    "cifar10": Source(
        files=cifar_files(10_000),
        shape=(3, 32, 32),
        folders=("cifar10", "cifar-10-batches-bin"),
        downloads=(
            Download("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
        ),
        archive="cifar-10-binary.tar.gz",
    ),
}

MNIST_IMAGES = 70_000
MNIST_TRAIN_IMAGES = 60_000
MNIST_FIRST_LABELS = [5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5, 3, 6, 1, 7]  # of its training file


def load(
    name: str, data_dir: str | Path | None = None, *, download: bool = True, progress: Progress | None = None
) -> Pool:
    """A published set: "mnist", "fashion-mnist" or "cifar10".

    The last two are looked for in data_dir, in the folder that PFEDBAYES_DATA names, in the user's cache and in
    the folder of Debian's package, and are downloaded into the cache if they are in none of them.
    """
    if name == "mnist":
        return _load_bundled_mnist()
    if name not in SOURCES:
        raise UserError(f'there is no data set "{name}": choose "mnist", "fashion-mnist" or "cifar10"')
    source = SOURCES[name]
    folder = _locate(source, data_dir)
    if folder is None:
        if not download:
            raise UserError(f"{name} is not on this machine: {_ways_to_get(source)}")
        folder = _download(name, source, progress)
    pool = _assemble(source, _read_files(source, folder))
    if name == "fashion-mnist" and pool.y[: len(MNIST_FIRST_LABELS)].tolist() == MNIST_FIRST_LABELS:
        raise UserError(f"{folder} holds the digits of MNIST, not Fashion-MNIST: give another folder")
    return pool


@dataclass(frozen=True)
class Availability:
    """found is the folder a set lies in, "bundled", or None; how_to_get is empty if it was found."""

    name: str
    images: int
    found: str | None
    how_to_get: str


def available(data_dir: str | Path | None = None) -> list[Availability]:
    """What `load` would find on this machine, without reading it."""
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
    """The three ways to a set that is not on this machine."""
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
    """The first folder that holds all files of a set."""
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
            raise UserError(f"{folder} cannot be read ({error.strerror}): make it readable") from error
        if complete:
            return folder
        # The cache may hold a part of the files after a download that was cut off.
        if len(missing) < len(source.files) and not folder.is_relative_to(cache):
            raise UserError(f"{folder} lacks {missing[0]}: put it beside the others or give another folder")
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
    """The records of each file of a set: one array (count, width) per file."""
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
                content = stream.read(file.length + 1)  # one more than there should be, to notice if there is
        except (OSError, EOFError, zlib.error) as error:
            raise _damaged(str(path), f"cannot be read ({error})") from error
        records.append(_records(file, content, source.shape, str(path)))
    return records


def _read_archive(source: Source, path: Path) -> list[NDArray[np.uint8]]:
    """The same from the published archive, in one pass and without unpacking anything onto the disk."""
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
    """The records of one file, (count, width), once its header, its length and its labels have been checked."""
    if not content.startswith(file.header):
        raise _damaged(where, f"does not begin like {file.name}: wrong magic number or sizes")
    if len(content) != file.length:
        extent = "more than" if len(content) > file.length else f"{len(content)} of"
        raise _damaged(where, f"has {extent} the {file.length} bytes of {file.name}")
    records = np.frombuffer(content, np.uint8, offset=len(file.header)).reshape(file.count, file.width)
    if file.width != math.prod(shape) and records[:, 0].max() >= NUM_CLASSES:
        raise _damaged(where, f"has the label {records[:, 0].max()}, and labels are 0 to {NUM_CLASSES - 1}")
    return records


def _damaged(where: str, what: str) -> UserError:
    return UserError(f"{where} {what}: put the published file in its place, or delete it and run again")


def _assemble(source: Source, files: list[NDArray[np.uint8]]) -> Pool:
    """Images and labels out of the records, whether they share a file or have files of their own."""
    pixels = math.prod(source.shape)
    images = [records[:, -pixels:] for records in files if records.shape[1] >= pixels]
    labels = [records[:, 0] for records in files if records.shape[1] != pixels]
    x = torch.from_numpy(np.concatenate(images)).reshape(-1, *source.shape)
    y = torch.from_numpy(np.concatenate(labels).astype(np.int64))
    return Pool(x, y, NUM_CLASSES, official_train_count=len(x) - len(images[-1]))


def _load_bundled_mnist() -> Pool:
    """All images, train then test, and then all labels, as scripts/bundle_mnist.py has put them together."""
    try:
        packed = resources.files("pfedbayes.data").joinpath("bundled/mnist.xz").read_bytes()
        content = bytearray(lzma.decompress(packed))
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise UserError(f"the MNIST file inside the package cannot be read ({error}): reinstall it") from error
    pixels = MNIST_IMAGES * 28 * 28
    flat = torch.frombuffer(content, dtype=torch.uint8)
    if len(flat) != pixels + MNIST_IMAGES or int(flat[pixels:].max()) >= NUM_CLASSES:
        raise UserError("the MNIST file inside the package is damaged: reinstall the package")
    x, y = flat[:pixels].reshape(-1, 1, 28, 28), flat[pixels:].to(torch.int64)
    return Pool(x, y, NUM_CLASSES, MNIST_TRAIN_IMAGES)


def _download(name: str, source: Source, progress: Progress | None) -> Path:
    """Fetch what the cache lacks of a set, and return its folder there."""
    folder = _cache(source)
    for item in source.downloads:
        if not (folder / item.file_name).is_file():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _fetch(item, folder / item.file_name, progress)
            except (OSError, http.client.HTTPException) as error:
                cause = getattr(error, "reason", error)
                if isinstance(error, urllib.error.HTTPError):
                    error.close()  # it holds the connection
                raise UserError(
                    f"{name} is not on this machine and {item.url} could not be downloaded ({cause}): "
                    + _ways_to_get(source)
                ) from error
    return folder


def _fetch(item: Download, target: Path, progress: Progress | None) -> None:
    """Download one file. `target` appears only when it is complete and has the published checksum."""
    digest, received = hashlib.md5(usedforsecurity=False), 0
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
        part = Path(file.name)
        try:
            # The URL is one of the table above, so it has no scheme that could read a local file.
            with urllib.request.urlopen(item.url, timeout=NETWORK_TIMEOUT) as answer:  # noqa: S310
                expected = int(answer.headers.get("Content-Length", 0))
                while chunk := answer.read(CHUNK):
                    file.write(chunk)
                    digest.update(chunk)
                    received += len(chunk)
                    if progress:
                        progress(target.name, received, expected)
            if received < expected:
                raise UserError(f"{item.url} broke off after {received} of {expected} bytes: run again")
            if digest.hexdigest() != item.md5:
                raise UserError(
                    f"{item.url} has the checksum {digest.hexdigest()} instead of {item.md5}: run again, "
                    "or give the published files with --data-dir"
                )
            file.flush()
            os.fsync(file.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def blobs(per_class: int, classes: int, features: int, noise: float, seed: int) -> Pool:
    """Gaussian blobs: x = m_y + noise * g, with class means m ~ N(0, I); classes by turns, `per_class` of each."""
    generator = np.random.default_rng(seed)
    means = generator.standard_normal((classes, features))
    y = np.tile(np.arange(classes), per_class)
    x = means[y] + noise * generator.standard_normal((len(y), features))
    return Pool(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y), classes, len(y))


def regression(clients: int, examples: int, features: int, noise: float, seed: int) -> Pool:
    """The paper's Eq. (1), y = f^i(x) + eps with eps ~ N(0, noise^2), client by client: rows i * examples, ...

    f^i(x) = a^i . tanh(A x + b), x uniform on [-1, 1]^features. The clients share A and b, and their a^i lie
    around a common a, so each has something to learn from the others and something of its own.
    """
    units, difference = 16, 0.3
    generator = np.random.default_rng(seed)
    slopes = 2 * generator.standard_normal((units, features))
    offsets = generator.standard_normal(units)
    common = generator.standard_normal(units)
    heights = (common + difference * generator.standard_normal((clients, units))) / math.sqrt(units)
    x = generator.uniform(-1, 1, (clients, examples, features))
    f = np.einsum("iu,inu->in", heights, np.tanh(x @ slopes.T + offsets))
    y = f + noise * generator.standard_normal((clients, examples))
    return Pool(
        torch.from_numpy(x.reshape(-1, features).astype(np.float32)),
        torch.from_numpy(y.reshape(-1, 1).astype(np.float32)),
        num_classes=None,
        official_train_count=clients * examples,
    )
