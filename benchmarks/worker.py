"""One contender in its own process; orders arrive on its standard input."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Protocol, TextIO

import numpy as np
import torch
from torch import Tensor

from benchmarks.work import Work


class Trainer(Protocol):
    """A contender. `outcome` is the vector that must agree among contenders of the same algorithm."""

    def train(self, rounds: int) -> None: ...

    def outcome(self) -> Tensor: ...


def serve(work: Work, threads: int, replies: TextIO, trainer: Trainer) -> None:
    """Execute {"rounds": n}, {"outcome": PATH} and {"forget_peak": true}; reply with the seconds of each order."""
    torch.set_num_threads(threads)
    print(json.dumps(_facts(work.device, 0.0)), file=replies)
    for line in sys.stdin:
        command = json.loads(line)
        start = time.perf_counter()
        if "rounds" in command:
            trainer.train(command["rounds"])
            if work.device == "cuda":
                torch.cuda.synchronize()
        elif "forget_peak" in command:
            _forget_peak(work.device)
        else:
            np.save(command["outcome"], trainer.outcome().cpu().double().numpy())
        print(json.dumps(_facts(work.device, time.perf_counter() - start)), file=replies)


def _facts(device: str, seconds: float) -> dict[str, float | bool]:
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else sum(map(peak_bytes, family(os.getpid())))
    tf32 = device == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {"seconds": seconds, "memory_mb": peak / 1e6, "tf32": tf32}


def _forget_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for member in family(os.getpid()):
        with contextlib.suppress(OSError):  # exists on Linux only; a process may have just ended
            Path(f"/proc/{member}/clear_refs").write_text("5")


def family(ancestor: int) -> list[int]:
    """Return a process and all its descendants."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        parents[int(path.parent.name)] = int(fields[1])
    members = [ancestor]
    for member in members:
        members += [child for child, parent in parents.items() if parent == member]
    return members


def peak_bytes(process: int) -> int:
    """Return the peak memory of a process; pages that it shares with others count in each."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:  # it has just ended, or this is not Linux
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    spec = json.loads(sys.argv[1])
    # Libraries may print: only replies go to the real standard output.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(cores())
    work = Work(**spec["work"])
    threads = spec["options"].pop("threads", cores())
    importlib.import_module(f"benchmarks.{spec['kind']}").run(
        work, spec["options"], partial(serve, work, threads, replies)
    )


if __name__ == "__main__":
    main()
