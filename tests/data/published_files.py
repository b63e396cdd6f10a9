"""Small copies of the published data sets, as bytes."""

import gzip
import hashlib
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from pfedbayes.errors import UserError

TRAIN, TEST, SIDE = 30, 20, 28
BATCH = 12
CACHE = "cache/pfedbayes"


def fashion_bytes() -> dict[str, bytes]:
    """The four idx files, written out by hand: pixels are random, label j of a file is j mod 10."""
    rng = np.random.default_rng(0)
    files = {}
    for part, count in (("train", TRAIN), ("t10k", TEST)):
        pixels = rng.integers(0, 256, (count, SIDE, SIDE), dtype=np.uint8)
        files[f"{part}-images-idx3-ubyte"] = struct.pack(">IIII", 2051, count, SIDE, SIDE) + pixels.tobytes()
        files[f"{part}-labels-idx1-ubyte"] = struct.pack(">II", 2049, count) + bytes(j % 10 for j in range(count))
    return files


def cifar_bytes() -> dict[str, bytes]:
    """The six batches: record j of a batch has label j mod 10 and random planes."""
    rng = np.random.default_rng(1)
    names = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]
    return {f"{name}.bin": b"".join(bytes([j % 10]) + rng.bytes(3072) for j in range(BATCH)) for name in names}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def gzipped(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in files.items()}


def tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message
