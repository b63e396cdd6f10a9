"""Asking nodes and waiting for their answers, not longer than is worth it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from pfedbayes.flower.messages import Refused, facts_of, num_bytes

POLL = 0.2  # seconds between two looks for replies; Flower's own loop takes three


@dataclass
class Exchange:
    """What came of asking clients: replies by client, and who was refused or silent, with the reason."""

    replies: dict[int, tuple[dict[str, Any], Message | None]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    down: int = 0
    up: int = 0

    def refuse(self, who: int, reason: str) -> None:
        """Do without a reply."""
        self.refused[who] = reason
        self.replies.pop(who, None)


def replies(grid: Grid, messages: dict[int, Message], timeout: float) -> Iterator[tuple[int, Message]]:
    """Send messages; who has replied, and what, as it comes in, for so many seconds at most."""
    grid.push_messages(list(messages.values()))
    waiting = {message.metadata.message_id: who for who, message in messages.items()}
    end = time.monotonic() + timeout
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            who = waiting.pop(reply.metadata.reply_to_message_id, None)
            if who is not None:
                yield who, reply
        if time.monotonic() > end:
            return
        if waiting:
            time.sleep(POLL)


def send(grid: Grid, messages: dict[int, Message], timeout: float) -> Exchange:
    """Send messages, and collect the replies that come in time."""
    exchange = Exchange(down=sum(num_bytes(message) for message in messages.values()))
    exchange.refused = dict.fromkeys(messages, f"no reply within {timeout:g} s")
    for who, reply in replies(grid, messages, timeout):
        exchange.up += num_bytes(reply)
        try:
            facts = facts_of(reply)
            if "error" in facts:
                raise Refused(str(facts["error"]))
            exchange.replies[who] = (facts, reply)
            del exchange.refused[who]
        except Refused as reason:
            exchange.refused[who] = str(reason)
    return exchange
