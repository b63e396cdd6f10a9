"""What several commands share: options, output, exit codes, interruption."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from typer.core import TyperCommand

from pfedbayes.errors import printable

INTERRUPTED = 130  # exit code after Ctrl-C or SIGTERM
MOST_DRAWS = 10**6  # weight draws of a prediction, and steps of a client: more would run for days

TrainingDevice = Annotated[str, typer.Option(help="auto, cpu or cuda. auto uses a GPU if there is one.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
TrustModule = Annotated[
    bool,
    typer.Option("--trust-module", help="Import the code that the file or folder names. It can do anything."),
]
ExperimentFile = Annotated[
    Path | None,
    typer.Argument(help="A TOML file such as experiments/mnist_medium.toml. Default: pFedBayes on small MNIST."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, e.g. [cyan]--set method.zeta=5[/]. Repeatable."
    ),
]
OwnData = Annotated[
    Path | None,
    typer.Option(
        "--data", help="Your data: a table with a client column, or a folder with a file or images per client."
    ),
]
Target = Annotated[str | None, typer.Option(help="The column of your data to predict.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ClientColumn = Annotated[
    str | None, typer.Option(help="The column with the client of each row, if there is not one file per client.")
]
DataDir = Annotated[Path | None, typer.Option(help="Folder of the data sets, if it is not one of the default folders.")]


class Number(click.FloatRange):
    """A number in a range, neither NaN nor infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or refuse the value."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class Command(TyperCommand):
    """A command that refuses empty arguments: an empty path would mean the current folder."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Check the texts of the command line before they are converted."""
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        for option in self.params:
            value = given.get(option.name or "")
            if "" in (value if isinstance(value, list | tuple) else [value]):
                raise click.UsageError(f"{option.get_error_hint(ctx)} is empty: give a value, or leave it out", ctx)
        return super().parse_args(ctx, args)


def overrides_of(flags: Mapping[str, object], settings: Sequence[str] | None) -> list[str]:
    """Return the settings that options stand for, then those of --set."""
    given = {key: value for key, value in flags.items() if value is not None}
    named = [
        f"{key}={json.dumps(value if isinstance(value, list | bool) else str(value), ensure_ascii=False)}"
        for key, value in given.items()
    ]
    return [*named, *(settings or [])]


def console(stderr: bool = False) -> Console:
    """Return a console that prints texts as they are: names may look like markup or like an emoji."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def echo(text: object, err: bool = False) -> None:
    """Print one line, with the control characters of names escaped."""
    typer.echo(printable(str(text)), err=err)


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM, so that the command stops after the round; a second signal stops it at once."""
    received: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        if received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        received.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
