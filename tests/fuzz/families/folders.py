"""Run folders in which a file is damaged, of other structure, or something else than a file."""

import json
import tomllib
from pathlib import Path

from ..damage import change, split_tensors, tensors_file, toml
from ..trials import Command, Trial, Workshop

RUNS = [
    "table",
    "table",
    "unfinished",
    "unfinished",
    "resting",
    "regression",
    "blobs",
    "saved",
    "federation/run",
    "times",
    "times",
    "ordinal",
]


def uses(shop: Workshop, run: Path, name: str) -> list[Command]:
    """Return a command that reads a run, now and then two."""
    rng = shop.rng
    own = name in ("table", "resting", "unfinished")
    clients = {"blobs": "client 0", "saved": "client 0"}
    client = ["--client", rng.choice(["north", "east"]) if name == "table" else clients.get(name, "south")]
    rows = ["--input", str(shop.bases.path("new-times.csv" if name == "times" else "new.csv"))]
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
    if rng.random() < 0.08:
        return _hostile(shop, run, name)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    chosen = rng.sample(files, rng.choice([1, 1, 1, 2]))
    titles = [change(rng, path, outside) for path in chosen]
    commands = uses(shop, run, name)
    kept = [run]
    if commands[0][0] == "run" and any(path.name == "report.html" for path in chosen):
        kept = []  # the run itself goes on before its page is refused
    return Trial(f"{name}: {', '.join(titles)}", commands, keep_if_refused=kept)


def _hostile(shop: Workshop, run: Path, name: str) -> Trial:
    """A run folder that names something to run."""
    rng, shell = shop.rng, ["sh", "-c", f"touch {shop.canary}"]
    module = rng.choice(["subprocess:Popen", "subprocess:run", "os:system", "builtins:exec", "antigravity:x"])
    config = run / "config.toml"
    tree = tomllib.loads(config.read_text())
    tree[rng.choice(["net", "net", "method"])] = {"name": module, "args": shell}
    if rng.random() < 0.7:
        config.write_bytes(toml(tree))
    calibration = run / "calibration.safetensors"
    if calibration.exists() and rng.random() < 0.7:
        header, body = split_tensors(calibration.read_bytes())
        about = json.loads(header["__metadata__"]["run"])
        about["net"] = {"name": module}
        if isinstance(preprocessing := about.get("preprocessing"), str):
            about["preprocessing"] = json.dumps(json.loads(preprocessing) | {"shape": shell})
        elif preprocessing:
            preprocessing["shape"] = shell
        header["__metadata__"]["run"] = json.dumps(about)
        calibration.write_bytes(tensors_file(rng, header, body))
    return Trial(f"{name}: names {module}", uses(shop, run, name), keep_if_refused=[run])


def _commands() -> set[str]:
    from .arguments import commands

    return set(commands())


COMMANDS = _commands()
