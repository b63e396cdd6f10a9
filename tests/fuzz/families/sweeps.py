"""Sweep files, results of sweeps, and the results of the paper."""

import tomllib
from typing import Any

from ..bases import SWEEP
from ..damage import change, change_bytes, change_json, toml
from ..trials import Trial, Workshop
from ..values import TEXTS, mutated, some

KEYS = [
    "base",
    "preset",
    "preset_file",
    "seeds",
    "rows",
    "set",
    "vary",
    "method",
    "dataset",
    "size",
    "variant",
    "split",
]


def sweep(shop: Workshop) -> Trial:
    """A sweep whose file, results or runs are bad."""
    rng = shop.rng
    folder = shop.copy("sweep")
    kind = rng.random()
    keep = [folder / "results.json", folder / "out"]
    if kind < 0.6:
        path = folder / "sweep.toml"
        tree: Any = tomllib.loads(SWEEP)
        if rng.random() < 0.6:
            key = rng.choice(KEYS)
            where = tree if rng.random() < 0.5 else tree["rows"][0]
            where[key] = value = rng.choice([some(rng), [], {}, 0, "{method:>999999999}", "{0}", "{",
                "{method.__class__}",
                                             {"training": {"rounds": some(rng)}}, [some(rng)],
                                             {"a": some(rng)}])  # fmt: skip
            title = f"{key} is {str(value)[:60]!r}"
        else:
            tree, title = mutated(rng, tree)
        path.write_bytes(toml(tree))
        if rng.random() < 0.1:
            title = change_bytes(rng, path)
    else:
        files = [folder / "results.json", *sorted((folder / "out" / "cells").glob("*.json")), folder / "base.toml"]
        path = rng.choice(files)
        title = change(rng, path)
    options = rng.choice([
        ["--dry-run"], ["--dry-run"], ["--dry-run", "--results", "results.json"],
        ["--collect", "--results", "results.json"],
        ["--collect", "--results", "new.json", "--import", "results.json"], ["--choose", "chosen.toml"],
        ["--dry-run", "--redo"], ["--dry-run", "--part", rng.choice(["1/2", "0/1", "2/1", "x", "1/0", "²/³",
            "1/" + "9" * 5000])],
        ["--dry-run", "--only", rng.choice([text for text in TEXTS if "\x00" not in text])],
    ])  # fmt: skip
    options = [str(folder / text) if text == "results.json" else text for text in options]
    command = ["sweep", str(folder / "sweep.toml"), "--out", str(folder / "out"), "--device", "cpu", *options]
    return Trial(f"{title}; {options}", [command], keep_if_refused=keep)


def paper(shop: Workshop) -> Trial:
    """A folder of the paper's results with a bad file."""
    rng = shop.rng
    folder = shop.copy("results")
    path = rng.choice(sorted(folder.glob("*.json")))
    title = (change_json if rng.random() < 0.8 else change)(rng, path)
    return Trial(title, [["paper", "results", str(folder)]])
