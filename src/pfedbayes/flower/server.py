"""The server's side: rounds that do without who is lost, slow or lying, and a run folder from which to go on."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from pfedbayes import runs
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.engine.federation import first_optimizer, first_server, follow, participants
from pfedbayes.errors import UserError
from pfedbayes.evaluation.prediction import MODELS
from pfedbayes.flower import secure
from pfedbayes.flower.combine import combine, epsilon
from pfedbayes.flower.exchange import Exchange, send
from pfedbayes.flower.messages import PROTOCOL, Refused, content, from_arrays, refuse_wild, to_arrays
from pfedbayes.flower.roster import Roster, count
from pfedbayes.flower.scores import is_table, pooled, table
from pfedbayes.flower.settings import Settings, from_run_config, refuse_difference
from pfedbayes.maths.random import choose
from pfedbayes.maths.trees import fill, leaves, misfit, named_leaves, pick
from pfedbayes.methods import Method
from pfedbayes.methods.base import Shard, State
from pfedbayes.nets import Model
from pfedbayes.runs.config import to_toml
from pfedbayes.runs.description import describe_method
from pfedbayes.runs.experiment import method_name

log = logging.getLogger("flwr")


def server_app(make_model: Callable[[Method], Model]) -> ServerApp:
    """The ServerApp of a federation."""
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        try:
            settings = from_run_config(context.run_config)
            with serving(grid, settings, make_model(settings.method)) as server:
                server.run()
        except UserError as error:
            log.error("pfedbayes: %s", error)
            raise

    app.main()(main)
    return app


@contextmanager
def serving(grid: Grid, settings: Settings, model: Model) -> Iterator[Server]:
    """A server that holds the lock of its run folder."""
    writer = runs.Writer(Path(settings.federation.out).resolve())
    try:
        yield Server(grid, settings, model, writer)
    finally:
        writer.close()


class Server:
    """The server of one federation. `run` goes on from wherever its run folder stands."""

    def __init__(self, grid: Grid, settings: Settings, model: Model, writer: runs.Writer) -> None:
        self.grid, self.settings, self.model, self.writer = grid, settings, model, writer
        self.method, self.training, self.config = settings.method, settings.training, settings.federation
        self.dtype, self.wire = getattr(torch, self.config.dtype), getattr(torch, self.config.wire)
        self.participants = participants(model, self.method, self.training, self.config.clients)
        self.state: State = first_server(
            model,
            self.method,
            self.config.clients,
            self.training.seed,
            self.config.init,
            torch.empty((), dtype=self.dtype),
        )
        self.optimizer = first_optimizer(self.training, self.method, self.state)
        self.round = 0
        self.id = uuid.uuid4().hex
        self.created = runs.now()
        self.roster = Roster(grid, settings, self._describe)
        self.members = self.roster.members
        self.clock = runs.Clock()
        self.logged: set[int] = set()
        self._resume()

    # The rounds

    def run(self) -> None:
        """Train up to the last round and finish the run folder."""
        if (self.writer.folder / runs.SUMMARY).exists() and self.round >= self.training.rounds:
            log.info("%s is finished: raise training.rounds to go on", self.writer.folder)
            return
        (self.writer.folder / runs.SUMMARY).unlink(missing_ok=True)
        self.roster.gather(len(self.members))
        while self.round < self.training.rounds:
            self._play(self.round + 1)
        self._finish()

    def _play(self, round: int) -> None:
        """One round: asked for again with the same result as long as too few reply, and kept only if it is whole."""
        for attempt in range(1, self.config.attempts + 1):
            self.roster.gather(self.settings.needed(self.participants))
            present = self.roster.present()
            drawn = choose(self.training.seed, round, len(present), min(self.participants, len(present)))
            chosen = [present[k] for k in drawn]
            trained = present if self.training.train == "all" else chosen
            scored = self._to_score()
            tasks = self._tasks(round, present if scored else trained, set(trained), set(chosen))
            ask = self._ask_masked if self.config.secure else self._ask_plainly
            exchange, uploads = ask(round, tasks, chosen)
            enough = len(uploads) >= self.settings.needed(len(chosen))
            self._journal(round, attempt, exchange, uploads, enough)
            if scored:
                self._record(scored, exchange)
            if enough:
                self._take(round, uploads)
                return
        raise UserError(
            f"round {round} had too few usable uploads {self.config.attempts} times: "
            f"{self.writer.folder / runs.JOURNAL} says why; start the app again to go on from the round before"
        )

    def _take(self, round: int, uploads: dict[int, State]) -> None:
        """Aggregate, and keep the round."""
        clients = sorted(uploads)
        sizes = torch.tensor([self.members[i].train_size for i in clients], dtype=self.dtype)
        average = combine(
            self.method, self.config, self.state, [uploads[i] for i in clients], sizes, torch.tensor(clients)
        )
        optimizer = self.optimizer
        if optimizer is not None:
            average, optimizer = follow(self.training, self.method, self.state, average, optimizer)
        if not all(bool(leaf.isfinite().all()) for leaf in leaves(average)):
            raise UserError(
                f"round {round}: the shared model has become non-finite, so the round was not taken: {CALM}"
            )
        self.state, self.optimizer, self.round = average, optimizer, round
        for i in clients:
            self.members[i].last = round
            self.members[i].taken += 1
        self._save()

    def _finish(self) -> None:
        """Ask everybody for the scores of the last models, and write the summary."""
        self.roster.gather(1)
        round = self.round + 1
        exchange = self._send(round, self._tasks(round, self.roster.present(), set(), set(), finish=True))
        self._journal(self.round, 0, exchange, {}, True)
        if self.round not in self.logged:
            self._record(self.round, exchange)
        samples = self.settings.evaluation.samples
        summary = runs.Summary(
            rounds=self.round,
            seconds=self.clock.seconds(),
            estimator=f"mc{samples}" if self.method.about.stochastic else "mean",
            reliability=pooled([facts.get("reliability") for facts, _ in exchange.replies.values()]),
        )
        self._save()
        self.writer.write_summary(summary)
        log.info("pfedbayes: finished round %d, run folder %s", self.round, self.writer.folder)

    def _to_score(self) -> int | None:
        """The round whose models are to be scored when the next one is asked for."""
        wanted = self.round and self.training.evaluates(self.round) and self.round not in self.logged
        return self.round if wanted else None

    # Messages

    def _tasks(
        self, round: int, asked: Sequence[int], trained: set[int], chosen: set[int], finish: bool = False
    ) -> dict[int, RecordDict]:
        """What everybody who is asked is told of a round."""
        received = self.method.download(self.state, torch.tensor(asked))
        scored = finish or self._to_score() is not None
        whole = scored and self.method.about.shared and not self.method.about.averages
        weights = self._weights(sorted(chosen)) if self.config.secure else {}
        tasks = {}
        for k, i in enumerate(asked):
            facts = self._about(round, i) | {
                "digest": self.settings.digest(),
                "last": self.members[i].last,
                "train": i in trained,
                "upload": i in chosen,
                "evaluate": scored,
                "finish": finish,
                "weight": weights.get(i),
            }
            arrays = {"received": to_arrays(pick(received, k), "received", self.wire)}
            if whole:  # what the shared model is made of is not what a client receives
                arrays["server"] = to_arrays(self.state, "server", self.wire)
            tasks[i] = content(facts, **arrays)
        return tasks

    def _about(self, round: int, client: int) -> dict[str, Any]:
        """What an answer has to be about."""
        method = method_name(self.method)
        return {"protocol": PROTOCOL, "federation": self.id, "method": method, "round": round, "client": client}

    def _weights(self, chosen: list[int]) -> dict[int, float]:
        sizes = torch.tensor([self.members[i].train_size for i in chosen], dtype=self.dtype)
        return dict(zip(chosen, secure.shares(self.method, self.state, sizes).tolist(), strict=True)) if chosen else {}

    def _send(self, round: int, tasks: dict[int, RecordDict]) -> Exchange:
        """Ask clients, and wait for the answers."""
        timeout = self.config.timeout
        messages = {
            i: Message(task, self.members[i].node, "train", ttl=timeout, group_id=str(round))
            for i, task in tasks.items()
        }
        exchange = send(self.grid, messages, timeout)
        for i, (facts, _) in list(exchange.replies.items()):
            if facts.get("left"):
                self.members[i].left, self.members[i].node = True, None
                exchange.refuse(i, "has left for good")
                self._describe()
        return exchange

    def _ask_plainly(
        self, round: int, tasks: dict[int, RecordDict], chosen: Sequence[int]
    ) -> tuple[Exchange, dict[int, State]]:
        """The answers, and the usable uploads of the chosen clients; the others are refused by name."""
        exchange = self._send(round, tasks)
        uploads = {}
        for i, (facts, message) in sorted(exchange.replies.items()):
            try:
                refuse_mismatch(facts, self._about(round, i))
                self.members[i].train_size = count(facts, "size", 1)
                if i in chosen and message is not None:
                    upload = from_arrays(message.content.get("upload"), self._template(i), "upload")
                    refuse_wild(upload, self.config.largest)
                    uploads[i] = upload
            except Refused as reason:
                exchange.refuse(i, str(reason))
        return exchange, uploads

    def _ask_masked(
        self, round: int, tasks: dict[int, RecordDict], chosen: Sequence[int]
    ) -> tuple[Exchange, dict[int, State]]:
        """As `_ask_plainly`, but the uploads are all the same: the server's state moved by the mean of the updates. One
        bad answer among them cannot be told from the rest, so it spoils them all."""
        exchange = self._send(round, {i: task for i, task in tasks.items() if i not in chosen})
        nodes = {node: i for i in chosen if (node := self.members[i].node) is not None}
        by_node = {node: tasks[i] for node, i in nodes.items()}
        mean, masked = secure.secure_mean(self.grid, round, by_node, self.config.secure_reach, self.config.timeout)
        exchange.down, exchange.up = exchange.down + masked.down, exchange.up + masked.up
        for node, reason in masked.refused.items():
            exchange.refused[nodes[node]] = reason
            self.members[nodes[node]].node = None  # to be asked anew whether it is still there
        exchange.replies |= {nodes[node]: answer for node, answer in masked.replies.items()}
        if mean is None:
            return exchange, {}
        try:
            upload = self.state + mean.to(self.state).view_as(self.state)
            refuse_wild(upload, self.config.largest)
            for node, (facts, _) in masked.replies.items():
                refuse_mismatch(facts, self._about(round, nodes[node]))
        except Refused as reason:
            for node in masked.replies:
                exchange.refuse(nodes[node], f"secure aggregation as a whole: {reason}")
            return exchange, {}
        return exchange, {nodes[node]: upload for node in masked.replies}

    def _template(self, client: int) -> State:
        """An upload as it has to look: that of a round without steps."""
        received = pick(self.method.download(self.state, torch.tensor([client])), 0)
        classes = self.model.net.shapes[-1][0] if self.model.likelihood.task == "classification" else 0
        shard = Shard(torch.ones((), dtype=self.dtype), torch.zeros(classes, dtype=torch.int64))
        _, upload = client_round(self.method, self.model, self.method.enrol(received), received, shard, steps=())
        return upload

    # The run folder

    def _resume(self) -> None:
        """Take up the run folder where it stands."""
        folder = self.writer.folder
        if not (folder / runs.INFO).exists():
            known = {runs.CONFIG, runs.INFO, runs.JOURNAL}
            if others := [path.name for path in folder.iterdir() if path.name not in known and path.name[0] != "."]:
                raise UserError(f"{folder} holds other files ({others[0]}, …): set federation.out to a new folder")
            self.writer.write(runs.CONFIG, to_toml({"data": {"name": self._data()}, **self.settings.sections()}))
            self._describe()
            return
        self.writer.cut_torn_line(runs.JOURNAL)
        previous = runs.read_run(folder)
        about = previous.info.federation
        if about is None:
            raise UserError(f"{folder} holds a run that was not made on Flower: set federation.out to another folder")
        refuse_difference(
            self.settings.completed(about.settings),
            self.settings.identity(),
            str(folder),
            "set federation.out to another folder",
        )
        self.id, self.created = about.id, previous.info.created
        for member, its_name in zip(self.members, previous.info.clients, strict=True):
            member.name = its_name
        self.writer.write(runs.CONFIG, to_toml({"data": {"name": self._data()}, **self.settings.sections()}))
        checkpoint = runs.read_checkpoint(folder)
        self.writer.truncate_log(checkpoint.log_bytes if checkpoint else 0)
        if checkpoint is None:
            return
        self.logged = {record.round for record in runs.read_run(folder).rounds}
        self.round, self.clock = checkpoint.round, runs.Clock(checkpoint.seconds)
        # What is not averaged may change its shape as the run goes on.
        fixed = {
            name: t
            for name, t in self._tensors().items()
            if self.method.about.averages or not name.startswith("server.")
        }
        if name := misfit(checkpoint.tensors, fixed):
            raise UserError(
                f"the saved state in {folder} does not fit this federation ({name} differs): set federation.out to "
                "another folder"
            )
        self.state = fill(self.state, checkpoint.tensors, "server.0")
        if self.optimizer is not None:
            self.optimizer = fill(self.optimizer, checkpoint.tensors, "server_optimizer.0")
        for name in COUNTS:
            for member, value in zip(self.members, checkpoint.tensors[f"clients.{name}"].tolist(), strict=True):
                setattr(member, name, type(getattr(member, name))(value))
        log.info("pfedbayes: going on after round %d of %s", self.round, folder)

    def _data(self) -> str:
        return f"the data of {self.config.clients} nodes"

    def _tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds."""
        tensors: dict[str, Tensor] = dict(named_leaves(self.state, "server.0"))
        if self.optimizer is not None:
            tensors |= dict(named_leaves(self.optimizer, "server_optimizer.0"))
        for name in COUNTS:
            tensors[f"clients.{name}"] = torch.tensor([int(getattr(member, name)) for member in self.members])
        return tensors

    def _save(self) -> None:
        tensors = self._tensors()
        self.writer.checkpoint(
            {name: tensor.clone().contiguous() for name, tensor in tensors.items()}, self.round, self.clock.seconds()
        )

    def _describe(self) -> None:
        """Write run.json, as the engine does: what the nodes say of themselves, and nothing of their labels."""
        left = [member.name for member in self.members if member.left]
        info = runs.RunInfo(
            format=runs.FORMAT,
            **runs.describe_code(),
            created=self.created,
            hardware=runs.Hardware("cpu", **runs.describe_machine()),
            plan=runs.NodesPlan("nodes", self.config.dtype, self.config.wire),
            digest=self.settings.digest(),
            seeds=[self.training.seed],
            num_clients=len(self.members),
            clients=[member.name for member in self.members],
            train_sizes=[member.train_size for member in self.members],
            test_sizes=[member.test_size for member in self.members],
            labels=None,
            num_params=self.model.net.num_params,
            method=describe_method(self.method),
            task=self.model.likelihood.task,
            federation=runs.FederationInfo(self.id, self.settings.identity(), left),
        )
        self.writer.write_info(info)

    def _record(self, round: int, exchange: Exchange) -> None:
        """The scores of a round's models as a line of the log; who sent none is named absent."""
        scores = {i: facts["scores"] for i, (facts, _) in exchange.replies.items() if is_table(facts.get("scores"))}
        absent = [i for i in range(len(self.members)) if i not in scores]
        if len(absent) == len(self.members):
            return
        models = [which for which in MODELS if getattr(self.method.about, which)]
        scored = table(scores, len(self.members), models, self.model.likelihood.task)
        self.writer.append(runs.RoundRecord(round, self.clock.seconds(), absent=absent, **scored))
        self.logged.add(round)

    def _journal(self, round: int, attempt: int, exchange: Exchange, uploads: dict[int, State], enough: bool) -> None:
        """What became of an attempt at a round, for people and the report; attempt 0 only scores the last models."""
        spent = None
        if self.config.privacy_noise:
            most = max(member.taken + (enough and i in uploads) for i, member in enumerate(self.members))
            spent = epsilon(most, self.config.privacy_noise, self.config.privacy_delta)
        entry = runs.JournalEntry(
            round=round,
            attempt=attempt,
            seconds=self.clock.seconds(),
            down=exchange.down,
            up=exchange.up,
            replies=len(exchange.replies),
            uploads=len(uploads),
            taken=enough,
            refused={self.members[i].name: reason for i, reason in sorted(exchange.refused.items())}
            | self.roster.news(),
            left=[member.name for member in self.members if member.left],
            epsilon=spent,
        )
        self.writer.append(entry)
        for name, reason in entry.refused.items():
            log.warning("pfedbayes: round %d: %s: %s", round, name, reason)
        what = f"{len(uploads)} uploads" if attempt else "scores of the last models"
        log.info(
            "pfedbayes: round %d/%d: %s, %.2f MB down, %.2f MB up",
            round, self.training.rounds, what, exchange.down / 1e6, exchange.up / 1e6,
        )  # fmt: skip


CALM = "lower training.server_rate, the learning rate or federation.largest"
COUNTS = ("train_size", "test_size", "last", "taken", "left")  # of a member, kept in the checkpoint


def refuse_mismatch(facts: dict[str, Any], about: dict[str, Any]) -> None:
    """Refuse an answer that is not about what was asked for."""
    for name, value in about.items():
        if facts.get(name) != value:
            raise Refused(f"answered for {name} {facts.get(name)!r} instead of {value!r}")
