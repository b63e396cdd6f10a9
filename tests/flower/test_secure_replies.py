"""Secure aggregation with replies of every wrong kind: the server refuses them, says so, and goes on."""

import json
from functools import cache

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from grids import FakeGrid, run_config, serve
from test_faults import journal
from test_secure import PRECISION, plain_state

from federations import difference
from pfedbayes import UserError
from pfedbayes.flower.messages import FACTS, PROTOCOL, Refused
from pfedbayes.flower.secure import mod
from pfedbayes.flower.settings import from_run_config

LIAR = 4


@pytest.fixture(scope="module")
def plainly(tmp_path_factory):
    """The server's state after a round of the first nodes, without secure aggregation."""
    return cache(lambda count: plain_state(tmp_path_factory.mktemp("plain"), range(count)))


def attacked(tmp_path, stage, change, **others):
    """A federation whose liar's reply at a stage of round 1 is what `change` makes of its record."""
    config = run_config(tmp_path, federation__secure=True, training__rounds=1, **others)
    del config["training.participants"]
    grid = FakeGrid(config)
    stages = {}  # of the messages, whose stage Flower's nodes remove

    def meddle(client, message, reply):
        if client != LIAR or RECORD_KEY_CONFIGS not in message.content.config_records or not reply.has_content():
            return reply
        number = stages[client] = (stages.get(client, -1) + 1) % 4
        return change(message, reply) if Stage.all()[number] == stage else reply

    grid.meddle = meddle
    return grid


def record_with(**changes):
    """Change the record of a reply; a value that is a function gets the old one, None removes it."""

    def change(message, reply):
        record = dict(reply.content.config_records[RECORD_KEY_CONFIGS])
        for name, value in changes.items():
            record[name] = value(record[name]) if callable(value) else value
        kept = {name: value for name, value in record.items() if value is not None}
        reply.content.config_records[RECORD_KEY_CONFIGS] = ConfigRecord(kept)
        return reply

    return change


def facts_with(text):
    def change(message, reply):
        reply.content.config_records["fitres.metrics"] = ConfigRecord({} if text is None else {FACTS: text})
        return reply

    return change


def without_record(message, reply):
    return Message(RecordDict({"other": ConfigRecord({"a": 1})}), reply_to=message)


def failing(message, reply):
    return Message(Error(2, "\n"), reply_to=message)


EVERY = {"no record": without_record, "an error": failing, "nothing": lambda message, reply: None}
BAD = {
    Stage.SETUP: {
        "no pk1": record_with(pk1=None),
        "no pk2": record_with(pk2=None),
        "a number": record_with(pk1=3),
        "no key": record_with(pk1=b"-----BEGIN PUBLIC KEY-----"),
        "empty": record_with(pk2=b""),
        "long": record_with(pk2=b"x" * 10**6),
        "one key twice": lambda message, reply: record_with(
            pk2=reply.content.config_records[RECORD_KEY_CONFIGS][Key.PUBLIC_KEY_1]
        )(message, reply),
    },
    Stage.SHARE_KEYS: {
        "no recipients": record_with(dsts=None),
        "no ciphertexts": record_with(ctxts=None),
        "too few": record_with(ctxts=lambda old: old[1:]),
        "text": record_with(ctxts=lambda old: ["a"] * len(old)),
        "strangers": record_with(dsts=lambda old: [node + 1000 for node in old]),
        "one recipient": record_with(dsts=lambda old: old[:1] * len(old)),
        "no list": record_with(dsts=5),
        "long": record_with(ctxts=lambda old: [b"x" * 10**6] * len(old)),
    },
    Stage.COLLECT_MASKED_VECTORS: {
        "no vector": record_with(masked_params=None),
        "half a vector": record_with(masked_params=lambda old: old[:1]),
        "short": record_with(masked_params=lambda old: [old[0], old[1][:-8]]),
        "no array": record_with(masked_params=[b"abc", b"def"]),
        "text": record_with(masked_params=["a", "b"]),
        "negative": record_with(masked_params=lambda old: [old[0][:-8] + b"\xff" * 8, old[1]]),
        "other numbers": record_with(masked_params=lambda old: [old[0].replace(b"'<i8'", b"'<f8'"), old[1]]),
        "no facts": facts_with(None),
        "facts that are no JSON": facts_with("{"),
        "facts of another version": facts_with("{}"),
        "long facts": facts_with("x" * 2**21),
        "facts of another round": facts_with(json.dumps({"protocol": PROTOCOL, "round": 7})),
    },
}
CASES = [(stage, name, change) for stage, bad in BAD.items() for name, change in {**bad, **EVERY}.items()]


@pytest.mark.parametrize(("stage", "name", "change"), CASES, ids=[f"{stage}-{name}" for stage, name, _ in CASES])
def test_a_malformed_reply_leaves_its_node_out(tmp_path, plainly, stage, name, change):
    server = serve(attacked(tmp_path, stage, change))
    first = journal(tmp_path)[0]
    assert (first.attempt, first.taken, first.uploads) == (1, True, 4)
    assert f"dropped out of secure aggregation ({stage}: " in first.refused["site 4"]
    assert len(first.refused["site 4"]) < 400
    assert difference(server.state.servers[0], plainly(4)) < PRECISION


UNMASK = {
    "no nodes": record_with(nids=None),
    "no shares": record_with(shares=None),
    "too few": record_with(shares=lambda old: old[1:]),
    "strangers": record_with(nids=lambda old: [node + 1000 for node in old]),
    "text": record_with(shares=lambda old: ["a"] * len(old)),
}


