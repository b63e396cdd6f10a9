"""Where a result comes from: the hardware, the versions, the code and the time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import pfedbayes
from pfedbayes.files.reading import parse_json, read_bytes
from pfedbayes.files.typed import from_json


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


GIT_SECONDS = 60  # a busy machine takes long to look at a checkout
MANIFEST = "manifest.json"  # written by scripts/manifest.py
CODE = ("src", "benchmarks", "experiments", "scripts")  # folders of a checkout that a manifest vouches for


_COMMIT = re.compile(r"[\w.+/-]{1,100}")  # what git describes


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    commit: str
    digest: str
    """Of the code that the commit has."""


def describe_code() -> dict[str, Any]:
    """Return the version of the package, a digest of its source files and, in a checkout, the commit."""
    here = Path(__file__).parents[1]
    source = digest_of(here, sorted(here.rglob("*.py")))
    return {"version": pfedbayes.__version__, "commit": _commit(here), "source": source[:16]}


def _commit(here: Path) -> str | None:
    """Return the commit of a checkout: of the manifest if it describes this code, else of git."""
    root, recorded = here.parents[1], None
    with contextlib.suppress(OSError, ValueError):
        manifest = from_json(Manifest, parse_json(read_bytes(root / MANIFEST, follow=False)))
        recorded = (
            manifest.commit if here == root / CODE[0] / here.name and _COMMIT.fullmatch(manifest.commit) else None
        )
        if recorded and manifest.digest == digest_of_code(root):
            return recorded
    git = ["git", "-C", str(here)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        tracked = subprocess.run(
            [*git, "ls-files", "--error-unmatch", __file__], check=False, capture_output=True, timeout=GIT_SECONDS
        )
        if tracked.returncode == 0:
            found = subprocess.run(
                [*git, "describe", "--always", "--dirty"],
                check=False,
                capture_output=True,
                text=True,
                timeout=GIT_SECONDS,
            )
            return found.stdout.strip() or None
    return recorded and f"{recorded}-dirty"


def digest_of_code(root: Path) -> str:
    """Return a digest of all code and settings of a checkout."""
    files = (path for folder in CODE for pattern in ("*.py", "*.toml") for path in (root / folder).rglob(pattern))
    return digest_of(root, sorted(files))


def digest_of(root: Path, paths: Iterable[Path]) -> str:
    """Return the SHA-256 digest of files and of their paths below a folder."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def now() -> str:
    """Return the time in UTC, in a form that sorts."""
    return datetime.now(UTC).isoformat(timespec="seconds")
