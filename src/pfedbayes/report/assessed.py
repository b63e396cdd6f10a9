"""The page of `pfedbayes uncertainty`: what the models of a run know, and what they do not know."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pfedbayes.evaluation.estimators import Served
from pfedbayes.report import charts, uncertainty
from pfedbayes.report.charts import Figure, Series
from pfedbayes.report.page import Table, environment
from pfedbayes.runs.calibration import read_calibration
from pfedbayes.runs.folder import Run
from pfedbayes.trust.answers import Answers, Inputs
from pfedbayes.trust.shifts import NAMES
from pfedbayes.trust.uncertainty import (
    FURTHER,
    TABLES,
    Row,
    cells,
    filled,
    headings,
    strangeness_of,
    table_rows,
    warnings,
)

BINS = 10  # of a histogram of the strangeness
AT_RISK = 5  # clients
MOST_SAID = 3  # labels that a model says most often to inputs of an unseen label
STYLES = {"own": 0, "unseen": 1, "other": 2, "rotated": 3, "noisy": 4}

Assessed = dict[str, dict[str, list[list[Row]]]]
"""What `trust.uncertainty.assess` returns."""


@dataclass(frozen=True)
class Observed:
    """What the page draws of the answers of the first seed."""

    strangeness: dict[Served, dict[str, Tensor]] = field(default_factory=dict)
    """By model and kind of inputs, how many inputs of all clients have a strangeness in each of BINS bins."""
    unseen: dict[Served, Tensor] = field(default_factory=dict)
    """By model, how often (C, C) inputs of an unseen label got each label, and in row C + 1 the sums of confidence."""

    def add(self, which: Served, client: int, answers: dict[str, Answers], inputs: Inputs) -> None:
        """Count the answers of a model to the inputs of a client."""
        of_model = self.strangeness.setdefault(which, {})
        for kind, values in strangeness_of(answers).items():
            place = (values.double() * BINS).long().clamp(0, BINS - 1)
            name = kind.removeprefix("strange ")
            of_model[name] = of_model.get(name, torch.zeros(BINS)) + torch.bincount(place, minlength=BINS)
        if "unseen" in inputs.known:
            log_probs, y = answers["unseen"].log_probs, inputs.known["unseen"][1]
            classes = log_probs.shape[-1]
            sure, said = log_probs.exp().max(-1)
            counts = torch.zeros(classes, classes + 1, dtype=torch.float64)
            counts.index_put_((y, said), torch.ones(len(y), dtype=torch.float64), accumulate=True)
            counts[:, classes].index_add_(0, y, sure.double())
            self.unseen[which] = self.unseen.get(which, torch.zeros_like(counts)) + counts


def page_of(run: Run, assessed: Assessed, observed: Observed) -> str:
    """Return the page as HTML."""
    risk = uncertainty.risk_coverage(run)
    context = {
        "title": f"Uncertainty of {run.info.method.title} ({run.folder.resolve().name})",
        "warnings": warnings(assessed),
        "tables": list(_tables(assessed)),
        "risk_coverage": [risk] if risk else [],
        "histograms": [figure for which in observed.strangeness if (figure := _histogram(which, observed))],
        "unseen": _unseen(run, observed),
        "at_risk": _at_risk(run, assessed),
        "names": [(name, meaning) for name, meaning in NAMES.items() if _has(assessed, f"auroc_{name}")],
    }
    return environment().get_template("assessed.html").render(context)


def _has(assessed: Assessed, column: str) -> bool:
    return any(column in row for ways in assessed.values() for rows in ways.values() for row in rows[0])


def _tables(assessed: Assessed) -> Iterator[Table]:
    for title, columns in (TABLES | FURTHER).items():
        rows = list(table_rows(assessed, columns))
        known = filled([row for _, row in rows], columns)
        if known:
            yield Table(title, headings(known), [("", [(name, cells(row, known)) for name, row in rows])])


def _histogram(which: Served, observed: Observed) -> Figure | None:
    """Draw the share of inputs by their strangeness, for own test data and for inputs of other kinds."""
    kinds = observed.strangeness[which]
    if not kinds:
        return None
    middles = [100 * (k + 0.5) / BINS for k in range(BINS)]
    series = [
        Series(name, middles, (100 * counts / counts.sum()).tolist(), [0.0] * BINS, STYLES.get(name, 5))
        for name, counts in kinds.items()
    ]
    title = f"Strangeness, {which} model"
    top = "; ".join(f"{name}: {line.y[-1]:.0f} % in the last bin" for name, line in zip(kinds, series, strict=True))
    svg = charts.line_chart(
        title, series, x_label="strangeness, % of the own held-out rows", y_label="share of inputs, %", description=top
    )
    return Figure(title, svg, f"In {BINS} bins of equal width. Own test data: about {100 / BINS:.0f} % in each. {top}.")


def _unseen(run: Run, observed: Observed) -> Table | None:
    """Return what the models say to inputs of labels that a client has no rows of, by true label."""
    if not observed.unseen:
        return None
    names = [which for which in ("personal", "gated", "shared") if which in observed.unseen]
    classes = len(next(iter(observed.unseen.values())))
    labels = [str(label) for label in _labels(run, classes)]
    rows = []
    for k in range(classes):
        texts = []
        for which in names:
            counts = observed.unseen[which][k]
            total = float(counts[:classes].sum())
            if not total:
                continue
            most = counts[:classes].argsort(descending=True, stable=True)[:MOST_SAID].tolist()
            shares = [f"{labels[j]} {counts[j] / total:.0%}" for j in most if counts[j]]
            texts.append(f"{', '.join(shares)}; {counts[classes] / total:.0%} sure")
        if texts:
            rows.append((f"true label {labels[k]}", texts))
    return Table("", [f"the {which} model says" for which in names], [("", rows)])


def _labels(run: Run, classes: int) -> list[str]:
    names = read_calibration(run.folder).preprocessing.target.classes or ()
    return [str(name) for name in names] if len(names) == classes else [str(k) for k in range(classes)]


def _at_risk(run: Run, assessed: Assessed) -> Table | None:
    """Return the clients whose predictions have the highest loss, with possible reasons."""
    which = next((name for name in ("gated", "personal", "shared") if name in assessed), None)
    tested = [i for i, size in enumerate(run.info.test_sizes) if size]
    if which is None or len(assessed[which]["as it is"][0]) != len(tested):
        return None
    found = dict(zip(tested, assessed[which]["as it is"][0], strict=True))
    worst = sorted(found, key=lambda i: -found[i]["nll"] if math.isfinite(found[i]["nll"]) else -math.inf)[:AT_RISK]
    rows = []
    for i in worst:
        row, reasons = found[i], uncertainty.reasons(run, i)
        if row.get("false_alarms", 0) > 0.1:
            reasons.append(f"{row['false_alarms']:.0%} of its test rows look strange beside its held-out rows")
        if row.get("ece", 0) > 0.1:
            reasons.append("its confidence does not match its accuracy")
        error = f"{100 - row['accuracy']:.1f} %" if "accuracy" in row else f"{row['rmse']:.3g}"
        why = "; ".join(reasons) or "the run records no reason"
        rows.append((run.info.clients[i], [f"{row['size']:.0f}", error, f"{row['nll']:.3f}", why]))
    error = "errors" if "accuracy" in found[worst[0]] else "RMSE"
    return Table(f"By the NLL of the {which} model", ["test rows", error, "NLL", "possible reasons"], [("", rows)])
