"""How much memory there is."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def host_memory() -> int:
    """Bytes of memory that this process may hope for."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max", or no such file: no limit
        return min(physical, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return physical
