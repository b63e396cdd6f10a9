"""Good files to begin with: data, runs, exports, sweeps and federations, made once and then copied."""

import csv
import fcntl
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from .forks import command, in_child

TESTS = Path(__file__).parents[1]
CLIENTS = ("north", "south", "west")
QUICK = [
    "--set", "training.rounds=2", "--set", "training.local_steps=2", "--set", "training.batch_size=8",
    "--set", "training.evaluate_every=1", "--set", "execution.threads=1", "--set", "evaluation.samples=2",
    "--device", "cpu",
]  # fmt: skip
TINY = [*QUICK, "--set", "net.hidden=[4]"]
BLOBS = ["--set", "data.name=blobs", "--set", "data.clients=3", "--set", "data.examples=30", "--set", "data.classes=3",
         "--set", "data.labels_per_client=2"]  # fmt: skip
# A run of which the crash tests lose parts.
RUN = ["run", *BLOBS, *TINY, "--set", "data.validation=0.2", "--set", "execution.checkpoint_seconds=0", "--out", "run"]
# A search for settings.
SEARCH = [*BLOBS, *TINY, "--set", "data.validation=0.2", "--set", "training.rounds=4"]
MORE = ["--set", "training.rounds=3", "--set", "training.participants=2"]
IN_FILE = ["--set", "training.train=chosen", "--set", "execution.resting=file"]
TABLE = ["--target", "outcome", "--client-column", "clinic"]
TIMES = ["--target", "years", "--event", "died", "--client-column", "clinic"]

SWEEP = """
base = "base.toml"
preset = "fuzz"
seeds = 1

[[rows]]
method = ["fedavg", "pfedbayes"]
set.training.local_steps = 2
"""
BASE = """
[data]
name = "blobs"
clients = 3
examples = 30
classes = 3
labels_per_client = 2
validation = 0.2

[net]
hidden = [4]

[training]
rounds = 2
local_steps = 2
batch_size = 8
evaluate_every = 1

[evaluation]
samples = 2

[execution]
threads = 1
"""


class Bases:
    """The folder that holds them."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def path(self, name: str) -> Path:
        """Return where a base lies."""
        return self.root / name

    def text(self, name: str) -> str:
        """Return what a good command has printed."""
        return (self.root / name).read_text()

    def copy(self, name: str, to: Path) -> Path:
        """Copy a base."""
        source = self.root / name
        if source.is_dir():
            shutil.copytree(source, to, symlinks=True)
        else:
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, to)
        return to

    def ensure(self) -> None:
        """Make all of them, unless another process has."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (self.root / "complete").exists():
                for make in (_data, _runs, _uses, _sweep, _tuning, _federation, _to_continue):
                    self._in_child(make)
                for name, arguments in PREDICTIONS.items():
                    out = self._in_child(partial(_call, "predict", *arguments))
                    (self.root / f"{name}.printed").write_text(out)
                (self.root / "complete").touch()

    def _in_child(self, make: Callable[[], None]) -> str:
        def work() -> int:
            os.chdir(self.root)
            make()
            return 0

        ended = in_child(work, self.root, seconds=300)
        if ended.code:
            raise RuntimeError(f"cannot make the bases ({make}):\n{ended.out}\n{ended.err}")
        return ended.out


def rows(rng: random.Random, count: int, clients: tuple[str, ...] = CLIENTS) -> list[dict[str, object]]:
    """Return rows of a small table that has something to learn from."""
    found: list[dict[str, object]] = []
    for k in range(count):
        age, dose = round(rng.gauss(50, 10), 1), rng.choice(["low", "mid", "high"])
        sick = age + {"low": 0, "mid": 5, "high": 10}[dose] + rng.gauss(0, 5) > 55
        found.append({"clinic": clients[k % len(clients)], "age": "" if k % 17 == 3 else age, "dose": dose,
                      "flag": k % 2, "level": round(age / 7 + rng.gauss(0, 1), 3),
                      "outcome": "sick" if sick else "well"})  # fmt: skip
    return found


def patients(rng: random.Random, count: int, clients: tuple[str, ...] = CLIENTS) -> list[dict[str, object]]:
    """Return rows with a time until an event, which was seen or had not happened by then."""
    found: list[dict[str, object]] = []
    for k in range(count):
        age = round(rng.gauss(50, 10), 1)
        years, seen_for = rng.expovariate(0.02 * age), rng.uniform(0.5, 4)
        found.append({"clinic": clients[k % len(clients)], "age": age, "years": round(min(years, seen_for) + 0.01, 3),
                      "died": int(years <= seen_for)})  # fmt: skip
    return found


def write_csv(path: Path, table: list[dict[str, object]], without: tuple[str, ...] = ()) -> None:
    """Write rows as CSV."""
    names = [name for name in table[0] if name not in without]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(table)


