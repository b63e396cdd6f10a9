"""A disk that fails, fills up, or goes down with the process at the k-th thing that is done to it."""

import builtins
import errno
import io
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Way = Literal["count", "fail", "full", "kill"]
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Disk:
    """Watches what this process does to the files below a folder.

    way: "fail" lets the operation number `at` fail with an input/output error. "full" lets it and all later ones fail
    that need space; half of what was to be written is written. "kill" ends the process in the middle of it.
    """

    def __init__(self, root: Path, way: Way = "count", at: int = 0) -> None:
        self._root, self._way, self._at = f"{root.resolve()}/", way, at
        self.done: list[str] = []
        self._lock = threading.Lock()

    def install(self) -> None:
        """Put the disk between this process and the operating system, for good."""
        for name in ("rename", "replace", "link", "symlink", "unlink", "remove", "rmdir", "mkdir", "truncate", "chmod"):
            self._wrap(
                name, lambda name, args: [path for path in args[:2] if isinstance(path, str | bytes | os.PathLike)]
            )
        for name in (
            "fsync",
            "fdatasync",
            "ftruncate",
            "fchmod",
            "posix_fallocate",
            "write",
            "pwrite",
            "writev",
            "pwritev",
        ):
            self._wrap(name, lambda name, args: [args[0]])
        real_open = os.open

        def low_open(path: Any, flags: int, *args: Any, **more: Any) -> int:
            if flags & WRITES:
                self._meet("open", [path])
            return real_open(path, flags, *args, **more)

        os.open = low_open
        high_open = io.open
        raw = self._raw()

        def open_(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
                  newline: Any = None, closefd: bool = True, opener: Any = None) -> Any:  # fmt: skip
            if not set(mode) & set("wax+"):
                return high_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
            if not isinstance(file, int):
                self._meet("open", [file])
            plain = raw(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return plain
            buffered = io.BufferedRandom(plain) if "+" in mode else io.BufferedWriter(plain)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

        io.open = builtins.open = open_  # type: ignore[assignment]

    def _raw(self) -> type[io.FileIO]:
        meet = self._meet

        class Raw(io.FileIO):
            def write(self, content: Any) -> int:
                view = memoryview(content).cast("B")
                meet("write", [self.fileno()], lambda: super(Raw, self).write(view[: len(view) // 2]))
                return super().write(content)

            def truncate(self, size: int | None = None) -> int:
                meet("truncate", [self.fileno()])
                return super().truncate(size)

        return Raw

    def _wrap(self, name: str, targets: Callable[[str, tuple[Any, ...]], list[Any]]) -> None:
        real = getattr(os, name)

        def wrapped(*args: Any, **more: Any) -> Any:
            self._meet(name, targets(name, args))
            return real(*args, **more)

        setattr(os, name, wrapped)

    def _meet(self, name: str, targets: list[Any], half: Callable[[], object] | None = None) -> None:
        """Count an operation; fail or end here if its time has come."""
        paths = [self._path(target) for target in targets]
        if not any(path.startswith(self._root) for path in paths):
            return
        with self._lock:
            self.done.append(f"{name} {paths[-1].removeprefix(self._root)}")
            number = len(self.done)
        if self._way == "kill" and number == self._at:
            if half:
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._way == "fail" and number == self._at:
            raise OSError(errno.EIO, "Input/output error")
        if (
            self._way == "full"
            and number >= self._at
            and name not in ("unlink", "remove", "rmdir", "truncate", "rename", "replace")
        ):
            if half and number == self._at:
                half()
            raise OSError(errno.ENOSPC, "No space left on device")

    @staticmethod
    def _path(target: Any) -> str:
        if isinstance(target, int):
            try:
                return str(Path(f"/proc/self/fd/{target}").readlink())
            except OSError:
                return ""
        return os.path.abspath(os.fsdecode(target))  # noqa: PTH100  links are not followed
