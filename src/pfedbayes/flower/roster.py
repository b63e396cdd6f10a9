"""The clients of a federation, and the nodes that they currently are."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from pfedbayes.errors import UserError
from pfedbayes.flower.exchange import POLL, Exchange, send
from pfedbayes.flower.messages import LARGEST_COUNT, PROTOCOL, Refused, content
from pfedbayes.flower.settings import Settings

ASK_AGAIN = 15.0  # seconds before a refused node is asked again, while a client is missing
log = logging.getLogger("flwr")


@dataclass
class Member:
    """A client as the server knows it."""

    name: str
    node: int | None = None
    """The node that the client is now; None if it is not connected."""
    train_size: int = 0
    """The number of its training examples."""
    test_size: int = 0
    """The number of its test examples."""
    last: int = 0
    """The last round whose upload was used."""
    taken: int = 0
    """The number of rounds whose upload was used."""
    left: bool = False
    """Whether the client has left for good."""


class Roster:
    """The clients of a federation, by number; calls `changed` when it learns something new about them."""

    def __init__(self, grid: Grid, settings: Settings, changed: Callable[[], None]) -> None:
        self._grid, self._config, self._digest = grid, settings.federation, settings.digest()
        self._changed = changed
        self.members = [Member(f"client {i}") for i in range(self._config.clients)]
        self._strangers: dict[int, tuple[str, float]] = {}  # refused nodes: why, and when they were asked
        self._news: dict[str, str] = {}

    def present(self) -> list[int]:
        """Return the clients that are connected, in the order of their numbers."""
        return [i for i, member in enumerate(self.members) if member.node is not None and not member.left]

    def news(self) -> dict[str, str]:
        """Return the nodes that cannot take part, and why; each reason only once."""
        news, self._news = self._news, {}
        return news

    def gather(self, wanted: int) -> None:
        """Identify new nodes, and wait for more if fewer than `wanted` are connected."""
        end = time.monotonic() + self._config.wait
        wanted = min(wanted, sum(not member.left for member in self.members))
        while True:
            self._meet()
            if len(self.present()) >= wanted:
                return
            if time.monotonic() > end:
                break
            time.sleep(min(POLL, self._config.wait))
        if not self.present():
            reasons = "; ".join(reason for reason, _ in self._strangers.values()) or "none is connected"
            raise UserError(
                f"no node connected within {self._config.wait:g} s ({reasons}): start the SuperNodes and app again"
            )

    def _meet(self) -> None:
        """Drop nodes that are gone, and ask new ones which client they are."""
        online = set(self._grid.get_node_ids())
        self._strangers = {node: known for node, known in self._strangers.items() if node in online}
        for member in self.members:
            if member.node not in online:
                member.node = None
        complete = all(member.node is not None or member.left for member in self.members)
        again = time.monotonic() - ASK_AGAIN
        waiting = {node for node, (_, asked) in self._strangers.items() if complete or asked > again}
        new = sorted(online - {member.node for member in self.members} - waiting)
        if not new:
            return
        facts = {"protocol": PROTOCOL, "digest": self._digest}
        questions = {node: Message(content(facts), node, "query") for node in new}
        exchange = send(self._grid, questions, self._config.wait)
        for node in new:
            try:
                self._welcome(node, exchange)
            except Refused as reason:
                before, _ = self._strangers.get(node, ("", 0.0))
                self._strangers[node] = str(reason), time.monotonic()
                if before != str(reason):
                    self._news[f"node {node}"] = str(reason)
                    log.warning("pfedbayes: node %d: %s", node, reason)
        self._changed()

    def _welcome(self, node: int, exchange: Exchange) -> None:
        if node in exchange.refused:
            raise Refused(exchange.refused[node])
        facts, _ = exchange.replies[node]
        number = facts.get("client")
        if not isinstance(number, int) or not 0 <= number < len(self.members):
            raise Refused(f"it calls itself client {number!r}")
        member = self.members[number]
        if member.node is not None:
            raise Refused(
                f"it calls itself client {number}, which {member.name} (node {member.node}) already is: give each "
                "SuperNode its own partition-id"
            )
        member.name, member.left = str(facts.get("name", member.name))[:80], member.left or bool(facts.get("left"))
        if member.name in [other.name for other in self.members if other is not member]:
            member.name += f" ({number})"
        if member.left:
            raise Refused(f"{member.name} has left for good")
        member.train_size, member.test_size = count(facts, "train_size", 1), count(facts, "test_size", 0)
        member.node = node


def count(facts: dict[str, Any], name: str, least: int) -> int:
    """Return a count from the facts; refuse anything else."""
    value = facts.get(name)
    if not isinstance(value, int) or not least <= value <= LARGEST_COUNT:
        raise Refused(f"its {name} is {str(value)[:40]}")
    return value
