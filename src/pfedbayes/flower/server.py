"""The server: rounds that tolerate lost, slow and faulty nodes, in a run folder from which it can continue."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from pfedbayes import runs
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.engine.round import receive
from pfedbayes.engine.server_optimizer import first_optimizer, server_step
from pfedbayes.engine.setup import first_server, num_participants
from pfedbayes.engine.state import FederationState
from pfedbayes.errors import UserError
from pfedbayes.flower.bounds import refuse_unusable, refuse_wild
from pfedbayes.flower.combine import combine, limited
from pfedbayes.flower.exchange import Exchange, send
from pfedbayes.flower.messages import PROTOCOL, Refused, content, from_arrays, to_arrays
from pfedbayes.flower.record import FederationRecord
from pfedbayes.flower.roster import Roster
from pfedbayes.flower.secure import shares
from pfedbayes.flower.secure_mean import SecureMean
from pfedbayes.flower.settings import MIN_SECURE_CLIENTS, Settings, from_run_config
from pfedbayes.maths.random import choose
from pfedbayes.maths.trees import leaves, pick
from pfedbayes.methods import Method
from pfedbayes.methods.base import Limits, Shard, State
from pfedbayes.nets import Model
from pfedbayes.runs.naming import method_name

log = logging.getLogger("flwr")


def server_app(make_model: Callable[[Method], Model]) -> ServerApp:
    """Return the ServerApp of a federation."""
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
    """Yield a server that holds the lock of its run folder."""
    writer = runs.Writer(Path(settings.federation.out).resolve())
    try:
        yield Server(grid, settings, model, writer)
    finally:
        writer.close()


class Server:
    """The server of one federation. `run` continues from wherever its run folder stands."""

    def __init__(self, grid: Grid, settings: Settings, model: Model, writer: runs.Writer) -> None:
        self.grid, self.settings, self.model = grid, settings, model
        self.method, self.training, self.config = settings.method, settings.training, settings.federation
        self.dtype, self.wire = getattr(torch, self.config.dtype), getattr(torch, self.config.wire)
        self.participants = num_participants(model, self.method, self.training, self.config.clients)
        self.roster = Roster(grid, settings, self._describe)
        self.members = self.roster.members
        self.record = FederationRecord(settings, model, writer, self.members)
        self.state = self.record.resume(self._first_state())
        self.roster.enter()
        self._nonces: dict[int, str] = {}  # of the last messages to clients

    def _first_state(self) -> FederationState:
        like = torch.empty((), dtype=self.dtype)
        seed, init = self.training.seed, self.config.init
        server = first_server(self.model, self.method, self.config.clients, seed, init, like)
        optimizer = first_optimizer(self.training, self.method, server)
        # The nodes know how far they have read.
        return FederationState(0, (server,), () if optimizer is None else (optimizer,), np.empty(0, dtype=np.int64))

    def _describe(self) -> None:
        self.record.describe()

    @property
    def round(self) -> int:
        """The number of rounds trained so far."""
        return self.state.round

    @property
    def server(self) -> State:
        """The server's state in the method's sense."""
        return self.state.servers[0]

    # Rounds

    def run(self) -> None:
        """Train up to the last round and finish the run folder."""
        if self.record.finished_round >= self.training.rounds:
            log.info("pfedbayes: %s is finished: raise training.rounds to continue it", self.record.folder)
            return
        if self.config.privacy_noise and self.record.drawn is None:
            self.record.draw()
            self.record.save(self.state)
        self.roster.gather(len(self.members))
        while self.round < self.training.rounds:
            self._train_round(self.round + 1)
        self._finish()

    def _train_round(self, round: int) -> None:
        """Train one round of Algorithm 1, as `engine.round.train_round` does, with nodes that may fail.

        An attempt with too few usable uploads is repeated. A round is kept as a whole or not at all.
        """
        for attempt in range(1, self.config.attempts + 1):
            self.roster.gather(self.settings.needed(self.participants))
            # Algorithm 1: the server draws the random set S^t of clients whose uploads it will average.
            chosen, trained = self._choose(round)
            # Algorithm 1: the server sends its model to the clients that train, and to all if they evaluate it.
            scored = self._round_to_score()
            asked = self.roster.present() if scored else trained
            tasks = self._download(round, asked, set(trained), set(chosen))
            # Algorithm 1: each client takes R local steps and uploads its result.
            ask = self._ask_masked if self.config.secure else self._ask_plainly
            exchange, uploads = ask(round, tasks, chosen)
            enough = len(uploads) >= self._needed(len(chosen))
            self._journal(round, attempt, exchange, uploads, enough)
            if scored:
                self.record.log_scores(scored, exchange)
            if enough:
                # Algorithm 1: the server averages the uploads and moves to its next model.
                self.state = self._aggregate(round, uploads)
                for i in uploads:
                    self.members[i].last = round
                    self.members[i].taken += 1
                self.record.spent += 1
                self.record.draw()
                self.record.save(self.state)
                return
        raise UserError(
            f"round {round} had too few usable uploads {self.config.attempts} times: see {self.record.journal_path}, "
            "and start the app again to continue from the round before"
        )

    def _needed(self, asked: int) -> int:
        """Return how many uploads a round needs if it asks this many clients.

        Secret draws may be of any size, and redrawing a small one would undo what they are for.
        """
        return min(asked, self.settings.needed(asked)) if self.record.drawn is not None else self.settings.needed(asked)

    def _journal(self, round: int, attempt: int, exchange: Exchange, uploads: dict[int, State], taken: bool) -> None:
        joined, self.roster.joined = self.roster.joined, {}
        self.record.journal(round, attempt, exchange, uploads, taken, self.roster.news(), joined)

    def _choose(self, round: int) -> tuple[list[int], list[int]]:
        """Return the clients whose uploads are averaged, and those that train, among the nodes that are present."""
        present = self.roster.present()
        if self.record.drawn is not None:
            chosen = [i for i in present if i in self.record.drawn]
            return chosen, present if self.training.train == "all" else chosen
        drawn = choose(self.training.seed, round, len(present), min(self.participants, len(present)))
        chosen = [present[k] for k in drawn]
        return chosen, present if self.training.train == "all" else chosen

    def _aggregate(self, round: int, uploads: dict[int, State]) -> FederationState:
        """Return the next state from the uploads by client."""
        clients = sorted(uploads)
        sizes = torch.tensor([self.members[i].train_size for i in clients], dtype=self.dtype)
        trees = [uploads[i] for i in clients]
        # Where participation is secret, the average must not depend on the number of participants.
        count = self.participants if self.participants < len(self.members) else None
        unchanged = self._template(clients[0]) if self.method.about.mean_only else None
        server = combine(self.method, self.config, self.server, trees, sizes, torch.tensor(clients), count, unchanged)
        optimizers = self.state.optimizers
        if optimizers:
            server, optimizer = server_step(self.training, self.method, self.server, server, optimizers[0])
            optimizers = (optimizer,)
        remedy = "lower training.server_rate, the learning rate or federation.largest"
        if not all(bool(leaf.isfinite().all()) for leaf in leaves(server)):
            raise UserError(
                f"round {round}: the shared model has become non-finite, so the round was not taken: {remedy}"
            )
        if self.method.about.averages:
            try:
                refuse_unusable(self.method, self.config, server)
            except Refused as reason:
                raise UserError(f"round {round} was not taken, for the shared model: {reason}; {remedy}") from None
        return FederationState(round, (server,), optimizers, self.state.cursors)

    def _finish(self) -> None:
        """Ask all clients for the scores of the last models, and write the summary."""
        self.roster.gather(1)
        round = self.round + 1
        exchange = self._send(round, self._download(round, self.roster.present(), set(), set(), finish=True))
        self._journal(self.round, 0, exchange, {}, True)
        if self.round not in self.record.logged:
            self.record.log_scores(self.round, exchange)
        self.record.save(self.state)
        self.record.write_summary(self.round, exchange)

    def _round_to_score(self) -> int | None:
        """Return the round whose models the clients evaluate when the next round begins, if any."""
        wanted = self.round and self.training.evaluates(self.round) and self.round not in self.record.logged
        return self.round if wanted else None

    # Messages

    def _download(
        self, round: int, asked: Sequence[int], trained: set[int], chosen: set[int], finish: bool = False
    ) -> dict[int, RecordDict]:
        """Return the message to each client that is asked: what it has to do, and what it receives."""
        received = receive(self.method, self.server, asked)
        scored = finish or self._round_to_score() is not None
        whole = scored and self.method.about.shared and not self.method.about.averages
        weights = self._weights(sorted(chosen)) if self.config.secure else {}
        tasks = {}
        # Nobody can answer for another client: neither Flower's name of a message nor its nonce can be guessed.
        self._nonces = {i: secrets.token_hex(16) for i in asked}
        for k, i in enumerate(asked):
            facts = self._about(round, i) | {
                "digest": self.settings.digest(),
                "last": self.members[i].last,
                "rollbacks": self.record.rollbacks,
                "train": i in trained,
                "upload": i in chosen,
                "evaluate": scored,
                "finish": finish,
                "weight": weights.get(i),
            }
            arrays = {"received": to_arrays(pick(received, k), "received", self.wire)}
            if whole:  # the shared model needs more than a client receives
                arrays["server"] = to_arrays(self.server, "server", self.wire)
            tasks[i] = content(facts, **arrays)
        return tasks

    def _about(self, round: int, client: int) -> dict[str, Any]:
        """Return what an answer has to repeat."""
        return {
            "protocol": PROTOCOL,
            "federation": self.record.id,
            "method": method_name(self.method),
            "round": round,
            "client": client,
            "nonce": self._nonces[client],
        }

    def _weights(self, chosen: list[int]) -> dict[int, float]:
        """Return the weights of clients in the average; none for a draw that is too small for secure aggregation."""
        if len(chosen) < MIN_SECURE_CLIENTS:
            return {}
        sizes = torch.tensor([self.members[i].train_size for i in chosen], dtype=self.dtype)
        weights = shares(self.method, self.server, limited(sizes, self.method, self.config))
        return dict(zip(chosen, weights.tolist(), strict=True))

    def _send(self, round: int, tasks: dict[int, RecordDict]) -> Exchange:
        """Send messages to clients, and wait for the answers."""
        timeout = self.config.timeout
        messages = {
            i: Message(task, self.members[i].node, "train", ttl=timeout, group_id=str(round))
            for i, task in tasks.items()
        }
        exchange = send(self.grid, messages, timeout)
        self._refuse_mismatches(round, exchange)
        for i, (facts, _) in list(exchange.replies.items()):
            if facts.get("left") is True:
                self.members[i].left, self.members[i].node = True, None
                exchange.refuse(i, "has left for good")
                self._describe()
        return exchange

    def _refuse_mismatches(self, round: int, exchange: Exchange) -> None:
        """Refuse answers to other questions."""
        for i, (facts, _) in list(exchange.replies.items()):
            try:
                self._refuse_mismatch(round, i, facts)
            except Refused as reason:
                exchange.refuse(i, str(reason))

    def _refuse_mismatch(self, round: int, client: int, facts: dict[str, Any]) -> None:
        for name, value in self._about(round, client).items():
            if facts.get(name) != value or type(facts.get(name)) is not type(value):
                raise Refused(f"answered for {name} {facts.get(name)!r} instead of {value!r}")

    def _ask_plainly(
        self, round: int, tasks: dict[int, RecordDict], chosen: Sequence[int]
    ) -> tuple[Exchange, dict[int, State]]:
        """Return the answers, and the usable uploads of the chosen clients; refuse the others by name."""
        exchange = self._send(round, tasks)
        uploads = {}
        for i, (facts, message) in sorted(exchange.replies.items()):
            try:
                self.members[i].train_size = self.roster.train_size(i, facts, "size")
                if i in chosen and message is not None:
                    upload = from_arrays(message.content.get("upload"), self._template(i), "upload")
                    refuse_wild(self.method, self.config, self.server, upload, self._limits())
                    uploads[i] = upload
            except Refused as reason:
                exchange.refuse(i, str(reason))
        return exchange, uploads

    def _ask_masked(
        self, round: int, tasks: dict[int, RecordDict], chosen: Sequence[int]
    ) -> tuple[Exchange, dict[int, State]]:
        """As `_ask_plainly`, but every upload is the server's state plus the mean of all updates.

        The server cannot tell a bad update from the others, so a bad one makes all of them unusable.
        """
        exchange = self._send(round, {i: task for i, task in tasks.items() if i not in chosen})
        nodes = {node: i for i in chosen if (node := self.members[i].node) is not None}
        if len(nodes) < MIN_SECURE_CLIENTS:
            for i in chosen:
                exchange.refuse(i, f"secure aggregation needs {MIN_SECURE_CLIENTS} clients, but has {len(nodes)}")
            return exchange, {}
        weights = self._weights(sorted(chosen))
        attempt = SecureMean(
            self.grid, str(round), {node: weights[i] for node, i in nodes.items()}, self.server.shape,
            self.config.secure_reach, self.config.timeout,
            lambda node, facts: self._refuse_mismatch(round, nodes[node], facts),
        )  # fmt: skip
        uploads: dict[int, State] = {}
        whole = ""
        try:
            mean = attempt.mean({node: tasks[i] for node, i in nodes.items()}, self._needed(len(chosen)))
            upload = self.server + mean.to(self.server)
            refuse_wild(self.method, self.config, self.server, upload, self._limits())
            uploads = {nodes[node]: upload for node in attempt.exchange.replies}
        except Refused as reason:
            whole = f"secure aggregation as a whole: {reason}"
        masked = attempt.exchange
        exchange.down, exchange.up = exchange.down + masked.down, exchange.up + masked.up
        exchange.replies |= {nodes[node]: answer for node, answer in masked.replies.items()}
        for node, why in masked.refused.items():
            exchange.refused[nodes[node]] = why
            self.members[nodes[node]].node = None  # ask again whether it is present
        for i in nodes.values() if whole else ():
            exchange.refuse(i, exchange.refused.get(i, whole))
        return exchange, uploads

    def _limits(self) -> Limits:
        """Return what uploads may be; nobody moves the limits by claiming many examples."""
        sizes = torch.tensor([member.train_size for member in self.members], dtype=self.dtype)
        examples = float(limited(sizes, self.method, self.config).sum())
        bounds = self.config
        steps = min(self.training.local_steps, self.method.needs.max_steps or self.training.local_steps)
        return Limits(bounds.largest, bounds.largest_rho, bounds.largest_step, examples, steps)

    def _template(self, client: int) -> State:
        """Return an upload of the right shapes: that of a round without steps."""
        received = pick(receive(self.method, self.server, [client]), 0)
        outputs = self.model.net.num_outputs or self.model.net.shapes[-1][0]
        classes = outputs if self.model.likelihood.task == "classification" else 0
        shard = Shard(torch.ones((), dtype=self.dtype), torch.zeros(classes, dtype=torch.int64))
        _, upload = client_round(self.method, self.model, self.method.enrol(received), received, shard, steps=())
        return upload
