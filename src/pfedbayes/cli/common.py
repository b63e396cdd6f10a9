"""What several commands share: options, exit codes, interruption."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

INTERRUPTED = 130  # exit code after Ctrl-C or SIGTERM

TrainingDevice = Annotated[str, typer.Option(help="auto, cpu or cuda. auto uses a GPU if there is one.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
TrustModule = Annotated[
    bool,
    typer.Option(
        "--trust-module", help="Import the code that the file or folder names for its network. It can do anything."
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="Folder of the data sets, if it is not one of the default folders.")]


def escape(text: str) -> str:
    """Return the text with its brackets escaped, so that rich prints it unchanged."""
    return text.replace("[", "\\[")


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
