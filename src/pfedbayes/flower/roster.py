"""The clients of a federation, and the nodes that they currently are."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from pfedbayes.errors import UserError
from pfedbayes.flower.enrolment import clean_name, read_roster
from pfedbayes.flower.exchange import POLL, Exchange, send
from pfedbayes.flower.keys import fingerprint
from pfedbayes.flower.messages import PROTOCOL, Refused, content, count_of
from pfedbayes.flower.settings import Settings

ASK_AGAIN = 15.0  # seconds before a refused node is asked again, while a client is missing
NO_KEY = "no key"
log = logging.getLogger("flwr")


@dataclass
class Member:
    """A client as the server knows it."""

    name: str
    node: int | None = None
    """The node that the client is now; None if it is not connected."""
    key: str | None = None
    """Fingerprint of the key that the client is bound to; None for a simulated one."""
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
    """The clients of a federation, by number; calls `changed` when it learns something new about them.

    A client is bound to the key of its node: to the one that the operator's file names or, with "first-come", to the
    first one that claims its number. Flower checks that a node owns its key. Simulated nodes have no keys.
    """

    def __init__(self, grid: Grid, settings: Settings, changed: Callable[[], None]) -> None:
        self._grid, self._config, self._digest = grid, settings.federation, settings.digest()
        self._changed = changed
        self.members = [Member(f"client {i}") for i in range(self._config.clients)]
        self.joined: dict[str, str] = {}
        """The keys of clients that have joined since the last entry of the journal."""
        self._entries = read_roster(Path(self._config.roster), self._config.clients) if self._config.roster else None
        self._strangers: dict[int, tuple[str, float]] = {}  # refused nodes: why, and when they were asked
        self._news: dict[str, str] = {}

    def enter(self) -> None:
        """Enter what the operator's file says; call it once the run folder has been read."""
        for number, entry in (self._entries or {}).items():
            member = self.members[number]
            member.key, member.left = entry.key, member.left or entry.left
            member.name = clean_name(entry.name) if entry.name else member.name

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
            reasons = "; ".join(reason for reason, _ in list(self._strangers.values())[:5]) or "none is connected"
            raise UserError(
                f"no node connected within {self._config.wait:g} s ({reasons}): start the SuperNodes and app again"
            )

    def _meet(self) -> None:
        """Drop nodes that are gone, and ask new ones which client they are."""
        keys = {node.node_id: fingerprint(node.public_key) for node in self._grid.get_nodes()}
        self._strangers = {node: known for node, known in self._strangers.items() if node in keys}
        for member in self.members:
            if member.node not in keys:
                member.node = None
        complete = all(member.node is not None or member.left for member in self.members)
        again = time.monotonic() - ASK_AGAIN
        waiting = {node for node, (_, asked) in self._strangers.items() if complete or asked > again}
        new = sorted(keys.keys() - {member.node for member in self.members} - waiting)
        if not new:
            return
        known = [node for node in new if self._may_enrol(node, keys[node])]
        facts = {"protocol": PROTOCOL, "digest": self._digest}
        questions = {node: Message(content(facts), node, "query") for node in known}
        exchange = send(self._grid, questions, self._config.wait) if known else Exchange()
        # Nodes that say they have left come last: none of them removes a client that is there.
        leaving = {node for node, (answer, _) in exchange.replies.items() if answer.get("left")}
        for node in sorted(known, key=lambda node: (node in leaving, node)):
            try:
                self._welcome(node, keys[node], exchange)
            except Refused as reason:
                self._refuse(node, str(reason))
        self._changed()

    def _refuse(self, node: int, reason: str) -> None:
        before, _ = self._strangers.get(node, ("", 0.0))
        self._strangers[node] = reason, time.monotonic()
        if before != reason:
            self._news[f"node {node}"] = reason
            log.warning("pfedbayes: node %d: %s", node, reason)

    def _may_enrol(self, node: int, key: str | None) -> bool:
        """Return whether a node with this key can be a client; refuse it if not."""
        reason = None
        if self._entries is not None:
            if key not in [entry.key for entry in self._entries.values()]:
                reason = f"its key ({key or NO_KEY}) is not in the roster {self._config.roster}"
        elif key and self._config.enrol != "first-come":
            reason = (
                f"its key ({key}) is in no roster: set federation.roster to the file that pfedbayes federation keys "
                'wrote, or federation.enrol to "first-come" to let any node take any number'
            )
        if reason:
            self._refuse(node, reason)
        return reason is None

    def _welcome(self, node: int, key: str | None, exchange: Exchange) -> None:
        if node in exchange.refused:
            raise Refused(exchange.refused[node])
        facts, _ = exchange.replies[node]
        number = facts.get("client")
        if type(number) is not int or not 0 <= number < len(self.members):
            raise Refused(f"it calls itself client {number!r}")
        member = self.members[number]
        is_bound = member.key is not None
        if is_bound and member.key != key:
            raise Refused(f"it calls itself client {number}, which has another key than its own ({key or NO_KEY})")
        if key and not is_bound and key in [other.key for other in self.members]:
            raise Refused(f"it calls itself client {number}, but its key is that of another client")
        if member.node is not None:
            raise Refused(
                f"it calls itself client {number}, which {member.name} (node {member.node}) already is: give each "
                "SuperNode its own partition-id"
            )
        if member.left or facts.get("left"):
            if key and not is_bound:
                raise Refused(f"it says that client {number} has left, which has never joined with its key")
            member.left = True
            raise Refused(f"{member.name} has left for good")
        train_size, test_size = self.train_size(number, facts, "train_size"), count_of(facts, "test_size", 0)
        member.train_size, member.test_size, member.node, member.key = train_size, test_size, node, key
        self._name(number, facts)
        self.joined[member.name] = key or NO_KEY

    def _name(self, number: int, facts: dict[str, Any]) -> None:
        member = self.members[number]
        entry = (self._entries or {}).get(number)
        member.name = clean_name((entry and entry.name) or facts.get("name", member.name))
        while member.name in [other.name for other in self.members if other is not member]:
            member.name += f" ({number})"

    def train_size(self, number: int, facts: dict[str, Any], name: str) -> int:
        """Return the number of training examples that a client claims; refuse more than the roster states."""
        size = count_of(facts, name, 1)
        entry = (self._entries or {}).get(number)
        if entry and entry.train_size is not None and size > entry.train_size:
            raise Refused(f"it claims {size} training examples, and the roster states at most {entry.train_size}")
        return size
