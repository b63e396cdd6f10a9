"""The page on speed, made from the raw results only."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.race import median_ratio

HEADER = """# Speed

Every contender does the same work in its own process, and contenders that should compute the same are checked before
they are timed. Times are medians over several turns, without start-up, compilation and warm-up. A ratio above 1 means
slower than the default plan of this package.
"""
SUMMARY_HEAD = """| device | work | ours, seconds per round | fastest other implementation | its ratio |
|---|---|---|---|---|"""
DETAILS = """<details markdown="1">
<summary>How it is measured</summary>

- Processes take turns. The others are stopped where the line below a table says so, and idle elsewhere.
- Torch uses all cores unless the name of a contender says otherwise. Flower has one actor with one thread per core. On
  the CPU, idle threads spin briefly and then sleep (`OMP_WAIT_POLICY=PASSIVE`, `GOMP_SPINCOUNT=500`).
- ratio: cost of a client-step compared with the first row, or with the row that the table names. It is the median of
  the ratios of single turns, so a busy machine cancels; the range of the ratios follows in parentheses.
- differs: distance between the models of two contenders after the first round, as a fraction of the distance that the
  models moved.
- memory: peak of all processes of a contender while it is timed, with torch; shared pages count in each process. On a
  GPU: what torch has allocated there.
- roofline: the share of the measured time that the least work of a round needs at the rates measured in the same run,
  if nothing overlaps. `benchmarks/limits.py` says what counts.
- Rows of matrix products do nothing else, client by client as in this package: a lower limit.
- load average: how busy the machine was with other things before a table was measured; near 0 is good.

</details>

Written by `make bench` (`python -m benchmarks --device cpu|cuda`) from the JSON files beside it; do not edit.
"""
OURS, LIMIT = "ours", "matrix products"


def render(folder: Path, stem: str) -> str:
    """Return the page from the files STEM_cpu.json and STEM_cuda.json, as far as they exist."""
    raw = {
        title: json.loads(path.read_text())
        for device, title in (("cpu", "CPU"), ("cuda", "GPU"))
        if (path := folder / f"{stem}_{device}.json").exists()
    }
    summary = [line for title, sections in raw.items() for line in summary_rows(title, sections)]
    parts = [HEADER, *(["\n".join([SUMMARY_HEAD, *summary, ""])] if summary else []), DETAILS]
    for title, sections in raw.items():
        parts.append(f"## On the {title}\n")
        parts += [section(measured) for measured in sections.values()]
    return "\n".join(parts)


def summary_rows(device: str, sections: dict[str, dict[str, Any]]) -> list[str]:
    """Return a row for every table that compares our default plan with other implementations."""
    lines = []
    for measured in sections.values():
        present = [row for row in measured["rows"] if "absent" not in row]
        others = [row for row in present if not row["name"].startswith((OURS, LIMIT))]
        if present and others and present[0]["name"].startswith(OURS):
            first = present[0]
            best = min(others, key=lambda row: median_ratio(row["seconds"], first["seconds"]))
            seconds = statistics.median(first["seconds"])
            lines.append(f"| {device} | {measured['title']} | {seconds:.3g} | {best['name']} | {ratio(best, first)} |")
    return lines


def section(measured: dict[str, Any]) -> str:
    """Return one table with where and when it was measured."""
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
    """Return the cost relative to another contender: per client-step if both train, else per turn."""
    scale = other["client_steps"] / row["client_steps"] if row["client_steps"] and other["client_steps"] else 1.0
    middle = f"{scale * median_ratio(row['seconds'], other['seconds']):.2f}"
    ratios = [scale * a / b for a, b in zip(row["seconds"], other["seconds"], strict=True)]
    return middle if row is other or len(ratios) == 1 else f"{middle} ({min(ratios):.2f}–{max(ratios):.2f})"
