"""Read the first sheet of an Excel file."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pfedbayes.data.own.columns import Budget
from pfedbayes.errors import UserError, one_line
from pfedbayes.files.reading import open_regular

EXCEL = ".xlsx"


def optional(module: str, extra: str, purpose: str) -> Any:
    """Import an optional dependency."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".", maxsplit=1)[0]
        raise UserError(f"{purpose} needs {package}: pip install 'pfedbayes[{extra}]'") from None


def sheet_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of the first sheet with their numbers, every cell as text; formulas as their last values."""
    openpyxl = optional("openpyxl", "excel", f"reading {path}")
    with open_regular(path) as binary:
        try:
            with zipfile.ZipFile(binary) as archive:
                Budget().require(sum(member.file_size for member in archive.infolist()), str(path))
            book = openpyxl.load_workbook(binary, read_only=True, data_only=True)
            for number, row in enumerate(book.worksheets[0].iter_rows(values_only=True), 1):
                yield number, ["" if cell is None else str(cell) for cell in row]
        except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError, zipfile.BadZipFile,
                ElementTree.ParseError) as error:  # fmt: skip
            raise UserError(f"{path} cannot be read as Excel ({one_line(error)}): save it again") from None
