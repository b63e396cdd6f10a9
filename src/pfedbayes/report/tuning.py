"""The page of a search for settings: what was chosen, and what mattered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pfedbayes.report.charts import Figure, point_chart
from pfedbayes.report.page import Table, environment

if TYPE_CHECKING:
    from pfedbayes.sweep.tuning import Tuning


def ranked(found: Tuning) -> list[int]:
    """Return the trials that took part in the last stage, the best first."""
    last = [
        k for k, trial in enumerate(found.trials) if len(trial.scores) == found.done and trial.scores[-1] is not None
    ]
    return sorted(last, key=lambda k: (found.trials[k].scores[-1] or 0.0, k))


def verdict(found: Tuning) -> str:
    """Say in a sentence what was chosen, and why."""
    best = ranked(found)[0]
    if best == 0:
        return "The setting as given predicts best, so it is kept."
    gain = f"by {found.gain:.4f} nats a row (standard error {found.error:.4f}) on {found.rows:,} rows"
    if found.chosen == 0:
        return (
            f"Setting {best} is better than the one given {gain}: no more than chance may do, so the given one is kept."
        )
    return f"Setting {found.chosen} is chosen: it predicts better than the one given {gain}."


def importance(found: Tuning) -> dict[str, float]:
    """Return by hyper-parameter its rank correlation with the score after the first stage, the strongest first.

    All settings took part in that stage. A setting that diverged counts as the worst.
    """
    scores = np.array([np.inf if trial.scores[0] is None else trial.scores[0] for trial in found.trials])
    strength = {}
    for name in found.space:
        values = np.array([trial.values[name] for trial in found.trials])
        strength[name] = _rank_correlation(values, scores)
    return dict(sorted(strength.items(), key=lambda item: -abs(item[1])))


def _rank_correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Return Spearman's rank correlation; 0 if one of the two is constant."""
    of_x, of_y = (
        np.array([float(np.mean(np.flatnonzero(np.sort(each) == value))) for value in each]) for each in (x, y)
    )
    return float(np.corrcoef(of_x, of_y)[0, 1]) if of_x.std() and of_y.std() else 0.0


def page_of(found: Tuning) -> str:
    """Return the page as HTML."""
    strength = importance(found)
    figures = [_figure(found, name, value) for name, value in strength.items()]
    ends = {name: " to ".join(f"{end:g}" for end in found.space[name]) for name in strength}
    space = [(name, [ends[name], f"{value:+.2f}"]) for name, value in strength.items()]
    rows = [
        (
            "as given" if k == 0 else str(k),
            [*(f"{value:.4g}" for value in found.trials[k].values.values()), _score(found.trials[k].scores)],
        )
        for k in sorted(range(len(found.trials)), key=lambda k: _place(found, k))
    ]
    context = {
        "method": found.method,
        "verdict": verdict(found),
        "how": _how(found),
        "the_figures": figures,
        "space": Table("", ["range", "rank correlation with the loss"], [("", space)]),
        "trials": Table("", [*found.space, "NLL, after each stage"], [("", rows)]),
    }
    return environment().get_template("tuning.html").render(context)


def _how(found: Tuning) -> str:
    decides = f"the rows that {found.folds} folds leave out" if found.folds else "validation rows"
    stages = ", ".join(map(str, found.stages))
    return (
        f"{len(found.trials)} settings of {found.method} were trained at once and compared by the negative "
        f"log-likelihood of {decides} ({found.rows:,}), after rounds {stages}. After each stage but the last the "
        "better half went on."
    )


def _place(found: Tuning, k: int) -> tuple[int, float]:
    scores = found.trials[k].scores
    return -len(scores), np.inf if scores[-1] is None else scores[-1]


def _score(scores: Sequence[float | None]) -> str:
    return ", ".join("diverged" if score is None else f"{score:.4f}" for score in scores)


def _figure(found: Tuning, name: str, strength: float) -> Figure:
    points = [(trial.values[name], trial.scores[0]) for trial in found.trials]
    low, high = found.space[name]
    title = f"{name}: loss after {found.stages[0]} rounds"
    svg = point_chart(
        title,
        [(x, y) for x, y in points if y is not None],
        x_label=name,
        y_label="NLL",
        logarithmic=low > 0 and high >= 10 * low and points[0][0] > 0,  # the setting as given may lie outside
        description=f"The loss of each setting against {name}; the ring is the setting as given.",
    )
    return Figure(title, svg, f"Rank correlation {strength:+.2f}. The ring is the setting as given.")
