"""Measure speed, print the tables, and write the raw results and the page."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import limits
from benchmarks.page import render, section
from benchmarks.race import ROOT, Disagreement, Failed, Section, race
from benchmarks.sections import FULL, QUICK, SECTIONS, chosen
from benchmarks.worker import cores
from pfedbayes.engine.plan import choose_device
from pfedbayes.errors import UserError
from pfedbayes.runs import describe_code, describe_machine, now

PAGE = ROOT / "docs" / "results" / "speed.md"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--quick", action="store_true", help="few turns, for a trial; writes only with --out")
    parser.add_argument("--full", action="store_true", help="add the runs of 800 rounds, on a GPU")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=[], help="measure only these tables")
    parser.add_argument("--out", type=Path, help=f"the page (default {PAGE.relative_to(ROOT)}), raw results beside it")
    parser.add_argument("--render", action="store_true", help="measure nothing: write the page from the raw results")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    wanted = arguments(argv)
    out = wanted.out or (None if wanted.quick else PAGE)
    if not wanted.render:
        measure(wanted, out)
    if out:
        out.write_text(render(out.parent, out.stem))
        say(f"wrote {out}")


def measure(wanted: argparse.Namespace, out: Path | None) -> None:
    """Measure the wanted sections one by one; print and save each at once."""
    device = choose_device(wanted.device)
    began = time.monotonic()
    torch.set_num_threads(cores())
    about = {
        "date": now(),
        "commit": describe_code()["commit"],
        "machine": describe_machine() | {"gpu": torch.cuda.get_device_name() if device == "cuda" else None},
        "quick": wanted.quick,
    }
    for name, make in chosen(device, QUICK if wanted.quick else FULL, wanted.only, wanted.full).items():
        made = make()
        say(f"{time.monotonic() - began:5.0f} s  {made.title}")
        measured = {"title": made.title, "note": made.note, **results(made, device), **about}
        print(section(measured), flush=True)
        if out:
            keep(out.with_name(f"{out.stem}_{device}.json"), name, measured)
    say(f"{time.monotonic() - began:5.0f} s  done")


def results(made: Section, device: str) -> dict[str, Any]:
    """Return the rows of a race with their work and the least time that it needs at the machine's limits."""
    load = os.getloadavg()[0]
    measured = [limits.measure(device)]

    def after_turn(text: str) -> None:
        say(text)
        measured.append(limits.measure(device))

    rows = race(made, after_turn)
    rates = limits.best(measured)
    for row, contender in zip(rows, made.contenders, strict=True):
        if "absent" not in row:
            trains = contender.options.get("job", "train") == "train"
            row["client_steps"] = contender.work.client_steps if trains else None
            halved = contender.options.get("plan", {}).get("precision") == "bf16"  # its rate is not measured
            whole = trains and contender.kind != "products"
            row["floor"] = limits.floor(contender.work, rates, row["tf32"]) if whole and not halved else None
    return {"rows": rows, "limits": rates._asdict(), "load": load, "others": "stopped"}


def keep(path: Path, name: str, measured: dict[str, Any]) -> None:
    """Replace one section of the raw results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[name] = measured
    ordered = {known: kept[known] for known in SECTIONS if known in kept}
    path.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (UserError, Disagreement, Failed) as error:
        sys.exit(f"error: {error}")
