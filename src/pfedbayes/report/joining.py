"""What joining bought: a table, a chart and sentences about the clients that could also train alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pfedbayes.report import charts
from pfedbayes.report.charts import Figure
from pfedbayes.report.page import Table
from pfedbayes.runs.folder import Run
from pfedbayes.runs.schema import JoiningRecord

METRIC = "NLL"
_STYLE = {"better": 0, "worse": 1, "no difference shown": 6}
_COUNTED = {"better": "better", "worse": "worse", "no difference shown": "without a difference that could be shown"}
_MOST_SENTENCES = 10
_MOST_INTERVALS = 30  # clients that a chart still labels legibly
_MOST_ROWS = 200  # clients that a table lists


def records(run: Run) -> list[JoiningRecord]:
    """Return the records of a finished run, the largest changes first; none if no models were trained alone."""
    found = (run.summary.joining if run.summary else None) or []
    return sorted(
        found, key=lambda one: (one.folds.conclusion == "no difference shown", -abs(one.folds.difference), one.client)
    )


def lead(run: Run) -> list[str]:
    """Return sentences that count the clients by conclusion and by default model."""
    ours = records(run)
    if not ours:
        return []
    counts = Counter(one.folds.conclusion for one in ours)
    alone = [one.client for one in ours if one.folds.use == "alone"]
    first = (
        f"For {counts['better']:,} of {_clients(len(ours))} the joined model is better than the one that the client "
        f"trains alone, for {counts['worse']:,} it is worse, and for {counts['no difference shown']:,} there is too "
        "little evidence to tell."
    )
    if counts["no difference shown"] == len(ours):
        whom = f"any of the {len(ours):,} clients" if len(ours) > 1 else "the client"
        first = f"There is too little evidence to tell for {whom} whether its joined model is better than one alone."
    if not alone:
        return [first, "By default every client uses its joined model."]
    names = f" ({', '.join(alone)})" if len(alone) <= 3 else ""
    verb = "uses its" if len(alone) == 1 else "use their"
    return [first, f"By default {_clients(len(alone))}{names} {verb} own model, and the others use the joined one."]


def sentences(run: Run, most: int = _MOST_SENTENCES) -> list[str]:
    """Return a sentence per client for the terminal, the largest changes first; the last line counts the rest."""
    ours = records(run)
    lines = [one.folds.sentence(METRIC) for one in ours[:most]]
    if rest := ours[most:]:
        lines.append(f"{len(rest):,} more client{'s' * (len(rest) != 1)}: {_counts(rest)}")
    return lines


def table(run: Run) -> Table | None:
    """Return a row per client: losses alone and joined, the difference with its interval, and the verdict."""
    ours = records(run)
    if not ours:
        return None
    tested = any(one.test for one in ours)
    rows = []
    for one in ours[:_MOST_ROWS]:
        by_folds = one.folds
        difference = f"{by_folds.difference:+.3f} ({by_folds.low:+.3f} to {by_folds.high:+.3f})"
        cells = [f"{by_folds.rows:,}", by_folds.change, difference.replace("-", "−")]
        if tested:
            cells.append(f"{one.test.change} ({one.test.rows:,})" if one.test else "")
        rows.append((one.client, [*cells, by_folds.finding]))
    heads = ["rows", f"{METRIC}: alone → joined", "difference (90 % interval)"]
    heads += [*(["on test rows (number)"] if tested else []), "joining is"]
    more = f", {_MOST_ROWS} of {len(ours):,} clients" if len(ours) > _MOST_ROWS else ""
    return Table(f"By cross-validation, the largest changes first{more}", heads, [("", rows)])


def figure(run: Run) -> Figure | None:
    """Draw the differences with their intervals, from better to worse."""
    ours = records(run)
    if not ours:
        return None
    shown = sorted(ours[:_MOST_INTERVALS], key=lambda one: one.folds.difference)
    rows = [
        charts.Interval(one.client, one.folds.difference, one.folds.low, one.folds.high, one.folds.conclusion)
        for one in shown
    ]
    title = f"{METRIC} of the joined model minus {METRIC} alone"
    found = {one.folds.conclusion for one in shown}
    svg = charts.interval_chart(
        title,
        {kind: style for kind, style in _STYLE.items() if kind in found},
        rows,
        value_label=f"difference in {METRIC}: left of 0, joining is better",
        description=f"Differences of {_clients(len(shown))}: {_counts(shown)}.",
    )
    more = f" Shown: the {len(shown)} largest changes." if len(shown) < len(ours) else ""
    return Figure(title, svg, f"Markers and lines: posterior means and 90 % intervals.{more}")


def _counts(some: Sequence[JoiningRecord]) -> str:
    """Count clients by conclusion, as a part of a sentence."""
    counts: Counter[str] = Counter(one.folds.conclusion for one in some)
    parts = [f"{counts[kind]:,} {text}" for kind, text in _COUNTED.items() if counts[kind]]
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def _clients(number: int) -> str:
    return f"{number:,} client{'s' * (number != 1)}"
