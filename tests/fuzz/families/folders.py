"""Run folders in which a file is damaged, of other structure, or something else than a file."""

from pathlib import Path

from ..damage import change
from ..trials import Command, Trial, Workshop

RUNS = ["table", "table", "unfinished", "unfinished", "resting", "regression", "blobs", "saved", "federation/run"]


def uses(shop: Workshop, run: Path, name: str) -> list[Command]:
    """Return a command that reads a run, now and then two."""
    rng = shop.rng
    own = name in ("table", "resting", "unfinished")
    clients = {"blobs": "client 0", "saved": "client 0"}
    client = ["--client", rng.choice(["north", "east"]) if name == "table" else clients.get(name, "south")]
    rows = ["--input", str(shop.bases.path("new.csv"))]
    folder = str(run)
    options: list[list[Command]] = [
        [["report", folder]],
        [["report", folder, "--out", "page.html"]],
        [["predict", folder, *rng.choice([client, ["--shared"]]), *rows]],
        [["export", folder, *rng.choice([client, ["--shared"], ["--all"]]), *rng.choice([[], ["-o", "out"]])]],
        [["run", "--resume", "--out", folder]],
        [["run", "--resume", "--out", folder, "--set", "training.rounds=5"]],
        [["uncertainty", folder]],
        [["paper", "bound", folder]],
    ]
    if own:
        newcomer = ["--data", str(shop.bases.path("east.csv")), "--client", "new", "--steps", "1", "--no-certificate"]
        options += [[["personalize", folder, *newcomer]], [["certify", folder, "--steps", "1", "--draws", "1"]]]
    if "verify" in COMMANDS:
        options += [[["verify", folder]]] * 2
    return rng.choice(options)


def run_folder(shop: Workshop) -> Trial:
    """A run folder with one damaged file, or two."""
    rng = shop.rng
    name = rng.choice(RUNS)
    run = shop.copy(name)
    outside = shop.outside()
    files = sorted(path for path in run.rglob("*") if path.is_file())
    chosen = rng.sample(files, rng.choice([1, 1, 1, 2]))
    titles = []
    for path in chosen:
        titles.append(change(rng, path, outside))
    return Trial(f"{name}: {', '.join(titles)}", uses(shop, run, name), keep_if_refused=[run])


def _commands() -> set[str]:
    from .arguments import commands

    return set(commands())


COMMANDS = _commands()
