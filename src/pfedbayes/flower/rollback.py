"""Go back to an earlier state of a federation, for example after a poisoned round."""

from __future__ import annotations

from pathlib import Path

import torch

from pfedbayes import runs
from pfedbayes.errors import UserError
from pfedbayes.flower.privacy import draw
from pfedbayes.flower.record import kept_name, kept_rounds

STAYS = ("clients.taken", "clients.left", "spent")  # what a rollback does not undo


def rollback(folder: Path, to: int) -> int:
    """Make the state after round `to` the last one of a run folder; return the round that it had reached.

    What has been spent of differential privacy and who has left for good stays. Nodes go back by themselves when the
    app is started again.
    """
    run = runs.read_run(folder)
    if run.info.federation is None:
        raise UserError(f"{folder} was not made on Flower: give the run folder of a federation")
    writer = runs.Writer(folder)
    try:
        current = runs.read_checkpoint(folder)
        earlier = [round for round in kept_rounds(folder) if current is not None and round < current.round]
        kept = runs.read_checkpoint(folder, kept_name(to)) if to in earlier else None
        if current is None or kept is None:
            choices = ", ".join(map(str, earlier)) or "none"
            raise UserError(
                f"{folder} has kept no earlier state of round {to}: the rounds to choose from are {choices}"
            )
        before = current.tensors.get("rollbacks", torch.empty(0, dtype=torch.int64))
        stays = {name: current.tensors[name] for name in STAYS if name in current.tensors}
        tensors = kept.tensors | stays | {"rollbacks": torch.cat([before, torch.tensor([to])])}
        if "drawn" in tensors:  # the same draw twice would be no independent one
            settings = run.info.federation.settings
            clients = len(tensors["drawn"])
            drawn = draw(clients, (settings["training.participants"] or clients) / clients)
            tensors["drawn"] = torch.tensor([i in drawn for i in range(clients)])
        writer.append(_entry(current, to, run.info.federation.left))
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        with runs.writing(folder):  # first, since a run with a result of its last round counts as finished
            (folder / runs.SUMMARY).unlink(missing_ok=True)
        writer.checkpoint(tensors, to, current.seconds, log_bytes=kept.log_bytes)
        writer.truncate_log(kept.log_bytes)
        with runs.writing(folder):
            for round in kept_rounds(folder):
                if round > to:
                    (folder / kept_name(round)).unlink()
    finally:
        writer.close()
    return current.round


def _entry(current: runs.Checkpoint, to: int, left: list[str]) -> runs.JournalEntry:
    return runs.JournalEntry(
        round=to,
        attempt=0,
        seconds=current.seconds,
        down=0,
        up=0,
        replies=0,
        uploads=0,
        taken=False,
        refused={},
        left=left,
        time=runs.now(),
        rolled_back_from=current.round,
    )
