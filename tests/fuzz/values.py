"""Values that programs trip over, and changes of JSON-like trees that put them anywhere."""

import copy
import json
import math
import random
from typing import Any

NUMBERS: list[Any] = [
    0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**12,
    10**15,
    10**30, 10**400, 0.5, -0.5, 1e-9, 5e-324, 1e17, 1e300, -1e300, 1.7976931348623157e308, math.nan, math.inf,
    -math.inf,
    -0.0, 1e38, 1e39,
]  # fmt: skip
TEXTS: list[str] = [
    "", " ", "a", "nan", "inf", "-inf", "1e999", "12_34", "0x10", "１２", "-1", "null", "true", "None", "\x00",
    "\x1b[31mred\x1b[0m",
    "a\nb", "a\r\nb", "\t", "\x7f", "\u202e", "\ud800", "é", "e\u0301", "日本", "💥", "a" * 300, "a" * 5000, "../x",
    "../../x",
    "/etc/passwd", "/", ".", "..", "~", "~root/x", "a/b", "a\\b", "C:\\x", "-rf", "--help",
    "=HYPERLINK(\"http://x\")", "@x",
    "+1", ":cat:", "[bold]x[/bold]", "[/]", "[red", "{0}", "{method:>99999}", "%s%n", "$(touch x)", "`touch x`",
    "<b>&amp;",
    "os:system", "subprocess:Popen", "builtins:eval", "a:b:c", ":", "pfedbayes.cli:main", "mlp", "fedavg", "cpu",
    "cuda:7",
    "float64", "[0, 1]", "north", "\udcff\udcfe",
]  # fmt: skip
OTHERS: list[Any] = [
    None,
    True,
    False,
    [],
    {},
    [[]],
    [{}],
    [None],
    [1, "a"],
    {"a": 1},
    {"": {}},
    [1] * 100,
    [[1, 2], [3]],
]
# Written into a text of JSON in place of a value, since no value stands for them.
RAW = {
    "@deep-list@": "[" * 100_000 + "]" * 100_000,
    "@deep-object@": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "@open@": "[" * 100_000,
    "@digits@": "9" * 5000,
    "@exponent@": "1e999999",
    "@nan@": "NaN",
    "@infinity@": "-Infinity",
    "@surrogate@": '"\\ud800"',
    "@twice@": '{"a": 1, "a": 2}',
}


def some(rng: random.Random) -> Any:
    """Return a value of any kind."""
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(NUMBERS)
    if kind < 0.7:
        return rng.choice(TEXTS)
    return copy.deepcopy(rng.choice(OTHERS)) if kind < 0.9 else rng.choice(list(RAW))


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every node, at most a few hundred of them."""
    found = [path]
    if len(path) < 8:
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree[:6]) if isinstance(tree, list) else ()
        for name, child in list(pairs)[:200]:
            found += places(child, (*path, name))
    return found


def mutated(rng: random.Random, tree: Any) -> tuple[Any, str]:
    """Return a changed copy, and what was changed."""
    tree = copy.deepcopy(tree)
    every = places(tree)
    depth = rng.randint(0, max(map(len, every)))
    path = rng.choice([each for each in every if len(each) == depth])
    if not path:
        value = some(rng)
        return value, f"all of it is {shown(value)}"
    parent = tree
    for name in path[:-1]:
        parent = parent[name]
    last = path[-1]
    where, action = "/".join(map(str, path)), rng.random()
    if action < 0.2 and isinstance(parent, dict):
        del parent[last]
        return tree, f"{where} is missing"
    if action < 0.25 and isinstance(parent, dict):
        name = rng.choice(TEXTS)
        parent[name] = some(rng)
        return tree, f"{where}: an unknown key {name!r} beside it"
    if action < 0.3 and isinstance(parent, list):
        change = rng.choice([lambda: parent.extend(parent * 3), parent.pop, parent.clear, parent.reverse])
        change()
        return tree, f"{where}: another length or order of its list"
    old = parent[last]
    if action < 0.5 and isinstance(old, bool | int | float):
        value = rng.choice([-old, old + 1, old * 10**6, old * 1e300 if abs(old) < 1e9 else 0, str(old), [old], not old])
    elif action < 0.5 and isinstance(old, str):
        value = rng.choice(
            [old + "\x00", old.upper(), old[:-1], old * 50, [old], {"a": old}, f"../{old}", f"{old}\n{old}"]
        )
    else:
        value = some(rng)
    parent[last] = value
    return tree, f"{where} is {shown(value)}"


def dumped(tree: Any, **options: Any) -> str:
    """Return a tree as JSON text, with the values of RAW in place."""
    text = json.dumps(tree, **options)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text


def shown(value: Any) -> str:
    """Return a value for a title."""
    text = (
        repr(value) if not isinstance(value, int) or abs(value) < 10**50 else f"an integer of {value.bit_length()} bits"
    )
    return text if len(text) < 80 else f"{text[:60]}… ({len(text)} characters)"
