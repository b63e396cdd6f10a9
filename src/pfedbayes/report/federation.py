"""What the report says of a run on Flower: traffic, and who was refused, silent or has left."""

from __future__ import annotations

import itertools

from pfedbayes.runs.folder import Run

START = "flwr run . SUPERLINK --stream"
MOST = 100  # lines shown of what was refused


def lead(run: Run) -> list[str]:
    """A few sentences."""
    taken = [line for line in run.journal if line["taken"] and line["attempt"]]
    if not taken:
        return ["No round has been finished yet."]
    down, up = (sum(line[way] for line in taken) / len(taken) / 1e6 for way in ("down", "up"))
    sentences = [
        f"Every client was a node of its own. A round sent {down:.2f} MB to the nodes and {up:.2f} MB back, "
        f"and took {_median(_seconds(run)):.1f} s (median)."
    ]
    if again := len([line for line in run.journal if not line["taken"]]):
        sentences.append(f"{again} attempts had too few usable uploads and were made again.")
    if left := run.info["federation"]["left"]:
        sentences.append(f"{', '.join(left)} left for good; its state was deleted on its node.")
    if epsilon := taken[-1].get("epsilon"):
        delta = run.config["federation"]["privacy_delta"]
        sentences.append(
            f"The shared model is ({epsilon:.3g}, {delta:g})-differentially private towards any one client; the scores "
            "that nodes report are not covered."
        )
    if not _refused(run):
        sentences.append("Nothing was refused.")
    return sentences


def refused(run: Run) -> list[tuple[str, list[str]]]:
    """Rows (round, [client, reason]), the last ones first."""
    return list(reversed(_refused(run)))[:MOST]


def _refused(run: Run) -> list[tuple[str, list[str]]]:
    return [(str(line["round"]), [name, why]) for line in run.journal for name, why in line["refused"].items()]


def _seconds(run: Run) -> list[float]:
    """Seconds of each finished round, attempts included; the clock of a run that was started again goes on."""
    ends = [line["seconds"] for line in run.journal if line["taken"] and line["attempt"]]
    return [later - sooner for sooner, later in itertools.pairwise(ends) if later > sooner] or ends


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
