"""A node: one client with its data and its memory, which answers the server's messages by the engine's functions."""

from __future__ import annotations

import dataclasses
import hashlib
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
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import Plan, choose_device
from pfedbayes.errors import UserError
from pfedbayes.flower import secure
from pfedbayes.flower.messages import PROTOCOL, Refused, content, facts_of, from_arrays, to_arrays
from pfedbayes.flower.settings import Settings, from_run_config, refuse_difference
from pfedbayes.flower.state import Generation, StateFolder
from pfedbayes.maths.trees import fill, misfit, named_leaves, pick, stack
from pfedbayes.methods import Method
from pfedbayes.methods.base import State
from pfedbayes.nets import Model
from pfedbayes.runs.final_analysis import analyse_final_models
from pfedbayes.runs.typed_json import to_json

LoadData = Callable[[int, int], Shards]  # (number of the client, number of clients) -> its own data
MakeModel = Callable[[Method], Model]
CONSENT = ("new-data", "older-state")  # of a node's config


class Node(Federation):
    """A federation of one client, whose number and server are those of a larger one.

    `received` is what the server has sent last. Predict with `predict("personal", 0, x)`.
    """

    def __init__(self, shards: Shards, model: Model, settings: Settings, number: int, device: str = "auto") -> None:
        if len(shards.names) != 1:
            raise UserError(f"a node has the data of one client, not of {len(shards.names)}: load its own only")
        self.received: State = None
        alone = dataclasses.replace(settings.training, participants=None, train="all", server_optimizer="none")
        plan = Plan(device=choose_device(device), over="loop", dtype=settings.federation.dtype)
        super().__init__(shards, model, settings.method, alone, init=settings.federation.init, plan=plan)
        self.numbers = np.array([number])
        self.template = self._received(0, 0)  # the server of a federation of one sends messages of the same shape

    def download(self, seed_index: int, clients: Sequence[int] | NDArray[np.int64]) -> State:
        """What the server has sent."""
        if self.received is None:
            return super().download(seed_index, clients)
        return stack([self.received] * len(clients))

    def receive(self, round: int, received: State, server: State) -> None:
        """Take in what the server sends after a round; server: its own state, for methods that predict with it."""
        self.round, self.received, self.servers = round, received, [server]

    def answer(self, round: int) -> State:
        """Train for a round; the upload."""
        work, _, trained = self._local_round(round)
        self.population.put(work.members, trained.clients)
        self.round, self.cursors = round, self._advanced(work.members)
        return pick(trained.uploads, 0)

    def memory(self) -> dict[str, Tensor]:
        """All that the client has to remember, by name."""
        client = pick(self.population.get([0], self._fresh_clients), 0)
        return self._named(client, self.received)

    def _named(self, client: State, received: State) -> dict[str, Tensor]:
        own = {"cursor": torch.from_numpy(self.cursors), "round": torch.tensor(self.round)}
        return own | dict(named_leaves(client, "client")) | dict(named_leaves(received, "received"))

    def recall(self, generation: Generation) -> None:
        """Go on from a memory of a node with the same settings."""
        client = pick(self._fresh_clients([0]), 0)
        if name := misfit(generation.tensors, self._named(client, self.template)):
            raise UserError(f"the state of round {generation.round} does not fit this model ({name} differs)")
        # Fresh copies: memory straight from a file may be aligned otherwise, and kernels round accordingly.
        copies = {name: tensor.clone().to(self.device) for name, tensor in generation.tensors.items()}
        self.population.put([0], stack([fill(client, copies, "client")]))
        self.cursors = copies["cursor"].cpu().numpy()
        received = fill(self.template, copies, "received")
        self.receive(int(copies["round"]), received, received if self.method.about.averages else self.servers[0])


def client_app(load_data: LoadData, make_model: MakeModel) -> ClientApp:
    """The ClientApp of a federation: `load_data` gives the node's own data, `make_model` the network and likelihood."""
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
        if task["client"] != number or task["digest"] != settings.digest():
            raise Refused(f"client {number} was asked as client {task['client']}, or with other settings than its own")
        if folder.left:
            return Message(content({"protocol": PROTOCOL, "client": number, "left": True}), reply_to=message)
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
    """Bring the node to where the round starts, once whatever its folder holds is seen to belong there, or the node
    has consented to go on all the same."""
    if kept := folder.rounds():
        before, now = folder.read(kept[-1]).about, _about(node, task, settings)
        if new_data:
            before["train_size"] = now["train_size"]
        for old, new in ((settings.completed(before.pop("settings")), now.pop("settings")), (before, now)):
            remedy = "go on with what it was made with; a new federation needs a new state-dir"
            refuse_difference(old, new, f"the state in {folder.path}", remedy)
    last = min(task["last"], kept[-1]) if kept and older_state else task["last"]
    start = folder.start_of(task["round"], last)
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
    """Score the models as they are and train a round, as far as the task asks for it: what to say, and the upload."""
    facts = {name: task[name] for name in ("protocol", "federation", "method", "round", "client")}
    facts["size"] = int(node.sizes[0])
    upload = None
    if task["evaluate"]:
        facts["scores"] = node.evaluate(**settings.evaluation.after(node.round, settings.training.rounds))
    if task["finish"]:
        facts["reliability"] = to_json(analyse_final_models(node, settings.evaluation).reliability)
        if start:  # with what was received last: the models to predict with from now on
            folder.write(start._replace(tensors=node.memory()))
    if task["train"]:
        upload = node.answer(task["round"])
        about = _about(node, task, settings)
        folder.write(Generation(task["round"], start.round if start else 0, about, node.memory()))
    return facts, upload


def _about(node: Node, task: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """What a state belongs to."""
    preprocessing = node.shards.preprocessing
    return {
        "federation": task["federation"],
        "client": task["client"],
        "train_size": int(node.sizes[0]),
        "preprocessing": preprocessing and hashlib.sha256(preprocessing.to_json().encode()).hexdigest(),
        "settings": settings.identity(),
    }


def _place(context: Context) -> tuple[Settings, int, StateFolder]:
    """Settings, number and folder of this node."""
    settings = from_run_config(context.run_config)
    number = context.node_config.get("partition-id")
    clients = settings.federation.clients
    if not isinstance(number, int) or not 0 <= number < clients:
        raise UserError(
            f"the node's number is {number!r}: start the SuperNode with --node-config 'partition-id=0 …', "
            f"a number from 0 to {clients - 1}"
        )
    if "state-dir" in context.node_config:
        folder = Path(str(context.node_config["state-dir"]))
        if not folder.is_absolute():  # Flower starts the app wherever it likes
            raise UserError(f"state-dir is {str(folder)!r}: give the SuperNode an absolute path in --node-config")
        return settings, number, StateFolder(folder)
    if settings.federation.states is None:
        raise UserError('the node has no folder for its state: add state-dir="…" to --node-config of the SuperNode')
    return settings, number, StateFolder(Path(settings.federation.states) / f"client-{number}")


def _name(context: Context, number: int) -> str:
    return str(context.node_config.get("name", f"client {number}"))


def load_node(state_dir: str | Path, shards: Shards, make_model: MakeModel, device: str = "auto") -> Node:
    """The client of a state folder, to predict with: its last state, its own data and the model it was trained with."""
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
