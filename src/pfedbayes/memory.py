"""Memory of the host and of the device: size, allocation, layout of tensors."""

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

from pfedbayes.errors import UserError

# Parameters of mallopt, from glibc's malloc.h.
TRIM_THRESHOLD, MMAP_MAX = -1, -4
MOST_KEPT = 2**31 - 1  # bytes, the largest value that mallopt accepts


def host_memory() -> int:
    """Return the bytes of memory that this process may use: physical memory, or the container's limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # the file is missing or says "max": no limit
        return min(physical, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return physical


def device_memory(device: torch.device) -> int:
    """Return the bytes of memory of a device; for the CPU, of the host."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory()


def refuse_too_large(needed: int, available: int, what: str, remedy: str) -> None:
    """Refuse what cannot fit into memory, before it is allocated. needed: a lower bound, in bytes."""
    if needed > available:
        raise UserError(
            f"{what} needs at least {needed / 1e9:,.0f} GB of memory, and there are {available / 1e9:,.0f} GB: reduce "
            f"{remedy}"
        )


@cache
def keep_freed_memory() -> None:
    """Let the C library keep up to 2 GB of freed memory for later allocations.

    By default glibc returns large tensors to the system at once. The system then hands out cleared pages again, which
    takes several times as long as writing to memory that the process already has. Settings of the user in the
    environment take precedence. Other C libraries do not change.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    with contextlib.suppress(AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, MOST_KEPT)


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Pause garbage collection. Freeing a CUDA graph while another one is being captured would break the capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def give_back_locked_memory() -> None:
    """Return unused page-locked memory to the system, if this version of torch can."""
    getattr(torch.accelerator, "empty_host_cache", lambda: None)()


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to a device, asynchronously if it is a GPU."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def in_memory(values: Tensor) -> Tensor:
    """Return the values, written to memory. Otherwise the GPU compiler recomputes them wherever they are used."""
    values = values.contiguous()
    return values.as_strided(values.shape, values.stride())
