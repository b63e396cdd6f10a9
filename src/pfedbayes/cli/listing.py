"""Commands that list methods and data sets."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pfedbayes.cli.common import console
from pfedbayes.errors import printable


def methods() -> None:
    """List the methods with their references, settings and defaults, those of installed plugins too."""
    from pfedbayes.runs.naming import all_methods

    table = Table(show_lines=True)
    table.add_column("name", no_wrap=True)
    table.add_column("learns", ratio=3)
    table.add_column("models", no_wrap=True)
    table.add_column("settings (method.…) and defaults", ratio=4)
    for name, method in all_methods().items():
        settings = ", ".join(f"{field.name}={json.dumps(field.default)}" for field in dataclasses.fields(method))
        models = "\n".join(which for which in ("personal", "shared") if getattr(method.about, which))
        table.add_row(name, f"{method.about.learns} ({method.about.title}: {method.about.reference})", models, settings)
    console().print(table)


def data(
    data_dir: Annotated[Path | None, typer.Option(help="Look in this folder first.")] = None,
) -> None:
    """List the data sets: where each was found, or how to get it."""
    from pfedbayes.data import available

    table = Table(show_lines=True)
    for heading in ("name", "images", "found", "how to get it"):
        table.add_column(heading, overflow="fold")
    for source in available(data_dir):
        table.add_row(source.name, f"{source.images:,}", printable(str(source.found or "–")), source.how_to_get)
    console().print(table)
