"""The page, made from the raw results and from nothing else."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.race import median_ratio

HEADER = """# Speed

Written by `make bench` (`python -m benchmarks --device cpu|cuda`) from the raw results beside it; do not edit.

Every contender does the same work in a process of its own, with all cores for torch's threads unless its name says
otherwise (Flower: one actor with one thread per core). The processes take turns. Those that are not on turn were
stopped where it says so and idle elsewhere. On the CPU, threads without work spin for a moment and then sleep
(`OMP_WAIT_POLICY=PASSIVE`, `GOMP_SPINCOUNT=500`). Times are medians over the turns, without start-up, compilation and
warm-up. Rows of matrix products alone do nothing but those, client by client as we have them: what would be left if
all else were free.

- ratio: cost of a client-step beside the first row, unless the table says beside which (above 1: slower), the median
  of the ratios turn by turn, so that what slows the machine down for a while cancels; then the smallest and the
  largest of them.
- differs: contenders that should compute the same were seen to do so before they were timed. This is the distance
  between the models after the first round, as a fraction of the way that they have come from their start.
- memory: the peak of the contender's processes together while it was timed, torch included and shared pages counted
  in each; on a GPU what torch has allocated there.
- roofline: the share of the measured time that the least work of a round would take at the rates measured in the same
  run, if nothing overlaps; `benchmarks/limits.py` says what is counted.

The load average before a table was measured says how busy the machine was with other things: near 0 is good.
"""


def render(folder: Path, stem: str) -> str:
    """The page from the files STEM_cpu.json and STEM_cuda.json that are in the folder."""
    parts = [HEADER]
    for device in ("cpu", "cuda"):
        path = folder / f"{stem}_{device}.json"
        if path.exists():
            parts.append(f"## On the {'CPU' if device == 'cpu' else 'GPU'}\n")
            parts += [section(measured) for measured in json.loads(path.read_text()).values()]
    return "\n".join(parts)


def section(measured: dict[str, Any]) -> str:
    """One table with where and when it was measured."""
    machine, limits = measured["machine"], measured["limits"]
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB"
    if machine["gpu"]:
        where = f"{machine['gpu']} ({where})"
    tf32 = f" ({limits['flops_tf32'] / 1e9:,.0f} in TF32)" if machine["gpu"] else ""
    others = f"; others {measured['others']}" if "others" in measured else ""
    quick = " A quick run: expect noise." if measured["quick"] else ""
    return "\n".join(
        [
            f"### {measured['title']}\n",
            f"{measured['note']}\n",
            "| contender | seconds per round | client-steps per second | ratio | differs | memory, MB | roofline |",
            "|---|---|---|---|---|---|---|",
            *rows(measured["rows"]),
            "",
            f"Measured {measured['date']} at {measured['commit'] or 'an unknown commit'} on {where}, torch "
            f"{machine['torch']}, Python {machine['python']}; float32 products "
            f"{limits['flops'] / 1e9:,.0f} GFLOP/s{tf32}, copies {limits['bytes'] / 1e9:,.0f} GB/s; "
            f"load average before {measured['load']:.1f}{others}.{quick}\n",
        ]
    )


def rows(measured: list[dict[str, Any]]) -> list[str]:
    present = {row["name"]: row for row in measured if "absent" not in row}
    lines = []
    for row in measured:
        if "absent" in row:
            lines.append(f"| {row['name']} | {row['absent']} | | | | | |")
            continue
        median = statistics.median(row["seconds"])
        steps, floor = row["client_steps"], row["floor"]
        other = present.get(row.get("beside") or measured[0]["name"])
        whole = f": {row['rounds_per_turn']} rounds in {row['rounds_per_turn'] * median:.1f} s"
        cells = [
            row["name"] + (whole if len(row["seconds"]) == 1 else ""),
            f"{median:.3g}",
            f"{steps / median:,.0f}" if steps else "",
            ratio(row, other) if other else "",
            f"{row['gap']:.0e}" if row["gap"] is not None else "",
            f"{row['memory_mb']:,.0f}",
            f"{floor / median:.0%}" if floor else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def ratio(row: dict[str, Any], other: dict[str, Any]) -> str:
    """Cost per client-step beside that of another contender where both train, else per turn of the job."""
    scale = other["client_steps"] / row["client_steps"] if row["client_steps"] and other["client_steps"] else 1.0
    middle = f"{scale * median_ratio(row['seconds'], other['seconds']):.2f}"
    ratios = [scale * a / b for a, b in zip(row["seconds"], other["seconds"], strict=True)]
    return middle if row is other or len(ratios) == 1 else f"{middle} ({min(ratios):.2f}–{max(ratios):.2f})"
