"""A client's memory on its own node: its states after the last rounds, each in a file that is written atomically.

round-000007.safetensors   the state after round 7: tensors, and in the header as JSON what they belong to
round-000006.safetensors   the state before, from which round 7 is repeated if the server asks for it again
…                          earlier ones, to which the client goes back if the server does
left.json                  the client has left for good

Only the user that runs the node can read them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from pfedbayes import runs
from pfedbayes.errors import UserError
from pfedbayes.files import locking
from pfedbayes.files.checksums import note_unchecked
from pfedbayes.files.reading import parse_json
from pfedbayes.files.tensors import open_tensors, tensor_bytes
from pfedbayes.files.writing import open_to_write

LEFT = "left.json"
SUFFIX = ".safetensors"
ABOUT = "about"
PRIVATE = 0o600  # permissions of files; of folders with the right to enter


class Generation(NamedTuple):
    """A client's state after a round."""

    round: int
    previous: int
    """The round of the state that it was trained from; 0 for none."""
    about: dict[str, Any]
    """The federation, settings and data that it belongs to."""
    tensors: dict[str, Tensor]
    rollbacks: int = 0
    """How often the server had gone back to an earlier state when this one was trained."""


class StateFolder:
    """The state folder of one client. A missing or damaged state is an error, never a fresh start."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Handle one message at a time: a node may still work on a round that the server has given up."""
        with runs.writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(PRIVATE | 0o100)
            lock = open_to_write(self.path / ".lock", mode=PRIVATE)
        with lock:
            locking.lock(lock, wait=True)
            yield

    def rounds(self) -> list[int]:
        """Return the rounds whose states are kept, in ascending order."""
        numbers = (path.stem.removeprefix("round-") for path in self.path.glob(f"round-*{SUFFIX}"))
        return sorted(int(number) for number in numbers if number.isdecimal())

    @property
    def left(self) -> bool:
        """Whether the client has left for good."""
        return (self.path / LEFT).exists()

    def read(self, round: int) -> Generation:
        """Return the state after a round."""
        path = self.path / _name(round)
        remedy = (
            "restore it, or remove it and start the SuperNode with older-state=true in --node-config to continue from "
            "the round before"
        )
        with open_tensors(path, remedy, follow=False) as file:
            about = parse_json(file.about[ABOUT])
            if "format" in file.about and not file.checked:
                raise ValueError("its checksum is missing")
            if not file.checked:
                note_unchecked(str(self.path))
            if not isinstance(about, dict) or type(about.get("previous")) is not int:
                raise ValueError("it does not say which round it follows")
            rollbacks = about.pop("rollbacks", 0)
            if type(rollbacks) is not int or rollbacks < 0:
                raise ValueError("it does not say how often the server had gone back")
            return Generation(round, about.pop("previous"), about, file.tensors(), rollbacks)

    def start_of(self, round: int, last: int, rollbacks: Sequence[int] = (), tied: bool = False) -> Generation | None:
        """Return the state that a round starts from; None for a client that takes part for the first time.

        last: the last round whose upload the server has used; rollbacks: the rounds to which the server has gone back.
        tied: whether later states do not count, because the client's state must match the server's, see `Needs`.
        A client goes back with it, to the last state that still counts, and begins anew if it has kept none.
        """
        every = self.rounds()
        kept = [number for number in every if self._counts(number, rollbacks)]
        if every and not kept:
            return None
        if (kept or [0])[-1] < last:
            found = f"is of round {kept[-1]}" if kept else "is missing"
            raise UserError(
                f"the state in {self.path} {found}, but the server has an upload of round {last}: restore the folder, "
                "let the client leave, or continue from an older state with older-state=true in --node-config"
            )
        earlier = [number for number in kept if number < round and (number <= last or not tied)]
        if earlier:
            return self.read(earlier[-1])
        if kept and self.read(kept[0]).previous:
            raise UserError(
                f"round {round} was asked for, but {self.path} knows nothing before round {kept[0]}: the server's run "
                "folder is older than this state, so restore the newer one"
            )
        return None

    def _counts(self, round: int, rollbacks: Sequence[int]) -> bool:
        """Return whether the server has not gone back to before a state."""
        if all(round <= to for to in rollbacks):
            return True
        return all(round <= to for to in rollbacks[self.read(round).rollbacks :])

    def write(self, generation: Generation, keep: int = 2) -> None:
        """Write a state, and keep the one that it was trained from and earlier ones, `keep` states in all."""
        about = generation.about | {"previous": generation.previous, "rollbacks": generation.rollbacks}
        content = tensor_bytes(generation.tensors, {"format": str(runs.FORMAT), ABOUT: json.dumps(about)})
        runs.write_file(self.path / _name(generation.round), content, mode=PRIVATE)
        earlier = [round for round in self.rounds() if round <= generation.previous and round < generation.round]
        self._keep(generation.round, *earlier[-max(1, keep - 1) :])

    def _keep(self, *kept: int) -> None:
        """Delete all other states, and unfinished files of a process that was killed."""
        for path in self.path.glob(f".round-*{SUFFIX}.part"):
            path.unlink()
        for round in self.rounds():
            if round not in kept:
                (self.path / _name(round)).unlink()

    def leave(self) -> None:
        """Delete all states, and note that the client has left."""
        if not self.path.is_dir():
            raise UserError(f"there is no folder {self.path}: pass the state-dir of the node that leaves")
        with self.locked():
            runs.write_file(self.path / LEFT, json.dumps({"left": runs.now()}) + "\n", mode=PRIVATE)
            self._keep()


def _name(round: int) -> str:
    return f"round-{round:06d}{SUFFIX}"
