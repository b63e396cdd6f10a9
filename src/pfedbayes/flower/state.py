"""A client's memory on its own node: the last two generations of its state, each one file that is there or is not.

round-000007.safetensors   the state after round 7: tensors, and in the header as JSON what they belong to
round-000006.safetensors   the one before, from which round 7 is answered again if it is asked for again
left.json                  the client has left for good
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pfedbayes import runs
from pfedbayes.errors import UserError

LEFT = "left.json"
SUFFIX = ".safetensors"
ABOUT = "about"


class Generation(NamedTuple):
    """A client after a round; previous: the round of the generation that it was made from, 0 for none. about: the
    federation, settings and data that it belongs to."""

    round: int
    previous: int
    about: dict[str, Any]
    tensors: dict[str, Tensor]


class StateFolder:
    """The folder of one client. Nothing in it is ever taken for a fresh start unless it is one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One message at a time: a node may still be busy with a round that the server has given up."""
        with runs.writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def rounds(self) -> list[int]:
        """The rounds whose states are kept, ascending."""
        numbers = (path.stem.removeprefix("round-") for path in self.path.glob(f"round-*{SUFFIX}"))
        return sorted(int(number) for number in numbers if number.isdecimal())

    @property
    def left(self) -> bool:
        """Whether the client has left for good."""
        return (self.path / LEFT).exists()

    def read(self, round: int) -> Generation:
        """The state after a round."""
        path = self.path / _name(round)
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads(file.metadata()[ABOUT])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return Generation(round, about.pop("previous"), about, tensors)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} is damaged ({error}): restore it, or remove it and start the SuperNode with older-state=true "
                "in --node-config to go on from the round before"
            ) from None

    def start_of(self, round: int, last: int) -> Generation | None:
        """The state that a round starts from, None for a client that takes part for the first time; last: the last
        round of which the server has an upload."""
        kept = self.rounds()
        if (kept or [0])[-1] < last:
            found = f"is of round {kept[-1]}" if kept else "is missing"
            raise UserError(
                f"the state in {self.path} {found}, but the server has an upload of round {last}: restore the folder, "
                "let the client leave, or go on from an older state with older-state=true in --node-config"
            )
        earlier = [number for number in kept if number < round]
        if earlier:
            return self.read(earlier[-1])
        if kept and self.read(kept[0]).previous:
            raise UserError(
                f"round {round} was asked for, but {self.path} knows nothing before round {kept[0]}: the server's run "
                "folder is older than this state"
            )
        return None

    def write(self, generation: Generation) -> None:
        """Keep a generation and the one that it was made from."""
        about = generation.about | {"previous": generation.previous}
        # Copies, since safetensors refuses tensors that share memory.
        copies = {name: tensor.cpu().clone().contiguous() for name, tensor in generation.tensors.items()}
        content = save(copies, {ABOUT: json.dumps(about)})
        runs.write_file(self.path / _name(generation.round), content)
        self._keep(generation.round, generation.previous)

    def _keep(self, *kept: int) -> None:
        """Delete all other states, and what a kill has left of one that was being written."""
        for path in self.path.glob(f".round-*{SUFFIX}.part"):
            path.unlink()
        for round in self.rounds():
            if round not in kept:
                (self.path / _name(round)).unlink()

    def leave(self) -> None:
        """Delete all states, and remember that it was wanted."""
        if not self.path.is_dir():
            raise UserError(f"there is no folder {self.path}: give the state-dir of the node that leaves")
        with self.locked():
            runs.write_file(self.path / LEFT, json.dumps({"left": runs.now()}) + "\n")
            self._keep()


def _name(round: int) -> str:
    return f"round-{round:06d}{SUFFIX}"
