"""Tensors in a safetensors file that is written piece by piece: there is never a copy of all of them in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

PIECE_BYTES = 2**26  # large enough for a disk, small beside what is worth to be written in pieces

TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64",
}  # fmt: skip


class Rows(NamedTuple):
    """So many rows like this one. They are copied when they are written, a part at a time: until then they must not
    change."""

    like: Tensor
    number: int
    take: Callable[[slice], Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.number, *self.like.shape


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor | Rows], about: dict[str, str]) -> None:
    """Write a file of the content that `safetensors.torch.save` would give it: the length of a header, the header, and
    the tensors one after another."""
    # Wide types first: each tensor then begins at a multiple of its width.
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
    """How many rows of so many bytes make a piece."""
    return max(1, PIECE_BYTES // max(1, row_bytes))
