"""Where a result comes from: the hardware, the versions, the code and the time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import pfedbayes


def describe_machine() -> dict[str, Any]:
    """Return the hardware of this machine and the versions of torch and Python."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def describe_code() -> dict[str, Any]:
    """Return the version of the package, a digest of its source files and, in a checkout, the commit."""
    here = Path(__file__).parents[1]
    source = hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        source.update(f"{path.relative_to(here).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    git = ["git", "-C", str(here)]
    commit = None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", __file__], check=False, capture_output=True, timeout=10
        )
        if tracked.returncode == 0:
            found = subprocess.run(
                [*git, "describe", "--always", "--dirty"], check=False, capture_output=True, timeout=10, text=True
            )
            commit = found.stdout.strip() or None
    return {"version": pfedbayes.__version__, "commit": commit, "source": source.hexdigest()[:16]}


def now() -> str:
    """Return the time in UTC, in a form that sorts."""
    return datetime.now(UTC).isoformat(timespec="seconds")
