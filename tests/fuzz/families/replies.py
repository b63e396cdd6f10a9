"""Replies of a malicious node to the server, in plain and in secure mode."""

import json
import random
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from ..flower_grids import FakeGrid, run_config, serve, travelled
from ..trials import Trial, Workshop
from ..values import TEXTS, dumped, mutated

LIAR = 2
FACTS = "facts"
RAW = "pfedbayes.raw"
SECURE = "secaggplus"  # how the names of Flower's records for secure aggregation begin


def reply(shop: Workshop) -> Trial:
    """One of five nodes answers badly. The others finish the run, and its report can be written."""
    method = shop.rng.choice(["pfedbayes"] * 3 + ["fedavg", "ditto", "pfedme"])
    grid, titles = _grid(shop, method, secure=False)
    return Trial(f"{method}: {titles}", [lambda: serve(grid), ["report", "run"]], must_accept=True)


def secure_reply(shop: Workshop) -> Trial:
    """As `reply` with secure aggregation. A bad answer may cost an attempt, and all of them cost the run."""
    grid, titles = _grid(shop, "pfedbayes", secure=True)
    return Trial(f"secure: {titles}", [lambda: serve(grid), ["report", "run"]])


def _grid(shop: Workshop, method: str, secure: bool) -> tuple[Any, list[str]]:
    """Return a federation with a liar, and a list to which it adds what it does."""
    rng = shop.rng
    others = {"federation__timeout": 0.25, "federation__secure": secure, "federation__attempts": 2}
    config = run_config(shop.folder, method, training__rounds=rng.choice([1, 1, 2]), **others)
    del config["training.participants"]
    grid = FakeGrid(config)
    kind = rng.choice(["train"] * 4 + ["query", "finish", "all"])
    stage = rng.randrange(5)
    seen = [0]

    def meddle(client: int, message: Message, answer: Message) -> Message | None:
        if client != LIAR:
            return answer
        masked = any(name.startswith(SECURE) for name in message.content.config_records)
        seen[0] += masked
        if masked and kind == "train" and seen[0] - 1 != stage:
            return answer
        if kind not in ("all", _kind(message)):
            return answer
        try:
            bad = (_bad_stage if masked and rng.random() < 0.8 else _bad)(rng, message, answer)
            return bad and travelled(bad)  # what Flower itself cannot send does not arrive
        except (ValueError, TypeError, UnicodeError, OverflowError, AttributeError, KeyError):
            return answer

    grid.meddle = meddle
    return grid, [f"bad answer to {kind}" + (f", stage {stage}" if secure else "")]


def _kind(message: Message) -> str:
    if message.metadata.message_type == "query":
        return "query"
    if FACTS not in message.content.config_records:
        return "train"
    facts = json.loads(str(message.content[FACTS][FACTS]))
    return "finish" if facts.get("finish") else "train"


def _bad(rng: random.Random, message: Message, answer: Message) -> Message | None:
    """Return another answer, or none."""
    kind = rng.random()
    if kind < 0.04:
        return None
    if kind < 0.12 or not answer.has_content() or FACTS not in answer.content.config_records:
        return Message(
            Error(rng.choice([0, 1, 2, 99]), rng.choice([*TEXTS, "x" * 10**6, "a\n\x1b[31mb"])), reply_to=message
        )
    facts = json.loads(str(answer.content[FACTS][FACTS]))
    records: dict[str, Any] = {name: answer.content[name] for name in answer.content}
    if kind < 0.6:
        changed, _ = mutated(rng, facts)
        records[FACTS] = ConfigRecord({FACTS: dumped(changed)})
    elif kind < 0.65:
        facts |= rng.choice([{"error": "x" * 10**6}, {"error": [1]}, {"left": True}, {"left": "yes"}, {"size": 10**12},
                             {"scores": {"personal": {f"e{k}": {"accuracy": [[1.0]]} for k in range(5000)}}},
                             {"name": "\ud800"}, {"name": "x" * 10**5}, {"name": "a\n\x1b[31m"},
                             {"client": 0, "left": True}])  # fmt: skip
        records[FACTS] = ConfigRecord({FACTS: json.dumps(facts)})
    elif kind < 0.72:
        records[FACTS] = rng.choice([ConfigRecord({FACTS: 5}), ConfigRecord({"x": 1}), ConfigRecord({FACTS: b"{}"}),
                                     ConfigRecord({FACTS: "[" * 100_000}), MetricRecord({FACTS: 1.0}), ArrayRecord({}),
                                     ConfigRecord({FACTS: ["{}"]}), ConfigRecord({FACTS: "9" * 5000})])  # fmt: skip
    elif kind < 0.95 and "upload" in records:
        records["upload"] = _bad_arrays(rng, records["upload"])
    else:
        name = rng.choice([*records, "more", "upload"])
        records[name] = rng.choice([MetricRecord({"a": 1}), ArrayRecord({}), ConfigRecord({})])
        if rng.random() < 0.5:
            del records[name]
    return Message(RecordDict(records), reply_to=message)


