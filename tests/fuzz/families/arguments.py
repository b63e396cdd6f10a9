"""Arguments of every command, found by asking the command line itself."""

import os
import random
from pathlib import Path

import click
import typer

import pfedbayes.cli.app

from ..bases import BLOBS, TINY
from ..trials import Trial, Workshop
from ..values import NUMBERS, TEXTS

# What keeps a command short that would train for minutes or longer if its arguments were right.
SHORT: dict[str, list[str]] = {
    "run": [*BLOBS, *TINY, "--dry-run"],
    "sweep": ["--dry-run"],
    "paper table1": ["--dry-run"], "paper table1-tuned": ["--dry-run"], "paper table2": ["--dry-run"],
    "paper table3": ["--dry-run"],
    "tune": [*BLOBS, *TINY, "--set", "data.validation=0.2"],
    "personalize": ["--steps", "1", "--no-certificate"],
    "certify": ["--steps", "1", "--draws", "1"],
}  # fmt: skip
LONG = {"--steps", "--draws", "--samples", "--nodes", "--settings"}  # a large number is a wish for long work


def commands() -> dict[str, click.Command]:
    """Return all commands by name."""
    found: dict[str, click.Command] = {}

    def walk(group: click.Group, before: str) -> None:
        for name, each in group.commands.items():
            if isinstance(each, click.Group):
                walk(each, f"{before}{name} ")
            else:
                found[f"{before}{name}"] = each

    top = typer.main.get_command(pfedbayes.cli.app.app)
    assert isinstance(top, click.Group)
    walk(top, "")
    return found


def text_for(shop: Workshop, parameter: click.Parameter) -> str:
    """Return an argument: often a good one, else one of the wrong kind or out of range."""
    rng, kind = shop.rng, parameter.type.name
    name = parameter.opts[0]
    if "int" in kind or "float" in kind:
        numbers = [number for number in NUMBERS if not (name in LONG and number > 100)]
        if name == "--nodes":
            numbers = [0, -1, 1, 2**31, 2**63, 10**30]
        chosen = rng.choice([*map(str, numbers), "1", "0.5", rng.choice(TEXTS)])
        return f"{chosen[:4400]}"
    if rng.random() < 0.75 and (kind in ("path", "file") or "path" in str(parameter.type).lower()):
        return str(path_for(shop))
    good = {"--client": "north", "--set": "method.zeta=1", "--host": "localhost", "--device": "cpu", "--part": "1/1",
            "--only": "fedavg", "--constant": "C=1", "--target": "outcome", "--client-column": "clinic"}  # fmt: skip
    return good[name] if name in good and rng.random() < 0.3 else rng.choice(TEXTS)


def path_for(shop: Workshop) -> Path | str:
    """Return the path of something good, bad or missing."""
    rng = shop.rng
    good = ["table", "unfinished", "saved", "blobs", "federation/run", "table.csv", "new.csv", "east.csv", "new.npz",
            "images", "new.png", "north.safetensors", "sweep/sweep.toml", "sweep/results.json", "sweep/out",
            "tiny.toml", "tuning", "times", "times.csv",
            "results", "federation/states/client-0", "pickle.pt"]  # fmt: skip
    kind = rng.random()
    if kind < 0.5:
        name = rng.choice(good)
        to = shop.folder / Path(name).name
        if not to.exists():
            shop.copy(name)
        return to
    odd = shop.folder / f"odd-{rng.randrange(10**6)}"
    makers = {
        "fifo": lambda: os.mkfifo(odd), "folder": odd.mkdir, "empty": odd.touch,
        "loop": lambda: odd.symlink_to(odd.name), "garbage": lambda: odd.write_bytes(rng.randbytes(100)),
    }  # fmt: skip
    if kind < 0.7:
        makers[rng.choice(list(makers))]()
        return odd
    return rng.choice(["missing", "/dev/null", "/dev/full", "/proc/self/mem", "/dev/stdin", "x" * 300, "x" * 5000,
        "y/" * 3000,
                       "", "a\nb", "\x1b[31m", "\udcff", "d\udcff/x.csv", "missing/x/y.csv", "new.csv/x", "-", "~", ".",
                       "a:b", "\u202ex", "x.parquet", "x.npz", "x.onnx", " ", "\t"])  # fmt: skip


def arguments(shop: Workshop) -> Trial:
    """Some arguments of a command, of which some are wrong."""
    rng = shop.rng
    every = commands()
    name = rng.choice([*every, "run", "predict", "export", "personalize"])
    given: list[str] = []
    for parameter in every[name].params:
        wanted = isinstance(parameter, click.Argument) or parameter.required
        if not wanted and rng.random() > 2.5 / max(3, len(every[name].params)):
            continue
        if wanted and rng.random() < 0.03:
            continue
        if isinstance(parameter, click.Option):
            given.append(rng.choice([*parameter.opts, *parameter.secondary_opts]))
            if parameter.is_flag:
                continue
        given += _values(shop, rng, parameter)
    if rng.random() < 0.05:
        given.insert(rng.randrange(len(given) + 1), rng.choice(["--", "-x", "--unknown", "--help", "--version", "-o"]))
    given = [text.replace("\x00", "") for text in given]
    short = SHORT.get(name, [])
    if name == "paper figure3":
        short = ["--experiment", str(shop.bases.path("tiny.toml"))]
    return Trial(f"{name} {given}"[:300], [[*name.split(), *given, *short]])


def _values(shop: Workshop, rng: random.Random, parameter: click.Parameter) -> list[str]:
    count = rng.choice([1, 1, 2]) if parameter.nargs == -1 else 1
    return [text_for(shop, parameter) for _ in range(count)]
