"""Locks on open files, which end with the process that holds them. Windows has no shared locks: they are exclusive."""

from __future__ import annotations

import os
import sys
import time
from typing import IO

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int, shared: bool, wait: bool) -> bool:
        os.lseek(descriptor, 0, os.SEEK_SET)
        while True:
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            except OSError:
                if not wait:
                    return False
                time.sleep(PAUSE)
            else:
                return True

else:
    import fcntl

    def _lock(descriptor: int, shared: bool, wait: bool) -> bool:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True


PAUSE = 0.1  # seconds between two attempts on Windows


def lock(file: int | IO[bytes], shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file, and return whether this succeeded: False if another process holds it.

    shared: allow other shared locks. wait: wait until the file is free.
    """
    return _lock(file if isinstance(file, int) else file.fileno(), shared, wait)
