"""Safetensors files that are written piece by piece, so that memory never holds a copy of all tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

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
    """Write what `safetensors.torch.save` would: the header's length, the header and the tensors; about: metadata."""
    # Wide types first, so that each tensor begins at a multiple of its width.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.dtype.itemsize * math.prod(tensor.shape)
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        for piece in _pieces(tensors[name]):
            file.write(piece.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


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
