"""A federation on Flower without Flower's processes: the apps' own functions, called one node after another."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from federations import make_shards, model_for
from pfedbayes.data import Shards
from pfedbayes.flower import client_app
from pfedbayes.flower.server import Server, serving
from pfedbayes.flower.settings import from_run_config

CLIENTS = 5


def own_data(client: int, clients: int = CLIENTS, shards: Shards | None = None) -> Shards:
    """The data of one client alone, as its node has them: nothing of the others is in the pool."""
    everybody = shards or make_shards()
    train, test = everybody.train[client], everybody.test[client]
    rows = torch.cat([train, test])
    return dataclasses.replace(
        everybody,
        x=everybody.x[rows],
        y=everybody.y[rows],
        train=(torch.arange(len(train)),),
        test=(torch.arange(len(train), len(rows)),),
        validation=(torch.empty(0, dtype=torch.int64),),
        names=(everybody.names[client],),
    )


def travelled(message: Message) -> Message:
    """The message as it arrives, made again from the bytes that Flower sends."""
    arrived = inflate_object_from_contents(
        message.object_id, {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    )
    arrived.metadata.__dict__["_message_id"] = message.object_id
    return arrived


class FakeGrid:
    """Nodes by id, each with its node config. `meddle(client, message, reply)` may replace a reply, or lose it.

    keys: the public keys of nodes by id, which Flower has checked; nodes without one are simulated.
    """

    def __init__(self, run_config: dict[str, Any], clients: int = CLIENTS) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # what Flower's processes begin with
        self.app = client_app(own_data, model_for)
        self.run_config = run_config
        self.nodes: dict[int, dict[str, Any]] = {
            100 + i: {"partition-id": i, "name": f"site {i}"} for i in reversed(range(clients))
        }
        self.meddle = lambda client, message, reply: reply
        self.asked: list[tuple[int, str]] = []
        self.keys: dict[int, bytes] = {}
        self.kept: dict[int, RecordDict] = {}  # what Flower keeps for a node during a run
        self._replies: dict[str, Message] = {}

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"x" * 32)) for node in self.nodes]

    def push_messages(self, messages: list[Message]) -> list[str]:
        for sent in messages:
            sent.metadata.__dict__["_message_id"] = sent.object_id
            message = travelled(sent)
            node = message.metadata.dst_node_id
            config = self.nodes[node]
            self.asked.append((config["partition-id"], message.metadata.message_type))
            context = Context(1, node, config, self.kept.setdefault(node, RecordDict()), self.run_config)
            try:
                answer = self.app(message, context)
            except Exception as error:  # as Flower does
                answer = Message(Error(2, repr(error)), reply_to=message)
            reply = self.meddle(config["partition-id"], message, answer)
            if reply is not None:
                self._replies[message.metadata.message_id] = travelled(reply)
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: list[str]) -> list[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]


def run_config(folder: Path, method: str = "pfedbayes", **others: Any) -> dict[str, Any]:
    """Settings of a federation whose data can tell right from wrong, exact to rounding; `a__b` stands for a.b."""
    return {
        "method.name": method,
        "training.rounds": 3,
        "training.local_steps": 4,
        "training.batch_size": 6,
        "training.participants": 3,
        "training.seed": 3,
        "training.evaluate_every": 2,
        "federation.clients": CLIENTS,
        "federation.dtype": "float64",
        "federation.wire": "float64",
        "federation.robust": "none",
        "federation.out": str(folder / "run"),
        "federation.states": str(folder / "states"),
        "federation.wait": 0.0,
        "federation.timeout": 0.5,
    } | {name.replace("__", "."): value for name, value in others.items()}


def serve(grid: FakeGrid) -> Server:
    """Run the ServerApp's part to its end."""
    settings = from_run_config(grid.run_config)
    with serving(grid, settings, model_for(settings.method)) as server:
        server.run()
    return server
