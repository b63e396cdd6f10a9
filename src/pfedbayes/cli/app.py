"""The command-line app: its commands in the order of --help, and the entry point."""

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

# On a busy machine, idle OpenMP threads that spin slow rounds down to seconds; a short spin avoids waking them up. Set
# before torch is imported, and not if the user has set a policy: the spin count would override it.
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
    assessing.verify,
    serving.predict,
    serving.personalize,
    serving.export,
]

app = typer.Typer(
    help="Personalised Bayesian federated learning.\n\n"
    "Each client trains a personal model on its own small data set, learns from the other clients, and quantifies its "
    "uncertainty. Start with [bold]pfedbayes run[/bold]: it trains pFedBayes on a part of MNIST that comes with the "
    "package, in a few minutes.",
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
    """Run the command line; print a UserError as one line and exit with code 2."""
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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before any command."""