def _data() -> None:
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    rng = random.Random(1)
    write_csv(Path("table.csv"), rows(rng, 90))
    new = rows(rng, 5)
    write_csv(Path("new.csv"), new, without=("clinic", "outcome"))
    write_csv(Path("times.csv"), patients(rng, 90))
    write_csv(Path("new-times.csv"), patients(rng, 5), without=("clinic", "years", "died"))
    write_csv(Path("east.csv"), rows(rng, 30, ("east",)), without=("clinic",))
    columns = {name: [row[name] for row in rows(rng, 60)] for name in ("clinic", "dose", "flag", "level", "outcome")}
    pyarrow.parquet.write_table(pyarrow.table(columns), "table.parquet")
    noise = np.random.default_rng(1)
    x, y = noise.normal(size=(60, 4)).astype(np.float32), noise.integers(0, 3, 60)
    np.savez("arrays.npz", x=x, y=y, client=np.arange(60) % 3)
    np.savez("new.npz", x=x[:5])
    for k in range(24):
        path = Path(f"images/{CLIENTS[k % 2]}/{'cat' if k % 4 < 2 else 'dog'}/{k}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
    shutil.copyfile("images/north/cat/0.png", "new.png")
    Path("tiny.toml").write_text(BASE)
    Path("blobs.csv").write_text("x0,x1,x2,x3\n0,1,2,3\n1,1,0,-1\n")


def _call(*arguments: str) -> None:
    if code := command(*arguments):
        raise RuntimeError(f"{arguments}: exit code {code}")


def _runs() -> None:
    held_out = ["--set", "data.validation=0.2"]
    own = ["run", *TINY, *held_out]
    table = ["--data", "table.csv", *TABLE]
    _call(*own, *table, "--set", "data.certify=0.3", "--set", "training.patience=9", "--out", "table")
    _call(*own, *table, "--set", "training.train=chosen", "--set", "training.participants=2",
          "--set", "execution.resting=file", "--out", "resting")  # fmt: skip
    _call(*own, "--data", "table.csv", "--target", "level", "--client-column", "clinic",
          "--set", "data.ignore=['outcome']", "--out", "regression")  # fmt: skip
    _call("run", *QUICK, *held_out, "--data", "times.csv", *TIMES, "--out", "times")
    _call("run", *QUICK, *held_out, "--data", "table.csv", "--target", "dose", "--order", "low,mid,high",
          "--client-column", "clinic", "--set", "data.ignore=['outcome']", "--out", "ordinal")  # fmt: skip
    _call(*own, "--data", "arrays.npz", "--out", "arrays")
    _call(*own, "--data", "images", "--net", "mlp", "--out", "image-run")
    _call(*own, *BLOBS, "--set", "method.name=fedavg", "--out", "blobs")
    roles = ['data.path="table.csv"', "data.target=outcome", "data.client_column=clinic", "training.rounds=4"]
    stopped([*own, *(part for text in roles for part in ("--set", text))], Path("unfinished"), 2)


def stopped(arguments: list[str], folder: Path, after: int) -> int:
    """Stop the run of these arguments after a round."""
    from pfedbayes.runs.execute import execute
    from pfedbayes.runs.experiment import read_experiment

    settings = [text for flag, text in pairwise(arguments) if flag == "--set"]
    rounds = execute(read_experiment(None, settings), folder, [1], "cpu")
    for step in rounds:
        if step.round == after:
            rounds.close()
    return 0


def _uses() -> None:
    import torch

    import pfedbayes

    _call("export", "table", "--client", "north", "-o", "north.safetensors")
    _call("export", "regression", "--shared", "-o", "shared.safetensors")
    _call("export", "arrays", "--client", "1", "-o", "arrays.safetensors")
    _call("export", "times", "--client", "north", "-o", "times.safetensors")
    _call("export", "ordinal", "--client", "north", "-o", "ordinal.safetensors")
    _call("export", "image-run", "--client", "north", "-o", "images.safetensors")
    _call("personalize", "table", "--data", "east.csv", "--steps", "2")
    _call("certify", "table", "--steps", "1", "--draws", "2")
    federation = pfedbayes.load("blobs")
    pfedbayes.save(federation, "saved")
    torch.save({"a": torch.zeros(1)}, "pickle.pt")


# What is predicted from good files, and has to be predicted from damaged ones too, unless they are refused.
PREDICTIONS = {
    "export": ["north.safetensors", "--input", "new.csv"],
    "north": ["table", "--client", "north", "--input", "new.csv"],
    "east": ["table", "--client", "east", "--input", "new.csv"],
    "resting": ["resting", "--client", "south", "--input", "new.csv"],
    "regression": ["regression", "--shared", "--input", "new.csv"],
}


def _sweep() -> None:
    Path("sweep").mkdir()
    Path("sweep/base.toml").write_text(BASE)
    Path("sweep/sweep.toml").write_text(SWEEP)
    _call("sweep", "sweep/sweep.toml", "--out", "sweep/out", "--results", "sweep/results.json")
    results = TESTS.parent / "docs" / "results"
    Path("results").mkdir()
    for path in results.glob("*.json"):
        if path.name not in ("tuning.json", "table1.json"):
            shutil.copyfile(path, Path("results") / path.name)
    few = json.loads((results / "table1.json").read_text())
    Path("results/table1.json").write_text(json.dumps(few[:: max(1, len(few) // 60)]))


def _tuning() -> None:
    from pfedbayes.files.checksums import dump_json

    _call("tune", *SEARCH, "--settings", "4", "--out", "tuning")
    # Two stages are still to come.
    whole = json.loads(Path("tuning/tuning.json").read_text())
    for name in ("chosen", "gain", "error", "checksum"):
        del whole[name]
    for trial in whole["trials"]:
        trial["scores"] = trial["scores"][:1]
    Path("tuning-begun").mkdir()
    Path("tuning-begun/tuning.json").write_text(dump_json(whole, indent=1))


def _federation() -> None:
    from .flower_grids import FakeGrid, run_config, serve

    Path("federation").mkdir()
    serve(FakeGrid(run_config(Path("federation").resolve(), training__rounds=2)))


def _to_continue() -> None:
    for name, more in (("finished", []), ("in-file", [*IN_FILE, *MORE, "--set", "training.rounds=2"]), ("part", MORE)):
        Path(name).mkdir()
        os.chdir(name)
        if name == "part":
            stopped([*RUN, *more], Path("run"), 1)
        else:
            _call(*RUN, *more)
        os.chdir("..")