@pytest.mark.parametrize("name", UNMASK | EVERY)
def test_a_malformed_share_is_done_without(tmp_path, plainly, name):
    server = serve(attacked(tmp_path, Stage.UNMASK, (UNMASK | EVERY)[name]))
    first = journal(tmp_path)[0]
    assert (first.taken, first.uploads) == (True, 5)  # its update is in the sum all the same
    assert "(unmask: " in first.refused["site 4"]
    assert difference(server.state.servers[0], plainly(5)) < PRECISION


def spoilt(share):
    return share[:4] + bytes(255 - byte for byte in share[4:])


WRONG = {
    "wrong shares": (Stage.UNMASK, record_with(shares=lambda old: [spoilt(share) for share in old])),
    "one wrong share": (Stage.UNMASK, record_with(shares=lambda old: [spoilt(old[0]), *old[1:]])),
    "short shares": (Stage.UNMASK, record_with(shares=lambda old: [share[:-1] for share in old])),
    "empty shares": (Stage.UNMASK, record_with(shares=lambda old: [b""] * len(old))),
    "another's number": (Stage.UNMASK, record_with(shares=lambda old: [b"\x01\x00\x00\x00" + s[4:] for s in old])),
    "another weight": (
        Stage.COLLECT_MASKED_VECTORS,
        record_with(masked_params=lambda old: [old[0][:-8] + bytes(8), old[1]]),
    ),
    "a wild vector": (
        Stage.COLLECT_MASKED_VECTORS,
        record_with(masked_params=lambda old: [old[0], old[1][:-160] + bytes(160)]),
    ),
    "unreadable ciphertexts": (Stage.SHARE_KEYS, record_with(ctxts=lambda old: [b"x" * len(one) for one in old])),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_spoils_the_mean_costs_an_attempt_and_is_noted(tmp_path, plainly, name):
    stage, change = WRONG[name]
    spent = []
    grid = attacked(
        tmp_path, stage, lambda message, reply: reply if spent else (spent.append(1), change(message, reply))[1]
    )
    server = serve(grid)
    lines = [entry for entry in journal(tmp_path) if entry.attempt]
    assert [entry.taken for entry in lines] == [False, True]
    assert "secure aggregation" in " ".join(lines[0].refused.values())
    assert lines[1].uploads == 5
    assert difference(server.state.servers[0], plainly(5)) < PRECISION


def test_a_node_that_always_spoils_the_mean_ends_the_run_in_one_line(tmp_path):
    stage, change = WRONG["wrong shares"]
    with pytest.raises(UserError, match="round 1 had too few usable uploads 3 times"):
        serve(attacked(tmp_path, stage, change))
    assert len(journal(tmp_path)) == 3


# Fewer than three


@pytest.mark.parametrize("present", [1, 2])
def test_nothing_is_unmasked_for_fewer_than_three_that_are_present(tmp_path, present):
    config = run_config(tmp_path, federation__secure=True, federation__clients=3, federation__min_replies=1)
    del config["training.participants"]
    grid = FakeGrid(config, clients=3)
    grid.nodes = {100 + i: grid.nodes[100 + i] for i in range(present)}
    with pytest.raises(UserError, match="too few usable uploads"):
        serve(grid)
    assert f"secure aggregation needs 3 clients, but has {present}" in journal(tmp_path)[0].refused["site 0"]
    assert not [kind for _, kind in grid.asked if kind == "train"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_is_unmasked_when_only_two_stay(tmp_path, stage):
    config = run_config(tmp_path, federation__secure=True, federation__clients=3, federation__min_replies=1)
    del config["training.participants"]
    grid, stages, seen = FakeGrid(config, clients=3), [], []

    def meddle(client, message, reply):
        record = message.content.config_records.get(RECORD_KEY_CONFIGS)
        if record is not None and Key.ACTIVE_NODE_ID_LIST in record:
            seen.append(client)
        if client == 2 and record is not None:
            stages.append(stage)
            if (len(stages) - 1) % stage == stage - 1:
                return Message(Error(1, "gone"), reply_to=message)
        return reply

    grid.meddle = meddle
    with pytest.raises(UserError, match="too few usable uploads"):
        serve(grid)
    assert not seen, "a node was asked to unmask"


def test_two_participants_are_refused_at_once(tmp_path):
    with pytest.raises(UserError, match=r"training.participants is 2, but federation.secure needs 3"):
        from_run_config(run_config(tmp_path, federation__secure=True, training__participants=2))


@pytest.mark.parametrize("record", [{Key.SAMPLE_NUMBER: 2}, {Key.ACTIVE_NODE_ID_LIST: [7, 8, 8]}])
def test_a_node_does_not_help_to_unmask_the_mean_of_two(record):
    message = Message(RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(record)}), 1, "train")
    with pytest.raises(Refused, match="the mean of 2 nodes would reveal their updates"):
        mod(message, None, None)


def test_two_nodes_that_drop_out_at_once_are_done_without(tmp_path, plainly):
    config = run_config(tmp_path, federation__secure=True, training__rounds=1, federation__clients=5)
    del config["training.participants"]
    grid, count = FakeGrid(config), {3: 0, 4: 0}

    def meddle(client, message, reply):
        if client in count and RECORD_KEY_CONFIGS in message.content.config_records:
            count[client] += 1
            if count[client] == 3:
                return Message(Error(1, "gone"), reply_to=message)
        return reply

    grid.meddle = meddle
    server = serve(grid)
    assert journal(tmp_path)[0].uploads == 3
    assert difference(server.state.servers[0], plainly(3)) < PRECISION