def _bad_arrays(rng: random.Random, record: Any) -> Any:
    arrays = {name: record[name] for name in record}
    name = rng.choice(list(arrays))
    good = arrays[name]
    count = len(good.data) // 8
    numbers = [float("nan"), float("inf"), -9999.0, 1e4, 9e3, 1e30, -1e30, 1e-320, 0.0]
    import struct

    filled = struct.pack("<d", rng.choice(numbers)) * count
    arrays[name] = rng.choice([
        Array(good.dtype, good.shape, good.stype, filled),
        Array(good.dtype, good.shape, good.stype, filled[:8] + good.data[8:]),
        Array(good.dtype, good.shape, good.stype, good.data[:-1]),
        Array(good.dtype, good.shape, good.stype, good.data * 2),
        Array(good.dtype, (), good.stype, good.data[:8]),
        Array(good.dtype, (0,), good.stype, b""),
        Array(good.dtype, (-1, -count), good.stype, good.data),
        Array(good.dtype, (10**9, 10**9), good.stype, good.data),
        Array(good.dtype, tuple(good.shape)[::-1], good.stype, good.data),
        Array(rng.choice(["int64", "bool", "complex128", "x", "", "float16", "float32", "object"]), good.shape,
            good.stype, good.data),
        Array(good.dtype, good.shape, rng.choice(["pickle", "", "numpy.ndarray", "\x1b[31m"]), good.data),
    ])  # fmt: skip
    if rng.random() < 0.2:
        arrays[rng.choice(TEXTS)] = arrays.pop(name)
    return ArrayRecord(arrays)


def _bad_stage(rng: random.Random, message: Message, answer: Message) -> Message | None:
    """Change what a node sends in a stage of secure aggregation."""
    if not answer.has_content():
        return answer
    records: dict[str, Any] = {name: answer.content[name] for name in answer.content}
    names = [name for name in records if isinstance(records[name], ConfigRecord) and len(records[name])]
    if not names or rng.random() < 0.1:
        records.pop(rng.choice(list(records)), None)
        return Message(RecordDict(records), reply_to=message)
    name = rng.choice(names)
    record = dict(records[name].items())
    key = rng.choice(list(record))
    kind = rng.random()
    if kind < 0.25:
        del record[key]
    elif kind < 0.35:
        record[rng.choice(TEXTS)] = record.pop(key)
    else:
        record[key] = _other(rng, record[key])
    records[name] = ConfigRecord(record)
    return Message(RecordDict(records), reply_to=message)


def _other(rng: random.Random, value: Any) -> Any:
    plain: list[Any] = [0, -1, 1.5, float("nan"), True, "", "x", "{}", "[" * 1000, b"", b"\xff" * 32, [], [1],
        [1.5], ["x"], [b"x"],
                        [b""], 2**63 - 1, [2**40] * 3]  # fmt: skip
    if isinstance(value, bytes) and value:
        plain += [value[:-1], value + b"x", value[::-1], bytes(len(value))] * 2
    elif isinstance(value, list) and value:
        plain += [value[:-1], value * 2, value[::-1], value[:1], [*value[:-1], value[0]]] * 2
    elif isinstance(value, str):
        plain += [value[:-1], value + "x", value.upper(), rng.choice(TEXTS)] * 2
    return rng.choice(plain)
