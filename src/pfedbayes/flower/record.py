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
from pfedbayes.flower.exchange import Exchange
from pfedbayes.flower.privacy import draw, epsilon, sampled_epsilon
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
KEPT = "kept"  # the folder of earlier checkpoints


def kept_name(round: int) -> str:
    """Return the path of a kept checkpoint in the run folder."""
    return f"{KEPT}/round-{round:06d}.safetensors"


def kept_rounds(folder: Path) -> list[int]:
    """Return the rounds of the kept checkpoints of a run folder, in ascending order."""
    numbers = (path.stem.removeprefix("round-") for path in (folder / KEPT).glob("round-*.safetensors"))
    return sorted(int(number) for number in numbers if number.isdecimal())


class FederationRecord:
    """Writes the run folder, and reads it back when the server starts again."""

    def __init__(self, settings: Settings, model: Model, writer: runs.Writer, members: list[Member]) -> None:
        self.id = uuid.uuid4().hex
        self.clock = runs.Clock()
        self.logged: set[int] = set()
        """The rounds whose scores are in the log."""
        self.rollbacks: list[int] = []
        """The rounds to which the operator has gone back, in the order of time."""
        self.spent = 0
        """The number of averages that were made, those that were rolled back included."""
        self.drawn: list[int] | None = None
        """The clients that are drawn for the next round; None if they are drawn from the run's seed."""
        self._settings, self._model, self._writer, self._members = settings, model, writer, members
        self._method, self._config = settings.method, settings.federation
        self._created, self._format = runs.now(), runs.FORMAT

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._writer.folder

    @property
    def journal_path(self) -> Path:
        """Where attempts at rounds are noted."""
        return self.folder / runs.JOURNAL

    @property
    def finished_round(self) -> int:
        """The round of the last result; 0 if there is none. While a federation is continued, its result stays."""
        if not (self.folder / runs.SUMMARY).exists():
            return 0
        summary = runs.read_run(self.folder).summary
        return summary.rounds if summary else 0

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
        checkpoint = runs.read_checkpoint(folder)
        previous = runs.read_run(folder, checkpoint.log_bytes if checkpoint else 0)
        about = previous.info.federation
        if about is None:
            raise UserError(f"{folder} holds a run that was not made on Flower: set federation.out to another folder")
        before, now = self._settings.completed(about.settings), self._settings.identity()
        remedy = "set federation.out to another folder"
        if before.get("method.anneal") != now.get("method.anneal"):  # it follows from the number of rounds
            remedy = f"set method.anneal = {before.get('method.anneal')} in pyproject.toml, or {remedy}"
        refuse_difference(before, now, str(folder), remedy)
        self.id, self._created, self._format = about.id, previous.info.created, previous.info.format
        keys = about.keys or [None] * len(self._members)
        for member, name, key in zip(self._members, previous.info.clients, keys, strict=True):
            member.name, member.key = name, key
        self._write_config()
        self._writer.truncate_log(checkpoint.log_bytes if checkpoint else 0)
        if checkpoint is None:
            return first
        self.logged = {record.round for record in previous.rounds}
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
        self.rollbacks = tensors["rollbacks"].tolist() if "rollbacks" in tensors else []
        self.spent = int(tensors["spent"]) if "spent" in tensors else round
        self.drawn = torch.nonzero(tensors["drawn"])[:, 0].tolist() if "drawn" in tensors else None
        if self._config.privacy_noise and self.drawn is None:
            raise UserError(
                f"{self.folder} was made by an earlier version, which drew participants from a seed that nodes know: "
                "set federation.out and every state-dir to a new folder"
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
        """Write a checkpoint, and keep a copy to which the operator can go back."""
        tensors = {name: tensor.clone().contiguous() for name, tensor in self._tensors(state).items()}
        tensors["spent"] = torch.tensor(self.spent)
        if self.rollbacks:
            tensors["rollbacks"] = torch.tensor(self.rollbacks)
        if self.drawn is not None:
            tensors["drawn"] = torch.tensor([i in self.drawn for i in range(len(self._members))])
        self._writer.checkpoint(tensors, state.round, self.clock.seconds())
        with runs.writing(self.folder):
            (self.folder / KEPT).mkdir(exist_ok=True)
            self._writer.write(kept_name(state.round), (self.folder / runs.STATE).read_bytes())
            for round in kept_rounds(self.folder)[: -self._config.keep]:
                (self.folder / kept_name(round)).unlink()

    @property
    def rate(self) -> float:
        """The probability with which a client takes part in a round of a private federation."""
        return (self._settings.training.participants or len(self._members)) / len(self._members)

    def draw(self) -> None:
        """Draw the clients of the next round secretly; a checkpoint keeps them, so that a repeated round has the same.

        Only private federations need it. The others draw from the seed, as `pfedbayes run` does.
        """
        if self._config.privacy_noise:
            self.drawn = draw(len(self._members), self.rate)

    def describe(self) -> None:
        """Write run.json as `pfedbayes run` does, from what the nodes say about themselves; it has no labels."""
        left = [member.name for member in self._members if member.left]
        info = runs.RunInfo(
            format=self._format,  # a folder from before checksums keeps its lines without them
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
            federation=runs.FederationInfo(
                self.id, self._settings.identity(), left, [member.key for member in self._members], self.rollbacks
            ),
        )
        self._writer.write_info(info)

    def log_scores(self, round: int, exchange: Exchange) -> None:
        """Append the scores of a round's models to the log; clients that sent none are listed as absent."""
        scores = {i: facts["scores"] for i, (facts, _) in exchange.replies.items() if is_table(facts.get("scores"))}
        absent = [i for i in range(len(self._members)) if i not in scores]
        if len(absent) == len(self._members):
            return
        scored = table(scores, len(self._members), available_models(self._method), self._model.likelihood.metrics)
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
        joined: dict[str, str],
    ) -> None:
        """Note what came of an attempt at a round, for auditors and the report; attempt 0 only evaluates the models.

        taken: whether the round was completed; news: nodes that cannot take part, and why; joined: keys of new clients.
        """
        anew = [i for i, (facts, _) in exchange.replies.items() if facts.get("began_anew") is True]
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
            epsilon=self._epsilon(uploads, taken and bool(attempt)) if self._config.privacy_noise else None,
            time=runs.now(),
            robust=self._config.rule(self._method) if attempt else None,
            used=[self._members[i].name for i in sorted(uploads)] if taken and attempt else None,
            joined=joined or None,
            began_anew=[self._members[i].name for i in sorted(anew)] or None,
        )
        self._writer.append(entry)
        for name, reason in entry.refused.items():
            log.warning("pfedbayes: round %d: %s: %s", round, name, reason)
        what = f"{len(uploads)} uploads" if attempt else "scores of the last models"
        log.info(
            "pfedbayes: round %d/%d: %s, %.2f MB down, %.2f MB up",
            round, self._settings.training.rounds, what, exchange.down / 1e6, exchange.up / 1e6,
        )  # fmt: skip

    def _epsilon(self, uploads: dict[int, State], released: bool) -> float:
        """Return the epsilon spent so far, including a round from these uploads if its average is released."""
        noise, delta = self._config.privacy_noise, self._config.privacy_delta
        if self.rate < 1:
            return sampled_epsilon(self.spent + released, noise, delta, self.rate)
        most = max(member.taken + (released and i in uploads) for i, member in enumerate(self._members))
        return epsilon(most, noise, delta)

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
