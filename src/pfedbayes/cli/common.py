"""What several commands share: options, exit codes, stopping when asked to."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

INTERRUPTED = 130  # the exit code of a command that was asked to stop

TrainingDevice = Annotated[str, typer.Option(help="auto, cpu or cuda. auto takes a GPU if there is one.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DataDir = Annotated[Path | None, typer.Option(help="Where the data sets lie, if not in the usual places.")]


def escape(text: str) -> str:
    """The text as rich prints it as it stands, brackets too."""
    return text.replace("[", "\\[")


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM ask for a stop after the round; a second one stops at once."""
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
