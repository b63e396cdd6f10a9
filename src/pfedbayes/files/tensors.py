"""Safetensors files, written piece by piece, so that memory never holds a copy of all tensors, and read back."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from pfedbayes.files.checksums import BLANK, FIELD, LONGEST_PREFIX, check_tensors
from pfedbayes.files.reading import open_regular, reading

PIECE_BYTES = 2**26  # large enough for a disk, small compared to a checkpoint

TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64",
}  # fmt: skip


class Rows(NamedTuple):
    """Rows of a tensor that are copied only when they are written. Until then they must not change."""

    like: Tensor
    """One of the rows."""
    number: int
    """The number of rows."""
    take: Callable[[slice], Tensor]
    """Copy these rows."""

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.number, *self.like.shape


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor | Rows], about: dict[str, str]) -> None:
    """Write what `safetensors.torch.save` would: the header's length, the header and the tensors; about: metadata.

    The metadata begin with a checksum of everything, which is filled in at the end.
    """
    # Wide types first, so that each tensor begins at a multiple of its width.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {FIELD: BLANK, **about}}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.dtype.itemsize * math.prod(tensor.shape)
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    opening = len(text).to_bytes(8, "little") + text
    hashed = hashlib.sha256(opening)
    file.write(opening)
    for name in names:
        for piece in _pieces(tensors[name]):
            content = piece.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            hashed.update(content)
            file.write(content)
    file.seek(opening.index(BLANK.encode()))
    file.write(hashed.hexdigest().encode())
    file.seek(0, io.SEEK_END)


def tensor_bytes(tensors: Mapping[str, Tensor], about: dict[str, str]) -> bytes:
    """Return the content of a small file, see `write_tensors`."""
    file = io.BytesIO()
    write_tensors(file, tensors, about)
    return file.getvalue()


_checked: dict[tuple[int, ...], bool] = {}  # by version of a file: whether it has a checksum, which matched


class TensorFile:
    """An open safetensors file, of which single tensors are read."""

    def __init__(self, file: Any, checked: bool) -> None:
        self._file = file
        self.checked = checked
        """Whether the file has a checksum, which matched."""
        self.about: dict[str, str] = {name: text for name, text in (file.metadata() or {}).items() if name != FIELD}
        """The metadata."""
        self.names: frozenset[str] = frozenset(file.keys())

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        tensor: Tensor = self._file.get_tensor(self._require(name))
        return tensor

    def row(self, name: str, row: int) -> Tensor:
        """Read one row of a tensor."""
        tensor: Tensor = self._file.get_slice(self._require(name))[row : row + 1]
        return tensor[0]

    def tensors(self) -> dict[str, Tensor]:
        """Read all tensors."""
        return {name: self.tensor(name) for name in sorted(self.names)}

    def _require(self, name: str) -> str:
        if name not in self.names:
            raise ValueError(f"it has no tensor {name}")
        return name


@contextlib.contextmanager
def open_tensors(path: Path, remedy: str, fault: str = "is damaged", follow: bool = True) -> Iterator[TensorFile]:
    """Open a safetensors file and compare its checksum; what is wrong with it, then or later, becomes a UserError."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415  training alone does not need it

    with reading(path, remedy, fault):
        with open_regular(path, follow) as content:
            found = os.fstat(content.fileno())
            version = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
            if version not in _checked:  # reading one client after another, do not read the whole file for each
                pieces = iter(lambda: content.read(max(PIECE_BYTES, LONGEST_PREFIX)), b"")
                _checked[version] = check_tensors(pieces)
            checked = _checked[version]
        try:
            with safe_open(path, framework="pt") as file:
                yield TensorFile(file, checked)
        except (SafetensorError, RuntimeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(error) from None


def _pieces(tensor: Tensor | Rows) -> Iterator[Tensor]:
    if isinstance(tensor, Tensor):
        yield tensor
    else:
        step = rows_at_once(tensor.like.nbytes)
        for start in range(0, tensor.number, step):
            yield tensor.take(slice(start, start + step))


def rows_at_once(row_bytes: int) -> int:
    """Return how many rows make a piece; row_bytes: the size of one row."""
    return max(1, PIECE_BYTES // max(1, row_bytes))
