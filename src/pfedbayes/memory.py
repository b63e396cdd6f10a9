"""How much memory there is, who keeps it, and what is kept in it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# Of mallopt, from glibc's malloc.h.
TRIM_THRESHOLD, MMAP_MAX = -1, -4
MOST_KEPT = 2**31 - 1  # bytes; it takes no more


def host_memory() -> int:
    """Bytes of memory that this process may hope for."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max", or no such file: no limit
        return min(physical, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return physical


@cache
def keep_freed_memory() -> None:
    """Let the C library keep what is freed for what is allocated next, up to two GB.

    Large tensors it would give back to the system at once, and get anew page by page, each of which is cleared first:
    that takes several times as long as to write to memory that one has. Whoever has set up the library stays in charge;
    other libraries than glibc are left as they are.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    with contextlib.suppress(AttributeError):  # no such function
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, MOST_KEPT)


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """No garbage is collected: a recording for a GPU that is thrown away while another is being made would spoil it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def give_back_locked_memory() -> None:
    """Let the system have page-locked memory that nobody uses any more; the oldest versions of torch keep it."""
    getattr(torch.accelerator, "empty_host_cache", lambda: None)()


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """The values on a device. A GPU is not waited for: it fetches them when it comes to that."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def in_memory(values: Tensor) -> Tensor:
    """The values as they are: the compiler for GPUs would else compute them anew wherever they are used."""
    values = values.contiguous()
    return values.as_strided(values.shape, values.stride())
