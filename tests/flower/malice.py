"""What a malicious node may answer, instead of what it should. The app of a deployment can import this file too."""

import torch
from flwr.app import ConfigRecord, Message, RecordDict

from pfedbayes.flower.messages import FACTS, content, facts_of, from_arrays, to_arrays


def with_facts(reply, **changes):
    """Return the reply with other facts."""
    arrays = {name: reply.content[name] for name in reply.content if name != FACTS}
    return content(facts_of(reply) | changes, **arrays)


def tensor_of(record, name):
    """Return the only tensor of a record."""
    array = record[name]
    return from_arrays(record, torch.empty(tuple(array.shape), dtype=getattr(torch, array.dtype)), name)


def with_upload(function):
    """Return an attack that replaces an upload; function: of the received model and the honest upload."""

    def attack(message, reply):
        received, upload = (
            tensor_of(message.content["received"], "received"),
            tensor_of(reply.content["upload"], "upload"),
        )
        return content(facts_of(reply), upload=to_arrays(function(received, upload), "upload", upload.dtype))

    return attack


def poison(received, upload):
    upload[1] = -9999.0
    return upload


def poison_within_bounds(received, upload):
    upload[0], upload[1] = received[0] + 99, -29.0
    return upload


class Replay:
    """Sends its first answer again and again."""

    first = None

    def __call__(self, message, reply):
        Replay.first = Replay.first or reply.content
        return Replay.first


# By name, what makes the content of an answer of (message, honest reply).
ATTACKS = {
    "poison": with_upload(poison),
    "poison within bounds": with_upload(poison_within_bounds),
    "sign-flipped": with_upload(lambda received, upload: 2 * received - upload),
    "scaled": with_upload(lambda received, upload: received + 50 * (upload - received)),
    "replay": Replay(),
    "impersonation": lambda message, reply: with_facts(reply, client=0),
    "evicting": lambda message, reply: with_facts(reply, client=0, left=True),
    "owning": lambda message, reply: with_facts(reply, size=10**9),
    "oversized": lambda message, reply: content({**facts_of(reply), "error": "x" * 5_000_000}),
    "malformed": lambda message, reply: RecordDict({FACTS: ConfigRecord({FACTS: '{"protocol": ' + "[" * 9999})}),
}


def answer(name, message, reply):
    """Return the malicious answer to a message that asks to train; others are answered honestly."""
    if "upload" not in reply.content:
        return reply
    return Message(ATTACKS[name](message, reply), reply_to=message)
