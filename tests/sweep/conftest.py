import io

import pytest
from rich.console import Console

from pfedbayes.sweep.command import Options, command

TINY = """
[data]
name = "blobs"
clients = 2
examples = 60
classes = 4
labels_per_client = 2
[net]
hidden = [6]
[training]
rounds = 4
local_steps = 2
batch_size = 10
evaluate_every = 2
"""
SWEEP = """
base = "tiny.toml"
seeds = 2
set.evaluation.label_prior = true
[[rows]]
method = ["pfedbayes", "fedavg"]
split = ["two-block", "sliding"]
[[rows]]
method = "fedavg"
vary = [{ method.eta = 0.1 }, { method.eta = 0.2 }]
"""


class Sweep:
    """A sweep file in a folder, and the command run on it in this process."""

    def __init__(self, folder):
        self.folder, self.file, self.out = folder, folder / "sweep.toml", folder / "out"
        (folder / "tiny.toml").write_text(TINY)
        self.text = SWEEP
        self.write(SWEEP)

    def write(self, text):
        self.file.write_text(text)

    def __call__(self, only=(), part="1/1", stopped=lambda: False, **options):
        said = io.StringIO()
        options = Options(**{"out": self.out, "device": "cpu"} | options)
        found = command(self.file, only, part, options, stopped, Console(file=said, width=500))
        self.said = said.getvalue()
        return found


@pytest.fixture
def sweep(tmp_path):
    return Sweep(tmp_path)
