"""Commands that list methods, data sets and experiments."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pfedbayes.cli.common import Json, console, echo
from pfedbayes.errors import UserError, nearest, printable
from pfedbayes.files.writing import write_file


def methods(as_json: Json = False) -> None:
    """List the methods with their references, settings and defaults."""
    from pfedbayes.methods import METHODS

    if as_json:
        found = {
            name: method.about._asdict()
            | {"settings": {field.name: field.default for field in dataclasses.fields(method)}}
            for name, method in METHODS.items()
        }
        typer.echo(json.dumps(found))
        return
    table = Table(show_lines=True)
    table.add_column("name", no_wrap=True)
    table.add_column("learns", ratio=3)
    table.add_column("models", no_wrap=True)
    table.add_column("settings (method.…) and defaults", ratio=4)
    for name, method in METHODS.items():
        settings = ", ".join(f"{field.name}={json.dumps(field.default)}" for field in dataclasses.fields(method))
        models = "\n".join(which for which in ("personal", "shared") if getattr(method.about, which))
        table.add_row(name, f"{method.about.learns} ({method.about.title}: {method.about.reference})", models, settings)
    console().print(table)


def data(
    data_dir: Annotated[Path | None, typer.Option(help="Look in this folder first.")] = None,
    as_json: Json = False,
) -> None:
    """List the data sets: where each was found, or how to get it."""
    from pfedbayes.data import available

    if as_json:
        sources = (dataclasses.asdict(source) for source in available(data_dir))
        typer.echo(json.dumps({source.pop("name"): source for source in sources}, default=str))
        return
    table = Table(show_lines=True)
    for heading in ("name", "images", "found", "how to get it"):
        table.add_column(heading, overflow="fold")
    for source in available(data_dir):
        table.add_row(source.name, f"{source.images:,}", printable(str(source.found or "–")), source.how_to_get)
    console().print(table)


def experiments(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]…", help="Files to write. Default: none; with --out alone, all."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write to. Default: the current one.")] = None,
    as_json: Json = False,
) -> None:
    """List the experiments and examples that come with the package, or write them to files.

    Examples:

    pfedbayes experiments                                     what there is

    pfedbayes experiments mnist_medium.toml                   write one of them here

    pfedbayes experiments --out paper                         write all of them
    """
    found = {path.name: path for path in _bundled()}
    if names or out:
        for name in names or found:
            if name not in found:
                raise UserError(f"there is no experiment or example {name!r}: {nearest(name, found)}")
            target = (out or Path()) / name
            if target.exists():
                raise UserError(f"{target} exists: give another folder with --out")
            target.parent.mkdir(parents=True, exist_ok=True)
            write_file(target, found[name].read_bytes())
            echo(target)
        return
    about = {name: _first_sentence(path) for name, path in found.items()}
    if as_json:
        typer.echo(json.dumps(about))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("name", no_wrap=True)
    table.add_column("about")
    for row in about.items():
        table.add_row(*row)
    console().print(table)


def _bundled() -> list[Path]:
    """Return the experiments and examples: in the wheel beside the package, else in its repository."""
    package = Path(__file__).parents[1]
    root = package / "shipped" if (package / "shipped").is_dir() else package.parents[1]
    return [path for folder in ("experiments", "examples") for path in sorted((root / folder).glob("*.*"))]


def _first_sentence(path: Path) -> str:
    """Return what a file says of itself in its first comment or docstring."""
    if path.suffix == ".csv":
        return "A table for the examples."
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip().lstrip("#").strip().replace('"""', "")
        if not text or (line[:1] not in ("#", '"') and path.suffix == ".toml"):
            break
        lines.append(text)
    return " ".join(lines).split(". ")[0].rstrip(".") + "."
