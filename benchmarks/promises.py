"""What runs promise by default, and what they keep on test rows: calibration, abstention, conformal sets.

    python -m benchmarks.promises DATA_DIR [--tables heart,penguins] [--splits 20] [--images mnist] [--set KEY=VALUE]

For each table of benchmarks/silos/tables.toml, and for each size of a published data set, train the default run on
several splits and predict every client's test rows by default. Print one JSON line per data set. Test rows choose
nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from pfedbayes import runs
from pfedbayes.runs import saving
from pfedbayes.runs.calibration import read_calibration
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.serving.client import Client
from pfedbayes.serving.open import open_client
from pfedbayes.serving.options import Options

TABLES = tomllib.loads((Path(__file__).parent / "silos" / "tables.toml").read_text())["tables"]
BINS = 15


def settings_of(table: dict[str, Any], folder: Path) -> list[str]:
    """Return the settings that name a table."""
    path = json.dumps(str((folder / table["file"]).resolve()))
    found = [f"data.path={path}", f"data.target={table['target']}", f"data.client_column={table['client']}"]
    found += [f"data.ignore={json.dumps(table['ignore'])}"] if "ignore" in table else []
    return found + ([f"data.task={table['task']}"] if "task" in table else [])


def split(settings: list[str], seed: int) -> dict[str, Any]:
    """Train one run and return the figures of its test rows."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        experiment = read_experiment(None, [*settings, f"data.seed={seed}", "training.evaluate_every=1000"])
        for _ in execute(experiment, out, [seed], "cpu"):
            pass
        shards = saving.load(out, device="cpu").shards
        record, info = read_calibration(out), runs.read_info(out)
        parts: dict[str, list[dict[str, Any]]] = {"raw": [], "calibrated": []}
        personal = info.method.personal
        for i, name in enumerate(shards.names):
            rows = shards.test[i]
            for way in parts if len(rows) else ():
                client = open_client(out, name, shared=not personal, device="cpu", raw=way == "raw")
                parts[way].append(of_client(client, shards.x[rows], shards.y[rows].numpy()))
        found: dict[str, Any] = {way: pooled(each) for way, each in parts.items()}
        found["calibrated models"] = sorted(record.maps)
        return found


def of_client(client: Client, x: Any, y: Any) -> dict[str, Any]:
    """Return figures of one client's test rows."""
    predictor = client.predictor(Options())
    columns = predictor.columns(x)
    if client.likelihood.predicts == "numbers":
        target = client.preprocessing.target
        truth, inside = y[:, 0] * target.deviation + target.mean, np.zeros(len(y), bool)
        inside = (columns["lower"] <= truth) & (truth <= columns["upper"])
        covered = (columns["conformal_lower"] <= truth) & (truth <= columns["conformal_upper"])
        return {"inside": inside, "covered": covered, "width": columns["upper"] - columns["lower"]}
    classes = client.preprocessing.target.classes or ()
    p = np.stack([columns[f"p_{name}"] for name in classes], 1).astype(float)
    sets = [text.split("|") for text in columns["conformal_set"]]
    rule = predictor.guarantees.rule
    return {
        "nll": -np.log(np.maximum(p[np.arange(len(y)), y], 1e-300)),
        "sure": p.max(1),
        "right": p.argmax(1) == y,
        "answered": ~columns["abstain"],
        "covered": np.array([str(classes[k]) in words for k, words in zip(y, sets, strict=True)]),
        "size": np.array([len(words) for words in sets]),
        "level": np.full(len(y), rule.target if rule else np.nan),
        "guaranteed": np.full(len(y), rule is not None and not rule.estimated and rule.answered > 0),
    }


def pooled(parts: list[dict[str, Any]]) -> dict[str, float]:
    """Return means over the rows of all clients; ECE also as the mean over clients."""
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if "inside" in rows:
        return {name: float(values.mean()) for name, values in rows.items()}
    answered = rows["answered"]
    return {
        "nll": float(rows["nll"].mean()),
        "ece": ece(rows["sure"], rows["right"]),
        "ece of clients": float(np.mean([ece(part["sure"], part["right"]) for part in parts])),
        "error": float(1 - rows["right"].mean()),
        "answered": float(answered.mean()),
        "wrong": float((~rows["right"][answered]).mean()) if answered.any() else 0.0,
        "level": float(rows["level"].max()),
        "guaranteed": float(rows["guaranteed"].mean()),
        "covered": float(rows["covered"].mean()),
        "size": float(rows["size"].mean()),
    }


def ece(sure: Any, right: Any) -> float:
    """Return the expected calibration error in BINS bins of equal width."""
    place = np.ceil(sure * BINS)
    gaps = [abs((sure - right)[place == k].sum()) for k in np.unique(place)]
    return float(sum(gaps) / len(sure))


def main() -> None:
    """Train, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tables", default="")
    parser.add_argument("--images", default="")
    parser.add_argument("--sizes", default="small,medium,large")
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    cells = {name: settings_of(TABLES[name], args.data) for name in filter(None, args.tables.split(","))}
    for name in filter(None, args.images.split(",")):
        for size in args.sizes.split(","):
            cells[f"{name} {size}"] = [f"data.name={name}", f"data.size={size}"]
    for name, settings in cells.items():
        found = [split([*settings, *args.set], seed) for seed in range(1, args.splits + 1)]
        ways: dict[str, Any] = {
            way: {
                key: [round(float(f([one[way][key] for one in found])), 4) for f in (np.mean, np.min, np.max)]
                for key in found[0][way]
            }
            for way in ("raw", "calibrated")
        }
        if "nll" in found[0]["raw"]:
            worse = [one["calibrated"]["nll"] - one["raw"]["nll"] for one in found]
            ways["NLL calibrated - raw"] = [round(float(f(worse)), 4) for f in (np.mean, np.min, np.max)]
        models = [one["calibrated models"] for one in found]
        print(json.dumps({"data": name, "splits": args.splits, "mean, min, max": ways, "maps": models}), flush=True)


if __name__ == "__main__":
    main()
