"""A node: one client with its data and its memory, which answers the server's messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import Tensor

from pfedbayes.data import Shards
from pfedbayes.engine.backend.batches import advance
from pfedbayes.engine.backend.executor import Executor
from pfedbayes.engine.participation import choose
from pfedbayes.engine.plan import Plan, choose_device
from pfedbayes.engine.population import DevicePopulation
from pfedbayes.engine.round import fresh_clients, receive
from pfedbayes.engine.setup import make_setup
from pfedbayes.engine.state import first_state
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Sampling, Which
from pfedbayes.evaluation.evaluate import evaluate
from pfedbayes.evaluation.predict import predict
from pfedbayes.files.typed import to_json
from pfedbayes.flower import secure
from pfedbayes.flower.messages import PROTOCOL, Refused, content, facts_of, from_arrays, require_task, to_arrays
from pfedbayes.flower.settings import Settings, from_run_config, refuse_difference
from pfedbayes.flower.state import Generation, StateFolder
from pfedbayes.maths.trees import fill, misfit, named_leaves, pick, stack
from pfedbayes.methods import Method
from pfedbayes.methods.base import State
from pfedbayes.nets import Model
from pfedbayes.runs.final_analysis import analyse_final_models

LoadData = Callable[[int, int], Shards]  # (client number, number of clients) -> the client's own data
MakeModel = Callable[[Method], Model]
CONSENT = ("new-data", "older-state")  # keys of a node's config


class Node:
    """One client of a federation: it trains and predicts with its own data, from what the server sends.

    Predict with `predict("personal", 0, x)`.
    """

    def __init__(self, shards: Shards, model: Model, settings: Settings, number: int, device: str = "auto") -> None:
        if len(shards.names) != 1:
            raise UserError(f"a node has the data of one client, not of {len(shards.names)}: load only its own")
        alone = dataclasses.replace(settings.training, participants=None, train="all", server_optimizer="none")
        self.plan = Plan(device=choose_device(device), over="loop", dtype=settings.federation.dtype)
        self.setup = make_setup(shards, model, settings.method, alone, (alone.seed,), self.plan, [number])
        self.method, self.model, self.data = self.setup.method, self.setup.model, self.setup.data
        self.seeds, self.training_at_once = self.setup.seeds, self.setup.training_at_once
        self.state = first_state(self.setup, model, settings.federation.init)
        self.population = DevicePopulation(1, self.data.device)
        self.received: State = None  # what the server has sent last
        self.template = pick(self.download(0, [0]), 0)  # a federation of one client downloads the same shapes
        self._executor = Executor(self.setup, self.plan, model)
        self.predictor = self._executor.predictor

    def seed(self, index: int) -> int:
        """Return the seed of a federation."""
        return self.seeds[index]

    def server_of(self, index: int, client: int) -> State:
        """Return the state of the server of a client."""
        return self.servers[index]

    @property
    def round(self) -> int:
        """The last round that the node knows of."""
        return self.state.round

    @property
    def servers(self) -> tuple[State, ...]:
        """The server's state, as far as the node knows it."""
        return self.state.servers

    def server_rows(self, index: int, client: int) -> Tensor:
        """Return the rows that the node has of the server's data: those of its own client."""
        return self.data.train_sets[0]

    def download(self, seed_index: int, clients: Sequence[int] | NDArray[np.int64]) -> State:
        """Return what the server has sent, stacked."""
        if self.received is None:
            return receive(self.method, self.servers[seed_index], clients)
        return stack([self.received] * len(clients))

    def client_states(self, members: Sequence[int]) -> State:
        """Return the stacked state of the client; a new one starts from what it has received."""
        return self.population.get(members, self._fresh_clients)

    def _fresh_clients(self, members: Sequence[int]) -> State:
        return fresh_clients(self.setup, self.download, members)

    def receive(self, round: int, received: State, server: State) -> None:
        """Take in what the server sends after a round; server: its own state, for methods that predict with it."""
        self.received = received
        self.state = dataclasses.replace(self.state, round=round, servers=(server,))

    def train_round(self, round: int) -> State:
        """Train the client's part of a round and return the upload: the steps of `engine.round.train_round`."""
        self.plan.activate()
        chosen = choose(self.setup, round)  # the only client
        received = self.download(0, chosen.trained[0])
        before = self.client_states(chosen.members)
        clients, uploads, _ = self._executor.train(round, chosen, self.state.cursors, before, received)
        self.population.put(chosen.members, clients)
        cursors = advance(self.setup, self.state.cursors, chosen.members)
        self.state = dataclasses.replace(self.state, round=round, cursors=cursors)
        return pick(uploads, 0)

    def predict(
        self, which: Which, client: int, x: Tensor, samples: int | None = None, sampling: Sampling = "weights"
    ) -> Tensor:
        """Return outputs (K, n, ...) of the personal or the shared model at inputs x (n, ...); client: 0."""
        return predict(self, which, client, x, samples, sampling=sampling)

    def memory(self) -> dict[str, Tensor]:
        """Return everything that the client has to remember, by name."""
        return self._named(pick(self.client_states([0]), 0), self.received)

    def _named(self, client: State, received: State) -> dict[str, Tensor]:
        own = {"cursor": torch.from_numpy(self.state.cursors), "round": torch.tensor(self.round)}
        return own | dict(named_leaves(client, "client")) | dict(named_leaves(received, "received"))

    def recall(self, generation: Generation) -> None:
        """Continue from the memory of a node with the same settings."""
        client = pick(self._fresh_clients([0]), 0)
        if name := misfit(generation.tensors, self._named(client, self.template)):
            raise UserError(
                f"the state of round {generation.round} does not fit this model ({name} differs): use the model that "
                "it was trained with"
            )
        # Fresh copies: memory straight from a file may be aligned differently, and kernels round accordingly.
        copies = {name: tensor.clone().to(self.data.device) for name, tensor in generation.tensors.items()}
        self.population.put([0], stack([fill(client, copies, "client")]))
        received = fill(self.template, copies, "received")
        self.receive(int(copies["round"]), received, received if self.method.about.averages else self.servers[0])
        self.state = dataclasses.replace(self.state, cursors=copies["cursor"].cpu().numpy())


