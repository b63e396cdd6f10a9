"""Messages to nodes, and their replies within a time limit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Error, Message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import UnexpectedObjectContentError
from google.protobuf.message import DecodeError

from pfedbayes.errors import one_line
from pfedbayes.flower.messages import Refused, facts_of, num_bytes

POLL = 0.2  # seconds between two polls for replies; Flower's own loop waits three
# What Flower raises for bytes of a node that make no message.
MALFORMED = (UnexpectedObjectContentError, DecodeError, ValueError, TypeError, AttributeError, LookupError)


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
    waiting = dict(messages)
    end = time.monotonic() + timeout
    while waiting:
        for who, message in list(waiting.items()):
            for reply in _pull(grid, message):
                waiting.pop(who, None)
                yield who, reply
        if time.monotonic() > end:
            return
        if waiting:
            time.sleep(POLL)


def _pull(grid: Grid, message: Message) -> list[Message]:
    """Return the reply to a message, if it has come.

    Replies are pulled one by one: a malformed one makes Flower lose all that are pulled together with it.
    """
    own = message.metadata.message_id
    try:
        found = list(grid.pull_messages([own]))
        return [reply for reply in found if reply.metadata.reply_to_message_id == own][:1]
    except MALFORMED as error:
        return [Message(Error(0, f"a malformed message ({one_line(error)})"), reply_to=message)]


def send(grid: Grid, messages: dict[int, Message], timeout: float) -> Exchange:
    """Send messages and collect the replies that arrive in time."""
    exchange = Exchange(down=sum(num_bytes(message) for message in messages.values()))
    exchange.refused = dict.fromkeys(messages, f"no reply within {timeout:g} s")
    for who, reply in replies(grid, messages, timeout):
        exchange.up += num_bytes(reply)
        try:
            facts = facts_of(reply)
            if "error" in facts:
                raise Refused(facts["error"])
            exchange.replies[who] = (facts, reply)
            del exchange.refused[who]
        except Refused as reason:
            exchange.refused[who] = str(reason)
    return exchange
