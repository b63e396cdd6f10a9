"""Commands for federations over several machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pfedbayes.cli.common import Command, echo

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
    """Create a certificate for the server and a key for each node."""
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
