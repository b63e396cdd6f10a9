"""Writing files so that a kill or a full disk never leaves a broken one behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pfedbayes.errors import UserError


def write_file(path: Path, content: str | bytes, hint: str = "") -> None:
    """Write a file as a whole, see `replacing`."""
    with replacing(path, hint) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path, hint: str = "") -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` at the end, once it is on the disk.

    After a kill or an error `path` holds the old content or the new one, never a part of it.
    """
    refuse_folder(path)
    aside = path.with_name(f".{path.name}.part")
    with writing(path, hint):
        try:
            with aside.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def refuse_folder(path: Path) -> None:
    """Refuse to write a file over a folder."""
    with writing(path):
        if path.is_dir():
            raise UserError(f"{path} is a folder: give the name of a file")


@contextlib.contextmanager
def writing(path: Path, hint: str = "") -> Iterator[None]:
    """Turn an error of the file system into a UserError that ends with `hint`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to {path} ({error.strerror or error}): free space or give another path{hint}"
        ) from None
