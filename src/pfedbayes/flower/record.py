"""The run folder of a federation on Flower: what it holds at the start of a run and after every round."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import torch
from torch import Tensor

from pfedbayes import runs
from pfedbayes.engine.state import FederationState
from pfedbayes.errors import UserError
from pfedbayes.evaluation.models import available_models, headline_estimator
from pfedbayes.flower.combine import epsilon
from pfedbayes.flower.exchange import Exchange
from pfedbayes.flower.roster import Member
from pfedbayes.flower.scores import is_table, pooled, table
from pfedbayes.flower.settings import Settings, refuse_difference
from pfedbayes.maths.trees import fill, misfit, named_leaves
from pfedbayes.methods.base import State
from pfedbayes.nets import Model
from pfedbayes.runs.config import to_toml
from pfedbayes.runs.description import describe_method

log = logging.getLogger("flwr")

MEMBER_FIELDS = ("train_size", "test_size", "last", "taken", "left")  # of `Member`, kept in the checkpoint


class FederationRecord:
    """Writes the run folder, and reads it back when the server starts again."""

    def __init__(self, settings: Settings, model: Model, writer: runs.Writer, members: list[Member]) -> None:
        self.id = uuid.uuid4().hex
        self.clock = runs.Clock()
        self.logged: set[int] = set()
        """The rounds whose scores are in the log."""
        self._settings, self._model, self._writer, self._members = settings, model, writer, members
        self._method, self._config = settings.method, settings.federation
        self._created = runs.now()

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._writer.folder

    @property
    def journal_path(self) -> Path:
        """Where attempts at rounds are noted."""
        return self.folder / runs.JOURNAL

    @property
    def finished(self) -> bool:
        """Whether the folder holds a summary."""
        return (self.folder / runs.SUMMARY).exists()

    def resume(self, first: FederationState) -> FederationState:
        """Return the state that the folder holds; `first` if it is new."""
        folder = self.folder
        if not (folder / runs.INFO).exists():
            known = {runs.CONFIG, runs.INFO, runs.JOURNAL}
            if others := [path.name for path in folder.iterdir() if path.name not in known and path.name[0] != "."]:
                raise UserError(f"{folder} holds other files ({others[0]}, …): set federation.out to a new folder")
            self._write_config()
            self.describe()
            return first
        self._writer.cut_torn_line(runs.JOURNAL)
        previous = runs.read_run(folder)
        about = previous.info.federation
        if about is None:
            raise UserError(f"{folder} holds a run that was not made on Flower: set federation.out to another folder")
        refuse_difference(
            self._settings.completed(about.settings),
            self._settings.identity(),
            str(folder),
            "set federation.out to another folder",
        )
        self.id, self._created = about.id, previous.info.created
        for member, name in zip(self._members, previous.info.clients, strict=True):
            member.name = name
        self._write_config()
        checkpoint = runs.read_checkpoint(folder)
        self._writer.truncate_log(checkpoint.log_bytes if checkpoint else 0)
        if checkpoint is None:
            return first
        self.logged = {record.round for record in runs.read_run(folder).rounds}
        self.clock = runs.Clock(checkpoint.seconds)
        state = self._restore(first, checkpoint.round, checkpoint.tensors)
        log.info("pfedbayes: continuing after round %d of %s", state.round, folder)
        return state

    def _restore(self, first: FederationState, round: int, tensors: dict[str, Tensor]) -> FederationState:
        # The shape of a server that does not average may change during a run.
        fixed = {
            name: tensor
            for name, tensor in self._tensors(first).items()
            if self._method.about.averages or not name.startswith("server.")
        }
        if name := misfit(tensors, fixed):
            raise UserError(
                f"the saved state in {self.folder} does not fit this federation ({name} differs): set "
                "federation.out to another folder"
            )
        for name in MEMBER_FIELDS:
            for member, value in zip(self._members, tensors[f"clients.{name}"].tolist(), strict=True):
                setattr(member, name, type(getattr(member, name))(value))
        return FederationState(
            round,
            tuple(fill(server, tensors, f"server.{s}") for s, server in enumerate(first.servers)),
            tuple(fill(optimizer, tensors, f"server_optimizer.{s}") for s, optimizer in enumerate(first.optimizers)),
            first.cursors,
        )

    def _write_config(self) -> None:
        data = {"name": f"the data of {self._config.clients} nodes"}
        self._writer.write(runs.CONFIG, to_toml({"data": data, **self._settings.sections()}))

    def _tensors(self, state: FederationState) -> dict[str, Tensor]:
        """Return what a checkpoint holds."""
        tensors: dict[str, Tensor] = dict(named_leaves(state.servers[0], "server.0"))
        if state.optimizers:
            tensors |= dict(named_leaves(state.optimizers[0], "server_optimizer.0"))
        for name in MEMBER_FIELDS:
            tensors[f"clients.{name}"] = torch.tensor([int(getattr(member, name)) for member in self._members])
        return tensors

    def save(self, state: FederationState) -> None:
        """Write a checkpoint."""
        tensors = {name: tensor.clone().contiguous() for name, tensor in self._tensors(state).items()}
        self._writer.checkpoint(tensors, state.round, self.clock.seconds())

    def describe(self) -> None:
        """Write run.json as `pfedbayes run` does, from what the nodes say about themselves; it has no labels."""
        left = [member.name for member in self._members if member.left]
        info = runs.RunInfo(
            format=runs.FORMAT,
            **runs.describe_code(),
            created=self._created,
            hardware=runs.Hardware("cpu", **runs.describe_machine()),
            plan=runs.NodesPlan("nodes", self._config.dtype, self._config.wire),
            digest=self._settings.digest(),
            seeds=[self._settings.training.seed],
            num_clients=len(self._members),
            clients=[member.name for member in self._members],
            train_sizes=[member.train_size for member in self._members],
            test_sizes=[member.test_size for member in self._members],
            labels=None,
            num_params=self._model.net.num_params,
            method=describe_method(self._method),
            task=self._model.likelihood.task,
            federation=runs.FederationInfo(self.id, self._settings.identity(), left),
        )
        self._writer.write_info(info)

    def log_scores(self, round: int, exchange: Exchange) -> None:
        """Append the scores of a round's models to the log; clients that sent none are listed as absent."""
        scores = {i: facts["scores"] for i, (facts, _) in exchange.replies.items() if is_table(facts.get("scores"))}
        absent = [i for i in range(len(self._members)) if i not in scores]
        if len(absent) == len(self._members):
            return
        scored = table(scores, len(self._members), available_models(self._method), self._model.likelihood.task)
        self._writer.append(runs.RoundRecord(round, self.clock.seconds(), absent=absent, **scored))
        self.logged.add(round)

    def journal(
        self,
        round: int,
        attempt: int,
        exchange: Exchange,
        uploads: dict[int, State],
        taken: bool,
        news: dict[str, str],
    ) -> None:
        """Note what came of an attempt at a round, for the report; attempt 0 only evaluates the last models.

        taken: whether the round was completed; news: nodes that cannot take part, and why.
        """
        spent = None
        if self._config.privacy_noise:
            most = max(member.taken + (taken and i in uploads) for i, member in enumerate(self._members))
            spent = epsilon(most, self._config.privacy_noise, self._config.privacy_delta)
        entry = runs.JournalEntry(
            round=round,
            attempt=attempt,
            seconds=self.clock.seconds(),
            down=exchange.down,
            up=exchange.up,
            replies=len(exchange.replies),
            uploads=len(uploads),
            taken=taken,
            refused={self._members[i].name: reason for i, reason in sorted(exchange.refused.items())} | news,
            left=[member.name for member in self._members if member.left],
            epsilon=spent,
        )
        self._writer.append(entry)
        for name, reason in entry.refused.items():
            log.warning("pfedbayes: round %d: %s: %s", round, name, reason)
        what = f"{len(uploads)} uploads" if attempt else "scores of the last models"
        log.info(
            "pfedbayes: round %d/%d: %s, %.2f MB down, %.2f MB up",
            round, self._settings.training.rounds, what, exchange.down / 1e6, exchange.up / 1e6,
        )  # fmt: skip

    def remove_summary(self) -> None:
        """Remove the summary of a run that is to be continued."""
        (self.folder / runs.SUMMARY).unlink(missing_ok=True)

    def write_summary(self, rounds: int, exchange: Exchange) -> None:
        """Write the summary of a finished run."""
        summary = runs.Summary(
            rounds=rounds,
            seconds=self.clock.seconds(),
            estimator=headline_estimator(self._method, self._settings.evaluation.samples),
            reliability=pooled([facts.get("reliability") for facts, _ in exchange.replies.values()]),
        )
        self._writer.write_summary(summary)
        log.info("pfedbayes: finished round %d, run folder %s", rounds, self.folder)
