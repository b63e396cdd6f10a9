"""Tables 2 and 3: methods on medium MNIST with other settings, the paper's results beside ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pfedbayes.evaluation.estimators import MODELS
from pfedbayes.methods import METHODS
from pfedbayes.paper.source import (
    BEST,
    MEAN,
    NOTHING,
    PUBLIC,
    PUBLIC_NOISE,
    Source,
    difference_text,
    over_seeds,
    score_text,
    seeds_text,
    setting_text,
)
from pfedbayes.paper.table1 import is_of_variant
from pfedbayes.report.page import Table
from pfedbayes.report.tables import Estimate
from pfedbayes.sweep.scores import DEFAULT, Record

NEAR = 1.5  # points from the paper
CAPTIONS = {
    "table2": "pFedBayes on medium MNIST; as the paper: best of rounds 700 to 800 by one sample; mean: ten samples",
    "table3": "Other methods on medium MNIST; as the paper: best of rounds 700 to 800, personal models as the public "
    "code scores them (Per-FedAvg adapted on test data, pFedMe's w, HeurFedAMP's cloud model)",
}


def settings_table(source: Source, table: str) -> Table:
    """Table 2 or Table 3: the paper's scores, ours scored as in the paper, and ours without a picked round.

    Table 2 has one more column: our score with the weight noise of the public code.
    """
    more = ("noise 0.001, as the paper",) if table == "table2" else ()
    rows = []
    for row in source.paper[table]:
        method = METHODS[row["method"]]
        cells = []
        unpicked = _records(source, table, row, DEFAULT)
        quiet = _records(source, table, row, PUBLIC_NOISE)
        for model in MODELS:
            if row[model] is None:
                cells += [NOTHING] * (4 + len(more))
                continue
            records, ours = _scored_as_paper(source, table, row, model)
            cells += [
                f"{row[model]:.2f}",
                score_text(records, ours),
                difference_text(ours, row[model]),
                score_text(unpicked, over_seeds(unpicked, model, None, MEAN)),
                *(score_text(quiet, over_seeds(quiet, model, "one", BEST)) for _ in more),
            ]
        rows.append((f"{method.about.title}: {setting_text(row['varied'])}", [*cells, seeds_text([unpicked])]))
    heads = [
        f"{model}: {what}"
        for model in MODELS
        for what in ("paper", "ours, as the paper", "difference", "ours, mean of 700–800", *more)
    ]
    return Table(CAPTIONS[table], [*heads, "seeds"], [("", rows)])


def _records(source: Source, table: str, row: dict[str, Any], variant: str) -> list[Record]:
    """Return our records of a row of the paper."""
    found = source.find(table, method=row["method"], varied=row["varied"])
    return [record for record in found if is_of_variant(record, variant)]


def _scored_as_paper(
    source: Source, table: str, row: dict[str, Any], model: str
) -> tuple[list[Record], Estimate | None]:
    """Return our records of a row and their score: best round, one sample, the model that the public code scores."""
    variant = PUBLIC.get(row["method"], DEFAULT) if model == "personal" else DEFAULT
    records = _records(source, table, row, variant)
    estimator = "one" if METHODS[row["method"]].about.stochastic else "mean"
    return records, over_seeds(records, model, estimator, BEST)


def weight_noise_statement(source: Source) -> Iterator[str]:
    """Say which weight noise is closer to the paper's Table 2: the paper's own or that of the public code."""
    gaps: dict[str, list[float]] = {DEFAULT: [], PUBLIC_NOISE: []}
    rows = {setting_text(row["varied"]): row for row in source.paper["table2"]}  # two of them stand there twice
    for row in rows.values():
        records = [_records(source, "table2", row, variant) for variant in gaps]
        for model in MODELS:
            literal, public = (over_seeds(each, model, "one", BEST) for each in records)
            if literal and public:
                gaps[DEFAULT].append(abs(literal.value - row[model]))
                gaps[PUBLIC_NOISE].append(abs(public.value - row[model]))
    if count := len(gaps[DEFAULT]):
        of_paper, of_code = (sum(each) / count for each in gaps.values())
        yield (
            f"Our mean distance from the paper is {of_paper:.2f} points with weight noise of standard deviation 1, as "
            f"the paper writes it, and {of_code:.2f} points with 0.001, as its public code draws it ({count} scores "
            "that were measured both ways)."
        )


def closeness_statement(source: Source, table: str) -> Iterator[str]:
    """Say how many scores are close to the paper's."""
    scored = [
        (row[model], _scored_as_paper(source, table, row, model)[1])
        for row in source.paper[table]
        for model in MODELS
        if row[model] is not None
    ]
    gaps = [abs(ours.value - paper) for paper, ours in scored if ours]
    if gaps:
        near = sum(gap <= NEAR for gap in gaps)
        yield f"Of {len(gaps)} scores {near} are within {NEAR:g} points of the paper."
