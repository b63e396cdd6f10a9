"""Messages to nodes, and their replies within a time limit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from pfedbayes.flower.messages import Refused, facts_of, num_bytes

POLL = 0.2  # seconds between two polls for replies; Flower's own loop waits three


@dataclass
class Exchange:
    """The outcome of messages to clients."""

    replies: dict[int, tuple[dict[str, Any], Message | None]] = field(default_factory=dict)
    """Facts and message of each client that replied."""
    refused: dict[int, str] = field(default_factory=dict)
    """Why the reply of a client is missing or cannot be used."""
    down: int = 0
    """Bytes sent to clients."""
    up: int = 0
    """Bytes received from clients."""

    def refuse(self, who: int, reason: str) -> None:
        """Discard a reply."""
        self.refused[who] = reason
        self.replies.pop(who, None)


def replies(grid: Grid, messages: dict[int, Message], timeout: float) -> Iterator[tuple[int, Message]]:
    """Send messages and yield (recipient, reply) as replies come in, for at most `timeout` seconds."""
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
    """Send messages and collect the replies that arrive in time."""
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