def client_app(load_data: LoadData, make_model: MakeModel) -> ClientApp:
    """Return the ClientApp of a federation.

    load_data: loads the node's own data; make_model: builds the network and the likelihood.
    """
    app = ClientApp()

    def answering(work: Callable[[dict[str, Any], Message, Context], Message]) -> Callable[..., Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                return work(facts_of(message), message, context)
            except UserError as error:
                return Message(content({"protocol": PROTOCOL, "error": str(error)}), reply_to=message)

        return handle

    def introduce(_: dict[str, Any], message: Message, context: Context) -> Message:
        settings, number, folder = _place(context)
        facts: dict[str, Any] = {"protocol": PROTOCOL, "client": number, "name": _name(context, number)}
        if folder.left:
            return Message(content(facts | {"left": True}), reply_to=message)
        shards = load_data(number, settings.federation.clients)
        sizes = {
            "train_size": len(shards.train[0]),
            "test_size": len(getattr(shards, settings.evaluation.split)[0]),
        }
        return Message(content(facts | sizes), reply_to=message)

    def work(task: dict[str, Any], message: Message, context: Context) -> Message:
        settings, number, folder = _place(context)
        require_task(task)
        if task["client"] != number or task["digest"] != settings.digest():
            raise Refused(
                f"the message is for client {task['client']} or for other settings, but this is client {number}"
            )
        if folder.left:
            return Message(content(_repeated(task) | {"left": True}), reply_to=message)
        shards = load_data(number, settings.federation.clients)
        model = make_model(settings.method)
        node = Node(shards, model, settings, number, str(context.node_config.get("device", "auto")))
        with folder.locked():
            start = _start(node, task, settings, folder, *(bool(context.node_config.get(name)) for name in CONSENT))
            _receive(node, task, message)
            facts, upload = _answer(node, task, settings, folder, start)
        if upload is None or not task["upload"]:
            return Message(content(facts), reply_to=message)
        if settings.federation.secure:
            if task["weight"] is None:
                raise Refused("the task has no weight: start the server again")
            masked = secure.masked_content(facts, upload - node.received, task["weight"])
            return Message(masked, reply_to=message)
        arrays = to_arrays(upload, "upload", getattr(torch, settings.federation.wire))
        return Message(content(facts, upload=arrays), reply_to=message)

    app.query()(answering(introduce))
    app.train(mods=[secure.mod])(answering(work))
    return app


def _start(
    node: Node, task: dict[str, Any], settings: Settings, folder: StateFolder, new_data: bool, older_state: bool
) -> Generation | None:
    """Bring the node to the state that the round starts from.

    Refuse a state folder of other settings or data, unless the node's config allows new data or an older state.
    """
    if kept := folder.rounds():
        before, now = folder.read(kept[-1]).about, _about(node, task, settings)
        if new_data:
            before["train_size"] = now["train_size"]
        for old, new in ((settings.completed(before.pop("settings")), now.pop("settings")), (before, now)):
            remedy = "use the same as before, or a new state-dir for a new federation"
            refuse_difference(old, new, f"the state in {folder.path}", remedy)
    last = min(task["last"], kept[-1]) if kept and older_state else task["last"]
    start = folder.start_of(task["round"], last, task["rollbacks"], node.method.needs.tied)
    if start:
        node.recall(start)
    return start


def _receive(node: Node, task: dict[str, Any], message: Message) -> None:
    received = from_arrays(message.content.get("received"), node.template, "received")
    server = received
    if "server" in message.content:
        server = from_arrays(message.content["server"], node.servers[0], "server", shapes=False)
    node.receive(task["round"] - 1, received, server)


def _answer(
    node: Node, task: dict[str, Any], settings: Settings, folder: StateFolder, start: Generation | None
) -> tuple[dict[str, Any], State | None]:
    """Evaluate and train as the task asks; return the facts of the answer, and the upload."""
    facts = _repeated(task)
    facts["size"] = int(node.data.sizes[0])
    facts["began_anew"] = bool(task["rollbacks"]) and start is None and bool(folder.rounds())
    upload = None
    if task["evaluate"]:
        facts["scores"] = evaluate(node, **settings.evaluation.after(node.round, settings.training.rounds))
    if task["finish"]:
        facts["reliability"] = to_json(analyse_final_models(node, settings.evaluation).reliability)
        if start:  # keep what was received last, to predict with it
            folder.write(start._replace(tensors=node.memory()), settings.federation.keep)
    if task["train"]:
        upload = node.train_round(task["round"])
        about = _about(node, task, settings)
        previous, rollbacks = start.round if start else 0, len(task["rollbacks"])
        generation = Generation(task["round"], previous, about, node.memory(), rollbacks)
        folder.write(generation, settings.federation.keep)
    return facts, upload


def _repeated(task: dict[str, Any]) -> dict[str, Any]:
    """Return what an answer repeats of its task, to show which one it answers."""
    return {name: task[name] for name in ("protocol", "federation", "method", "round", "client", "nonce")}


def _about(node: Node, task: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return what identifies a state: federation, client, data and settings."""
    preprocessing = node.data.shards.preprocessing
    return {
        "federation": task["federation"],
        "client": task["client"],
        "train_size": int(node.data.sizes[0]),
        "preprocessing": preprocessing and preprocessing.digest(),
        "settings": settings.identity(),
    }


def _place(context: Context) -> tuple[Settings, int, StateFolder]:
    """Return the settings, number and state folder of this node."""
    settings = from_run_config(context.run_config)
    number = context.node_config.get("partition-id")
    clients = settings.federation.clients
    if not isinstance(number, int) or not 0 <= number < clients:
        raise UserError(
            f"the node's partition-id is {number!r}: start the SuperNode with --node-config 'partition-id=0 …', "
            f"a number from 0 to {clients - 1}"
        )
    if "state-dir" in context.node_config:
        folder = Path(str(context.node_config["state-dir"]))
        if not folder.is_absolute():  # Flower chooses the app's working directory
            raise UserError(f"state-dir is {str(folder)!r}: give the SuperNode an absolute path in --node-config")
        return settings, number, StateFolder(folder)
    if settings.federation.states is None:
        raise UserError('the node has no folder for its state: add state-dir="…" to --node-config of the SuperNode')
    return settings, number, StateFolder(Path(settings.federation.states) / f"client-{number}")


def _name(context: Context, number: int) -> str:
    return str(context.node_config.get("name", f"client {number}"))


def load_node(state_dir: str | Path, shards: Shards, make_model: MakeModel, device: str = "auto") -> Node:
    """Load the client of a state folder to predict with; shards, make_model: the data and model it was trained with."""
    folder = StateFolder(Path(state_dir))
    if not folder.rounds():
        raise UserError(f"{state_dir} holds no state: give the state-dir of a node that has taken part")
    generation = folder.read(folder.rounds()[-1])
    identity = {name: value for name, value in generation.about["settings"].items() if value is not None}
    settings = from_run_config(identity)
    if not settings.method.about.personal:
        raise UserError(
            f"{settings.method.about.title} has no personal models: its shared one is in the server's run folder"
        )
    node = Node(shards, make_model(settings.method), settings, generation.about["client"], device)
    node.recall(generation)
    return node
