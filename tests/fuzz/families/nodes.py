"""Nodes that meet bad messages or a damaged state, and servers that meet a damaged run folder."""

import json
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict

from ..damage import change
from ..flower_grids import FakeGrid, run_config, serve
from ..trials import Command, Trial, Workshop
from ..values import RAW, TEXTS, dumped, mutated, some

FACTS = "facts"


def _copied(shop: Workshop, **others: Any) -> tuple[Path, dict[str, Any]]:
    """Return a finished federation of two rounds, and the settings to go on with it for one more."""
    shop.copy("federation/run", "run")
    states = shop.copy("federation/states", "states")
    return states, run_config(
        shop.folder, training__rounds=3, federation__timeout=0.25, federation__attempts=1, **others
    )


def node(shop: Workshop) -> Trial:
    """A node with a damaged state folder or odd settings takes part, leaves, or gets a bad message."""
    rng = shop.rng
    states, config = _copied(shop)
    grid = FakeGrid(config)
    kind = rng.random()
    if kind < 0.4:
        folder = states / "client-1"
        path = rng.choice([path for path in sorted(folder.iterdir()) if path.name != ".lock"])
        title = change(rng, path, shop.outside())
        command: Command = ["federation", "leave", str(folder)]
        if rng.random() < 0.6:
            return Trial(title, [lambda: serve(grid), ["report", "run"]], keep_if_refused=[])
        return Trial(title, [command])
    if kind < 0.6:
        key = rng.choice(["partition-id", "state-dir", "name", "device", "new-data", "older-state", "unknown"])
        texts = [text for text in TEXTS if text.isprintable()]
        grid.nodes[101][key] = value = rng.choice([*texts, "a\n\x1b[31m", 0, -1, 2**63, 1.5, True, 99])
        return Trial(f"node config {key} = {value!r}"[:200], [lambda: serve(grid), ["report", "run"]])
    if kind < 0.75:
        key = rng.choice(
            [*config, "federation.unknown", "data.path", "x", "federation.robust", "federation.min_replies"]
        )
        config[key] = value = some(rng)
        return Trial(f"run config {key} = {str(value)[:60]!r}", [lambda: serve(FakeGrid(config))])
    return _bad_message(shop, grid)


def _bad_message(shop: Workshop, grid: Any) -> Trial:
    """The server asks a node for something odd: the node answers with a reason."""
    rng, caught = shop.rng, []

    def meddle(client: int, message: Message, answer: Message) -> Message:
        if client == 1 and message.metadata.message_type == "train":
            caught.append(message)
        return answer

    grid.meddle = meddle
    serve(grid)
    message = rng.choice(caught)
    facts = json.loads(str(message.content[FACTS][FACTS]))
    changed, title = mutated(rng, facts)
    records = {name: message.content[name] for name in message.content}
    records[FACTS] = ConfigRecord({FACTS: rng.choice([dumped(changed)] * 8 + list(RAW.values()))})
    if rng.random() < 0.2:
        records.pop(rng.choice(list(records)))
    bad = Message(RecordDict(records), 101, "train")
    bad.metadata.__dict__["_message_id"] = bad.object_id
    context = Context(1, 101, grid.nodes[101], RecordDict(), grid.run_config)
    return Trial(f"message to a node: {title}", [lambda: grid.app(bad, context)])


def federation(shop: Workshop) -> Trial:
    """The run folder of a federation is damaged, and the server goes on with it."""
    rng = shop.rng
    _, config = _copied(shop)
    run = shop.folder / "run"
    path = rng.choice(sorted(path for path in run.rglob("*") if path.is_file()))
    title = change(rng, path, shop.outside())
    return Trial(title, [lambda: serve(FakeGrid(config)), ["report", "run"]], keep_if_refused=[])
