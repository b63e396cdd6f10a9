"""The command-line app: its commands in the order of --help, and the entry point."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import click
import typer
from rich.text import Text

import pfedbayes
from pfedbayes.cli import assessing, federations, listing, paper, running, serving, sweeping, tuning
from pfedbayes.cli.common import Command, console
from pfedbayes.errors import UserError

# On a busy machine, idle OpenMP threads that spin slow rounds down to seconds; a short spin avoids waking them up. Set
# before torch is imported, and not if the user has set a policy: the spin count would override it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "500")

COMMANDS: list[Callable[..., None]] = [
    running.run,
    running.report,
    running.board,
    listing.methods,
    listing.data,
    listing.experiments,
    sweeping.sweep,
    tuning.tune,
    assessing.certify,
    assessing.uncertainty,
    assessing.verify,
    assessing.forget,
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
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    app.command(cls=Command)(command)
app.add_typer(federations.app, name="federation")
app.add_typer(paper.app, name="paper")


def main() -> None:
    """Run the command line; print an error that the user can fix as one line and exit with code 2."""
    _prepare_streams()
    try:
        try:
            _refuse_missing_folder()
            code = app(standalone_mode=False) or 0
        finally:
            sys.stdout.flush()
    except UserError as error:
        code = _fail(error)
    except click.UsageError as error:
        code = _usage(error)
    except BrokenPipeError:  # the reader of the output has gone, as in `pfedbayes methods | head -1`
        _discard_output()
        code = 1
    except OSError as error:
        # Commands name the remedy where they can. The rest is what the system refuses, such as a path that is too long.
        _discard_output()
        where = "the output" if error.filename is None else str(error.filename)
        reason = error.strerror or error
        code = _fail(UserError(f"cannot read or write {where} ({reason}): give another path, or free space"))
    sys.exit(code)


def _prepare_streams() -> None:
    """Let every text be printed: as escapes where the terminal lacks a character, nowhere where a stream is closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115, until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _refuse_missing_folder() -> None:
    try:
        Path.cwd()
    except OSError:
        raise UserError("the current folder does not exist any more: change to another folder") from None


def _discard_output() -> None:
    """Send what the output stream still holds nowhere: it would fail again when the process ends."""
    with contextlib.suppress(OSError):  # a stream without a file
        output = sys.stdout.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)


def _fail(error: UserError) -> int:
    console(stderr=True).print(Text.assemble(("pfedbayes:", "bold red"), " ", str(error)), soft_wrap=True)
    return 2


def _usage(error: click.UsageError) -> int:
    """Print a mistake in the arguments, or the help of a command that got none."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        error.show()
    else:
        name = error.ctx.command_path if error.ctx else "pfedbayes"
        _fail(UserError(f"{error.format_message().rstrip('.')}: see {name} --help"))
    return error.exit_code


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
