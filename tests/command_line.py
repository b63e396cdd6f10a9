"""Call the command line in a process of its own."""

import dataclasses
import subprocess
import sys
from pathlib import Path

from pfedbayes import runs

SMALL = [
    "--set", "data.name=blobs", "--set", "data.clients=4", "--set", "data.examples=60", "--set", "net.hidden=[8]",
    "--set", "training.batch_size=10", "--set", "training.local_steps=3", "--set", "training.rounds=6",
    "--set", "training.evaluate_every=2",
]  # fmt: skip


def pfedbayes(*arguments, cwd, **options):
    command = [sys.executable, "-m", "pfedbayes", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300, **options)


def start(*arguments, cwd):
    command = [sys.executable, "-m", "pfedbayes", *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def log_without_times(folder: Path):
    return [dataclasses.replace(record, seconds=0.0) for record in runs.read_run(folder).rounds]
