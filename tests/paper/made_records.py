"""Records of sweeps for tests, made up, and the tables of a page read back."""

import itertools
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "results"
ON_VALIDATION = {"evaluation.split": "validation"}


def paper_rows(table):
    return json.loads((FOLDER / "paper.json").read_text())[table]


def scored(value, evaluations=101):
    """The scores of one estimator around an accuracy."""
    return {
        "window_best": value + 1, "last": value + 0.5, "window_mean": value, "nll": 0.25, "ece": 0.125,
        "evaluations": evaluations,
    }  # fmt: skip


def record(method, model_values, seed=1, variant="default", **others):
    """A made-up record; model_values: {model: {estimator: accuracy}}."""
    models = {
        model: {way: scored(value) for way, value in model_values[model].items()} if model in model_values else None
        for model in ("personal", "shared")
    }
    common = {
        "method": method, "preset": "paper", "dataset": "mnist", "size": "small", "split": "two-block", "seed": seed,
        "variant": variant, "device": "GPU", "seconds": 30.0, "commit": "abc", "varied": {}, "settings": {},
    }  # fmt: skip
    made = common | models | others
    return made | {"cell": "_".join(str(made[key]) for key in ("preset", "dataset", "size", "split", "method"))}


def rows_of(markdown, title):
    """Cells by row of the first table after a heading, as a dict of dicts by column."""
    lines = markdown[markdown.index(title) :].splitlines()
    table = list(
        itertools.takewhile(lambda line: line.startswith("|"), itertools.dropwhile(lambda x: x[:1] != "|", lines))
    )
    heads, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {row[0]: dict(zip(heads[1:], row[1:], strict=True)) for row in rows}
