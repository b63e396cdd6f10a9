"""The template of a Flower app, which users fill with their data and network."""

from __future__ import annotations

import shutil
from pathlib import Path

from pfedbayes.errors import UserError

TEMPLATE = Path(__file__).parent / "template"


def write_app(folder: Path) -> list[Path]:
    """Write the app into a new or empty folder and return its files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty: give a new folder")
    try:
        shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error}): give another folder") from None
    return sorted(path for path in folder.rglob("*") if path.is_file())
