"""Writing files so that a kill or a full disk never leaves a broken one behind."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pfedbayes.errors import UserError

# Windows lacks these flags, and folders that can be opened.
NO_DETOUR = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
NO_DETOUR |= getattr(os, "O_BINARY", 0)


def write_file(path: Path, content: str | bytes, hint: str = "", mode: int = 0o666) -> None:
    """Write a file as a whole, see `replacing`."""
    with replacing(path, hint, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path, hint: str = "", mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` at the end, once it is on the disk.

    After a kill or an error `path` holds the old content or the new one, never a part of it. No symbolic link is
    followed: a link at `path` is replaced. mode: the permissions of the file, less those that the umask takes away.
    """
    refuse_folder(path)
    aside = path.with_name(f".{path.name}.part")
    with writing(path, hint):
        try:
            with open_to_write(aside, os.O_WRONLY | os.O_TRUNC, mode) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        if os.name == "posix":
            directory = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)


def open_to_write(path: Path, flags: int = os.O_WRONLY | os.O_APPEND, mode: int = 0o666) -> BinaryIO:
    """Open a file to write to it, by default at its end; create it if it is missing.

    Do not follow a symbolic link, and raise OSError for anything but a regular file, such as a pipe, at once.
    """
    descriptor = os.open(path, flags | os.O_CREAT | NO_DETOUR, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "it is not a file")
    return os.fdopen(descriptor, "r+b" if flags & os.O_RDWR else "wb")


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
    except (OSError, ValueError) as error:  # a path with a NUL character is a ValueError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"cannot write to {path} ({reason}): free space or give another path{hint}") from None
