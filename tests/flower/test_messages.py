"""Trees and facts come back from a message as they went in; whatever else arrives is refused by name."""

import json
from typing import NamedTuple

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from pfedbayes.flower import messages
from pfedbayes.flower.messages import (
    FACTS,
    LARGEST_COUNT,
    LONGEST_FACTS,
    PROTOCOL,
    RAW,
    Refused,
    content,
    count_of,
    facts_of,
    from_arrays,
    num_bytes,
    parse_facts,
    to_arrays,
)


class State(NamedTuple):
    weights: Tensor
    counts: Tensor
    none: Tensor


STATE = State(torch.tensor([[0.5, -2.0]], dtype=torch.float64), torch.tensor([3, 4, 5]), torch.empty(0, 2))


def record(**changes):
    """The arrays of STATE, with some fields of the weights changed."""
    arrays = dict(to_arrays(STATE, "upload", torch.float64))
    old = arrays["upload.weights"]
    fields = {"dtype": old.dtype, "shape": old.shape, "stype": old.stype, "data": old.data} | changes
    return ArrayRecord(arrays | {"upload.weights": Array(*fields.values())})


def message(records):
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # what Flower's processes begin with
    return Message(records, dst_node_id=1, message_type=MessageType.TRAIN)


def test_a_tree_comes_back_in_the_type_of_the_template():
    sent = to_arrays(STATE, "upload", torch.float32)
    assert [(name, array.dtype, len(array.data)) for name, array in sent.items()] == [
        ("upload.weights", "float32", 8), ("upload.counts", "int64", 24), ("upload.none", "float32", 0),
    ]  # fmt: skip
    back = from_arrays(sent, STATE, "upload")
    assert isinstance(back, State)
    for own, like in zip(back, STATE, strict=True):
        assert (own.dtype, own.shape) == (like.dtype, like.shape)
        assert torch.equal(own, like)


def test_tensors_that_lie_otherwise_in_memory_are_sent_in_order():
    turned = torch.arange(6.0).view(2, 3).T
    assert torch.equal(from_arrays(to_arrays(turned, "a", torch.float32), turned, "a"), turned)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (None, "the arrays 'upload' are missing"),
        (ConfigRecord(), "the arrays 'upload' are missing"),
        (ArrayRecord(), "instead of upload.counts, upload.none, upload.weights"),
        (record(dtype="int64"), "upload.weights holds int64"),
        (record(dtype="complex64"), "upload.weights holds complex64"),
        (record(stype="numpy.ndarray"), "upload.weights holds float64 (numpy.ndarray)"),
        (record(shape=(2, 1)), "upload.weights has the wrong shape (2, 1) instead of (1, 2)"),
        (record(data=bytes(15)), "upload.weights has 15 bytes, which do not fit its shape (1, 2)"),
        (record(data=bytes(17)), "upload.weights has 17 bytes"),
        (record(dtype="float32"), "upload.weights has 16 bytes"),
    ],
)
def test_other_arrays_are_refused_by_name(arrays, reason):
    with pytest.raises(Refused) as caught:
        from_arrays(arrays, STATE, "upload")
    assert reason in str(caught.value)


def test_other_shapes_are_taken_if_they_may_differ():
    back = from_arrays(record(shape=(2, 1)), STATE, "upload", shapes=False)
    assert back.weights.tolist() == [[0.5], [-2.0]]
    with pytest.raises(Refused, match="has 16 bytes"):
        from_arrays(record(shape=(3, 1)), STATE, "upload", shapes=False)


def test_facts_come_back():
    facts = {"protocol": PROTOCOL, "round": 3, "names": ["größer"]}
    assert facts_of(message(content(facts))) == facts


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        (RecordDict(), "no facts that pfedbayes can read"),
        (RecordDict({FACTS: ConfigRecord()}), "no facts that pfedbayes can read"),
        (RecordDict({FACTS: ConfigRecord({FACTS: "{"})}), "no facts that pfedbayes can read"),
        (RecordDict({FACTS: ConfigRecord({FACTS: 5})}), "no facts that pfedbayes can read"),
        (RecordDict({FACTS: ConfigRecord({FACTS: "[]"})}), "another version of pfedbayes"),
        (content({}), "another version of pfedbayes"),
        (content({"protocol": PROTOCOL + 1}), "another version of pfedbayes"),
    ],
)
def test_other_facts_are_refused(records, reason):
    with pytest.raises(Refused, match=reason):
        facts_of(message(records))


@pytest.mark.parametrize(("reason", "told"), [("first\nlast line\n", "last line"), ("", "no reason given")])
def test_an_error_is_told_by_its_last_line(reason, told):
    with pytest.raises(Refused, match=f"^Flower reports: {told}$"):
        facts_of(Message(Error(2, reason), reply_to=message(RecordDict())))


def test_bytes_of_arrays_and_facts_are_counted():
    facts = {"protocol": PROTOCOL}
    assert num_bytes(message(content(facts))) == len(json.dumps(facts))
    more = content(facts, upload=to_arrays(STATE, "upload", torch.float32))
    more["others"] = ConfigRecord({"number": 1, "bytes": b"abc", "list": [1.5, 2.5]})
    assert num_bytes(message(more)) == len(json.dumps(facts)) + 8 + 24 + 8 + 3 + 16
    assert num_bytes(Message(Error(2, "gone"), reply_to=message(RecordDict()))) == 0


def test_the_wire_knows_these_types():
    assert (RAW, PROTOCOL) == ("pfedbayes.raw", 2)  # a change of the format needs another number
    assert (LONGEST_FACTS, len(str(Refused("x" * 1000)))) == (1_048_576, 300)
    assert set(messages.TYPES) == {"float16", "bfloat16", "float32", "float64", "int64", "bool"}
    assert all(str(kind) == f"torch.{name}" for name, kind in messages.TYPES.items())


@pytest.mark.parametrize("least", [0, 1])
def test_counts_are_whole_numbers_up_to_a_billion(least):
    assert LARGEST_COUNT == 10**9
    for value in (least, 7, LARGEST_COUNT):
        assert count_of({"size": value}, "size", least) == value
    for value in (least - 1, LARGEST_COUNT + 1, 3.0, "3", True, None):
        with pytest.raises(Refused, match=f"^its size is {value}$"):
            count_of({"size": value}, "size", least)
    with pytest.raises(Refused, match="its size is None"):
        count_of({}, "size", least)


def test_facts_have_a_largest_length():
    text = json.dumps({"protocol": PROTOCOL, "more": ""})
    full = text[:-2] + "x" * (LONGEST_FACTS - len(text)) + text[-2:]
    assert len(parse_facts(full)) == 2
    with pytest.raises(Refused, match="no facts that pfedbayes can read"):
        parse_facts(full + " ")
