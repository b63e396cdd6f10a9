"""Read NPZ files: zip archives of arrays. Sizes are checked before memory is taken, and no object is unpickled."""

from __future__ import annotations

import lzma
import math
import sys
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedbayes.data.own.columns import Budget
from pfedbayes.errors import UserError, one_line
from pfedbayes.files.reading import open_regular

SUFFIX = ".npy"
ENCRYPTED = 1  # flag of an archive's member
# What zipfile, its decompressors and NumPy raise for damaged archives.
DAMAGED = (
    ValueError, EOFError, RuntimeError, OverflowError, KeyError, SyntaxError, tokenize.TokenError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip


def read_arrays(path: Path, budget: Budget) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
    """Return the array x (n, ...) of an NPZ file and its other arrays, all of n rows."""
    try:
        with open_regular(path) as binary, zipfile.ZipFile(binary) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(SUFFIX)]
            budget.spend(sum(member.file_size for member in members), str(path))
            arrays = {member.filename.removesuffix(SUFFIX): _read_member(archive, member) for member in members}
    except DAMAGED as error:
        raise UserError(
            f"{path} cannot be read as NPZ ({one_line(error)}): save it with numpy.savez, without objects"
        ) from None
    x = arrays.pop("x", None)
    if x is None or not x.ndim or x.dtype.kind not in "biuf":
        raise UserError(f"{path} has no numeric array x: save x and y in it, and client if it holds all clients")
    if not x.size:
        raise UserError(f"{path}: x has the shape {x.shape}, without any number: add examples")
    for name, array in arrays.items():
        if not array.ndim or len(array) != len(x):
            held = f"{len(array)}" if array.ndim else "a single value"
            raise UserError(f"{path}: x has {len(x)} rows and {name} has {held}: give one entry per example")
    return x[:, None] if x.ndim == 1 else x, arrays


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    if member.flag_bits & ENCRYPTED:
        raise ValueError(f"{member.filename} is encrypted")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if read_header is not None:  # others have fields with names that are not Latin-1, and cannot be columns
            shape, _, dtype = read_header(file)
            if math.prod(shape) * dtype.itemsize > member.file_size or min(shape, default=0) < 0:
                raise ValueError(f"{member.filename} claims the shape {shape}, but holds {member.file_size} bytes")
    with archive.open(member) as file:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    if array.dtype.kind == "U":  # four bytes per character, in the order of the array
        points = np.frombuffer(array.tobytes(), dtype=np.dtype("u4").newbyteorder(array.dtype.byteorder))
        if (points > sys.maxunicode).any():
            raise ValueError(f"{member.filename} holds what is no text")
    return array
