"""Commands for federations over several machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pfedbayes.cli.common import Command, Json, echo

app = typer.Typer(help="Federations over several machines, on Flower.", no_args_is_help=True)


@app.command(cls=Command)
def new(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")]) -> None:
    """Write a Flower app; add your data loader and your network in DIR/federation/task.py."""
    from pfedbayes.flower.apps import write_app

    for path in write_app(folder):
        echo(path)
    echo(f"next: edit {folder / 'federation' / 'task.py'}, then: flwr run {folder} --stream")


@app.command(cls=Command)
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write to.")],
    hosts: Annotated[
        list[str], typer.Option("--host", help="Name or address of the server, as nodes reach it. Repeatable.")
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")],
) -> None:
    """Create a certificate for the server, a key for each node, and the roster of their keys."""
    from pfedbayes.flower import require_flwr

    require_flwr()
    from pfedbayes.flower.keys import make_keys

    for path in make_keys(folder, hosts, nodes):
        echo(path)


@app.command(cls=Command)
def leave(
    state_dir: Annotated[Path, typer.Argument(metavar="STATE_DIR", help="The state-dir of the node.")],
) -> None:
    """Remove a client for good: delete its state on this node, and tell the server in the next round."""
    from pfedbayes.flower.state import StateFolder

    StateFolder(state_dir).leave()
    echo(f"{state_dir}: the state is deleted; keep the SuperNode running until the server reports the departure")


@app.command()
def rollback(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder of a federation that is not running.")],
    to: Annotated[int, typer.Option("--to", metavar="ROUND", min=1, help="The round to go back to.")],
) -> None:
    """Go back to the state after an earlier round, for example after a poisoned one."""
    from pfedbayes.flower import require_flwr

    require_flwr()
    from pfedbayes.flower.rollback import rollback as go_back

    reached = go_back(run, to)
    echo(f"{run}: went back from round {reached} to round {to}; start the app again to continue from there")


@app.command()
def journal(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder of a federation.")],
    as_json: Json = False,
) -> None:
    """Print who joined with which key, who was refused and why, and what each round was averaged from."""
    from pfedbayes import runs
    from pfedbayes.files.typed import to_json
    from pfedbayes.report.federation import journal_lines

    if as_json:
        typer.echo(json.dumps([to_json(entry) for entry in runs.read_run(run).journal]))
        return
    for line in journal_lines(runs.read_run(run)):
        echo(line)
