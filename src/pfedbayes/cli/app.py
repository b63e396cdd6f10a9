"""The app: its commands in the order of --help, and the way in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

import pfedbayes
from pfedbayes.cli import assessing, federations, listing, paper, running, serving, sweeping
from pfedbayes.cli.common import escape
from pfedbayes.errors import UserError

# Idle OpenMP threads that spin make rounds take seconds on a busy machine; a moment of it saves waking them up. It has
# to be said before torch is loaded. The count would undo a policy that somebody has set.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "500")

COMMANDS: list[Callable[..., None]] = [
    running.run,
    running.report,
    listing.methods,
    listing.data,
    sweeping.sweep,
    assessing.certify,
    assessing.uncertainty,
    serving.predict,
    serving.personalize,
    serving.export,
]

app = typer.Typer(
    help="Personalised Bayesian federated learning.\n\n"
    "Clients with small, different, private data sets train a model of their own that borrows strength from the "
    "others and says how sure it is. Start with [bold]pfedbayes run[/bold]: it trains pFedBayes on a part of MNIST "
    "that comes with the package, and takes a few minutes.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(federations.app, name="federation")
app.add_typer(paper.app, name="paper")


def main() -> None:
    """Run the command line; what the user can mend is one line and exit code 2."""
    try:
        app()
    except UserError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]pfedbayes:[/] {escape(str(error))}")
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pfedbayes {pfedbayes.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options before any command."""
