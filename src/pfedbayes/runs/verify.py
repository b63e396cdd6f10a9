"""Compare the files of a run folder, a node's state folder or a single file with their checksums."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pfedbayes import runs
from pfedbayes.errors import UserError
from pfedbayes.files.checksums import check_json
from pfedbayes.files.reading import open_regular, parse_json, read_bytes, reading
from pfedbayes.files.tensors import open_tensors
from pfedbayes.runs.folder import LARGEST_LOG

REMEDY = "put back a copy of it"
Verdict = Literal["intact", "no checksum", "damaged"]


@dataclass(frozen=True)
class FileCheck:
    """What became of the check of one file."""

    path: Path
    verdict: Verdict
    reason: str | None = None
    """What is wrong with a damaged file."""


def verify(path: Path) -> Iterator[FileCheck]:
    """Check a file, or all files below a folder that have checksums. Links inside a folder are not followed."""
    with reading(path, "give a run folder or a file of one"):
        if path.is_dir():
            files = sorted(found for found in path.rglob("*") if found.name in CHECKS or found.suffix in CHECKS)
        else:
            path.stat()
            files = [path]
    if not files:
        raise UserError(f"{path} holds no file with a checksum: give a run folder or a file of one")
    follow = path in files
    for file in files:
        check = CHECKS.get(file.name) or CHECKS.get(file.suffix)
        if check is None:
            raise UserError(f"{file} is of a kind without checksums: give a file that pfedbayes has written")
        yield _outcome(file, lambda file=file, check=check: check(file, follow))  # type: ignore[misc]
    if (path / runs.INFO).exists():
        yield _outcome(path, lambda: _whole(path))


def _outcome(path: Path, check: Callable[[], bool]) -> FileCheck:
    try:
        with reading(path, REMEDY):
            return FileCheck(path, "intact" if check() else "no checksum")
    except UserError as error:
        return FileCheck(path, "damaged", str(error))


def _json(path: Path, follow: bool) -> bool:
    content = read_bytes(path, follow)
    parse_json(content)
    return check_json(content)


def _lines(path: Path, follow: bool) -> bool:
    checked = True
    for line in read_bytes(path, follow, largest=LARGEST_LOG).splitlines():
        parse_json(line)
        checked = check_json(line) and checked
    return checked


def _tensors(path: Path, follow: bool) -> bool:
    with open_tensors(path, REMEDY, follow=follow) as file:
        return file.checked


def _clients(path: Path, follow: bool) -> bool:
    """Check the rows of all clients that the state beside the file refers to."""
    checkpoint = runs.read_checkpoint(path.parent)
    tensors = checkpoint.tensors if checkpoint else {}
    if not {"rows", "witness", "checksums"} <= tensors.keys():
        return False
    row_bytes = int(tensors["witness"][0])
    with open_regular(path, follow) as file:
        if not 0 < row_bytes <= os.fstat(file.fileno()).st_size:
            raise ValueError("it is too short")
        for row, checksum in zip(tensors["rows"].tolist(), tensors["checksums"].tolist(), strict=True):
            file.seek(row * row_bytes)
            if zlib.crc32(file.read(row_bytes)) != checksum:
                raise ValueError(f"row {row} does not match its checksum")
    return True


def _whole(folder: Path) -> bool:
    """Read a run folder as every command does, which also notices missing checksums and parts that do not fit."""
    checkpoint = runs.read_checkpoint(folder)
    run = runs.read_run(folder, checkpoint.log_bytes if checkpoint else None)
    return run.info.format == runs.FORMAT


CHECKS: dict[str, Callable[[Path, bool], bool]] = {
    ".json": _json,
    ".jsonl": _lines,
    ".safetensors": _tensors,
    runs.CLIENTS: _clients,
}
