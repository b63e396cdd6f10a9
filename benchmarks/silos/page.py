"""The page on real tables, made from the results only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.silos.cells import difference_cells, mean_and_deviation, number, row, signed
from benchmarks.silos.flamby import HEART
from benchmarks.silos.ours import DEFAULT, METHODS
from benchmarks.silos.page_of_methods import methods_section
from benchmarks.silos.page_of_newcomers import activity_section, newcomers_section
from benchmarks.silos.rivals import BOOSTING, FREQUENCIES, LOCAL, POOLED
from benchmarks.silos.statistics import MARGIN, Comparison, compare, mean_of, ranks, verdict
from benchmarks.silos.survival import OURS, PUBLISHED
from benchmarks.silos.tables import TABLES, Task, read_tables
from pfedbayes.methods import METHODS as OUR_METHODS

Results = Mapping[str, Any]
Values = Sequence[float | None]
ALL_SPLITS = 10
TASKS: dict[Task, str] = {"classification": "Classification", "regression": "Regression"}
MORE: dict[Task, dict[str, tuple[str, str]]] = {
    "classification": {
        "accuracy": ("Accuracy, %", ".1f"),
        "balanced_accuracy": ("Balanced accuracy, %", ".1f"),
        "auroc": ("AUROC (two classes)", ".3f"),
        "ece": ("Expected calibration error, ten bins", ".3f"),
    },
    "regression": {
        "rmse": ("RMSE", ".3f"),
        "crps": ("CRPS", ".3f"),
        "coverage": ("Coverage of 90 % intervals, %", ".1f"),
    },
}
INTRODUCTION = """Each table has real clients: hospitals, schools, regions, people. The question is whether a client's
model from the federation is better than a model of its own rows, and how near it comes to a model of all rows in one
place.
"""
HOW = """## How it is measured

- **Splits**: {splits} per table, random and the same for all methods. Within each client, 64 % of the rows are training
  rows, 16 % validation rows and 20 % test rows, stratified by class for clients of at least ten rows.
- **Methods of this package** run as `pfedbayes run --data` runs them: the default one with its defaults, the others
  with the budget and the learning rates above. Those that keep the best round use the validation rows for it; the
  default one trains on them too. Scores are those of personal models, or of the shared model where a method has no
  other, with 100 weight draws.
- **Rivals** are fitted to training and validation rows. Logistic regression and ridge choose their penalty by
  cross-validation. Regressions of scikit-learn predict Gaussians with the cross-validated mean squared error as
  variance. Pooled models see the rows of all clients, with the client as a column.
- **Mixed models** are the mixed-effects models of statsmodels, with random intercepts, or random intercepts and slopes,
  per client. A rival has at most 300 seconds.
- **Scores** are over all test rows of all clients, in the units of the target. Probabilities are at least 10⁻⁶. CRPS
  and coverage are those of the Gaussian with the predicted mean and deviation.
- **Intervals** are corrected resampled t intervals (Nadeau and Bengio 2003), 95 %. Splits share rows, so the variance
  of the mean difference over J splits is (1/J + n_test/n_train) s². “Indistinguishable”: the interval holds 0.
- **Ranks** order the methods of a table by mean NLL, rounded to three decimals; equal ones share the mean rank.
- **Seconds** are wall-clock times of one process with one thread{workers}.

Measured on {machines}, with pfedbayes {code}, {dates}.

Written by `python -m benchmarks.silos` from silos.json beside it; do not edit.
"""


def render(results: Results, reasons: Mapping[str, str]) -> str:
    """Return the page. reasons: per table, why the default method misses a goal."""
    tables = results.get("tables", {})
    comparisons = [found for name, table in tables.items() if (found := comparison(name, table)) is not None]
    parts = ["# Real tables\n"]
    if comparisons:
        parts += [*verdict_lines(comparisons, tables), INTRODUCTION, *main_table(comparisons, tables)]
        parts += reason_lines(comparisons, reasons)
    else:
        parts += ["The default method is not measured yet.\n", INTRODUCTION]
    parts += methods_section(tables)
    for task, title in TASKS.items():
        chosen = {name: table for name, table in tables.items() if table["task"] == task}
        if chosen:
            parts += task_section(task, title, chosen)
    parts += failures(tables)
    sections: dict[str, Callable[[Results], list[str]]] = {
        "newcomers": newcomers_section,
        "heart": heart_section,
        "survival": survival_section,
        "activity": activity_section,
    }
    for protocol, section in sections.items():
        if protocol in results:
            parts += section(results[protocol])
    parts.append(how(results))
    return "\n".join(parts)


def comparison(name: str, table: Results) -> Comparison | None:
    """Compare the default method with the rivals on one table."""
    nll = {method: scores["nll"] for method, scores in table["methods"].items() if "nll" in scores}
    train, validation, test = table["rows"]
    return compare(name, nll, DEFAULT, list(LOCAL[task_of(table)]), BOOSTING, test / (train + validation))


def task_of(table: Results) -> Task:
    return "classification" if table["task"] == "classification" else "regression"


def verdict_lines(comparisons: Sequence[Comparison], tables: Results) -> list[str]:
    """Return the sentences with which the page opens."""
    found = verdict(comparisons)
    all_tables = read_tables(TABLES)
    lines = [
        f"With defaults, the personal models' mean NLL is at most {MARGIN} nats above that of the best local rival on "
        f"**{found.close} of {found.tables}** tables. On **{found.below}** the 95 % interval of the difference is "
        f"below 0. On **{found.boosting}** the mean NLL is at or below that of gradient boosting on pooled rows.\n"
    ]
    missing = [name for name in all_tables if name not in {one.table for one in comparisons}]
    fewest = min(one.to_rival.splits for one in comparisons)
    if missing or fewest < ALL_SPLITS:
        lines.append(
            f"This is a partial result: {len(all_tables) - len(missing)} of {len(all_tables)} tables are measured, "
            f"some with {fewest} of {ALL_SPLITS} splits.\n"
        )
    return lines


def main_table(comparisons: Sequence[Comparison], tables: Results) -> list[str]:
    """Return the comparison of the default method with its rivals."""
    lines = [
        "| table | clients | rows | default | best local rival | difference | | pooled boosting | difference | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in comparisons:
        table = tables[one.table]
        boosting = (
            ["–", "–", ""] if one.to_boosting is None else [number(one.boosting), *difference_cells(one.to_boosting)]
        )
        cells = [
            one.table, str(table["clients"]), f"{sum(table['rows']):,}", number(one.ours),
            f"{one.theirs:.3f} ({one.rival.removeprefix('local ')})", *difference_cells(one.to_rival), *boosting,
        ]  # fmt: skip
        lines.append(row(cells))
    resolved = sorted(
        {name for table in tables.values() for name in table["methods"].get(DEFAULT, {}).get("resolved", ())}
    )
    return [
        *lines,
        "",
        f"Mean NLL in nats, {_splits(tables.values())}, test rows of all clients. The default method is "
        f"{', '.join(map(_title, resolved))}. Differences are default minus rival, with 95 % intervals; the word says "
        "what the interval shows.\n",
    ]  # fmt: skip


def reason_lines(comparisons: Sequence[Comparison], reasons: Mapping[str, str]) -> list[str]:
    """Return a line for each table that misses a goal."""
    lines = []
    for one in comparisons:
        if one.misses:
            against = [] if one.close else [f"the best local rival ({signed(one.to_rival.mean)})"]
            if not one.reaches_boosting and one.to_boosting is not None:
                against.append(f"pooled boosting ({signed(one.to_boosting.mean)})")
            if against:
                lines.append(
                    f"- {one.table}, behind {' and '.join(against)}: {reasons.get(one.table, 'no reason found yet')}"
                )
    return ["Where the default method is behind, and why:\n", *lines, ""] if lines else []


def task_section(task: Task, title: str, tables: Results) -> list[str]:
    """Return the tables of all methods and all scores for one task."""
    methods = ordered(task, {name for table in tables.values() for name in table["methods"]})
    nll = {name: {m: table["methods"].get(m, {}).get("nll", []) for m in methods} for name, table in tables.items()}
    means = {name: {m: mean_of(values) for m, values in own.items()} for name, own in nll.items()}
    ranked = {name: ranks({m: v for m, v in own.items() if v is not None}) for name, own in means.items()}
    lines = [f"## {title}\n", f"| NLL | {' | '.join(tables)} | mean rank |", "|---" * (len(tables) + 2) + "|"]
    for method in methods:
        own_ranks = [ranked[name][method] for name in tables if method in ranked[name]]
        cells = [_cell(means[name], method) for name in tables]
        lines.append(row([label(method, tables), *cells, f"{np.mean(own_ranks):.1f}" if own_ranks else ""]))
    lines += [
        "",
        f"Mean NLL in nats, {_splits(tables.values())}, test rows of all clients; the lowest of a table is bold. "
        "Rank 1 is the lowest; the mean is over the tables that a method has.\n",
    ]
    lines += score_table(methods, tables, "nll", "NLL, mean over clients", ".3f", by_client=True)
    for score, (heading, digits) in MORE[task].items():
        lines += score_table(methods, tables, score, heading, digits)
    return [*lines, *score_table(methods, tables, "seconds", "Seconds", ".1f")]


def score_table(
    methods: Sequence[str], tables: Results, score: str, heading: str, digits: str, by_client: bool = False
) -> list[str]:
    """Return the table of one score; nothing if no method has it."""
    rows = []
    for method in methods:
        cells = []
        for table in tables.values():
            scores = table["methods"].get(method, {})
            value = mean_of((scores.get("by_client", {}) if by_client else scores).get(score, ()))
            cells.append("" if value is None else format(value, digits))
        if any(cells):
            rows.append(row([label(method, tables), *cells]))
    if not rows:
        return []
    return [f"| {heading} | {' | '.join(tables)} |", "|---" * (len(tables) + 1) + "|", *rows, ""]


def ordered(task: Task, present: set[str]) -> list[str]:
    """Return the methods in the order of the page: ours, local rivals, pooled rivals."""
    known = [*METHODS, *LOCAL[task], *POOLED[task], FREQUENCIES]
    return [name for name in known if name in present]


def label(method: str, tables: Results) -> str:
    """Return the title of a method; that of the default one says which it is."""
    if method == DEFAULT:
        names = sorted(
            {name for table in tables.values() for name in table["methods"].get(DEFAULT, {}).get("resolved", ())}
        )
        return f"**default: {', '.join(map(_title, names))}**" if names else "**default**"
    return _title(method)


def _title(method: str) -> str:
    return OUR_METHODS[method].about.title if method in OUR_METHODS else method


def _cell(means: Mapping[str, float | None], method: str) -> str:
    value = means[method]
    if value is None:
        return ""
    lowest = min(mean for mean in means.values() if mean is not None)
    return f"**{value:.3f}**" if round(value, 3) == round(lowest, 3) else f"{value:.3f}"


def failures(tables: Results) -> list[str]:
    """Return a line for each method that failed on a table."""
    lines = []
    for name, table in tables.items():
        for method, scores in table["methods"].items():
            if "failed" in scores:
                failed = len(table["splits"]) - sum(value is not None for value in scores["seconds"])
                reason = "; ".join(scores["failed"])
                lines.append(f"- {name}, {_title(method)}, {failed} of {len(table['splits'])} splits: {reason}")
    return ["## Methods that failed\n", "Their means are over the other splits.\n", *lines, ""] if lines else []


def heart_section(tables: Results) -> list[str]:
    """Return the section on FLamby's protocol for heart disease."""
    (table,) = tables.values()
    lines = [
        "## Heart disease by FLamby's protocol\n",
        "| method | accuracy, mean over hospitals, % | accuracy, all test rows, % |",
        "|---|---|---|",
    ]
    methods = table["methods"]
    for method in [name for name in ordered("classification", set(methods)) if "accuracy" in methods[name]]:
        scores = methods[method]
        cells = [mean_and_deviation(scores["by_client"]["accuracy"]), mean_and_deviation(scores["accuracy"])]
        lines.append(row([label(method, tables), *cells]))
    for method, (by_client, pooled) in HEART.items():
        lines.append(row([f"FLamby: {method}", f"{by_client:.1f}", "–" if pooled is None else f"{pooled:.1f}"]))
    train, validation, test = table["rows"]
    return [
        *lines,
        "",
        f"{train + validation} training and {test} test rows in {table['clients']} hospitals, mean ± standard "
        f"deviation over {len(table['splits'])} split(s). As FLamby does, we drop slope, ca and thal and then "
        "incomplete rows, train on 66 % of each hospital's rows, and standardise per hospital. What differs: FLamby "
        "repeats the training on one split, we repeat the split, and methods that stop early hold out a fifth of the "
        "training rows.\n",
        "Compare with the rows of scikit-learn first: the published figures are a low bar. In Switzerland nearly all "
        "rows are positive, so predicting the most frequent class of each hospital, without any input, already does "
        "well in the mean over hospitals.\n",
    ]


def survival_section(tables: Results) -> list[str]:
    """Return the section on TCGA-BRCA."""
    (table,) = tables.values()
    lines = [
        "## Survival after breast cancer (TCGA-BRCA)\n",
        "| model | C-index, all pairs, % | 95 % interval | C-index, pairs of one region, % | 95 % interval |",
        "|---|---|---|---|---|",
    ]
    absent = []
    names = [OURS, *sorted(name for name in table["methods"] if name != OURS)]
    for method in [name for name in names if name in table["methods"]]:
        scores = table["methods"][method]
        if "c_index" not in scores:
            absent.append(
                f"{'Our method' if method == OURS else method} is not measured: {'; '.join(scores['failed'])}.\n"
            )
            continue
        cells = [cell for own in (scores, scores["by_client"]) for cell in _c_index(own)]
        lines.append(row([label(method, tables), *cells]))
    lines += [row([f"FLamby: {name}", f"{value:.1f}", "", "", ""]) for name, value in PUBLISHED.items()]
    train, _, test = table["rows"]
    events = [value for scores in table["methods"].values() for value in scores.get("events", ()) if value is not None]
    return [
        *lines,
        "",
        f"FLamby's {train} training and {test} test patients in {table['clients']} regions. The test patients have "
        f"only {max(events, default=0):.0f} events, so the bootstrap intervals over patients (2,000 draws) are wide. "
        "Cox models are those of lifelines with a penalty of 0.1. “Cox per region” scores each patient with the model "
        "of the own region; “alone” scores all patients with the model of one region.\n",
        *absent,
    ]


def _c_index(scores: Results) -> list[str]:
    (value,), (low,), (high,) = (scores[name] for name in ("c_index", "low", "high"))
    return [f"{value:.1f}", f"{low:.1f}–{high:.1f}"]


def how(results: Results) -> str:
    """Return the section on the measurement."""
    tables = [table for protocol in results.values() for table in protocol.values()]
    dates = [date[:10] for table in tables for date in table["dates"]]
    workers = sorted({number for table in tables for number in table["workers"]})
    together = f", up to {workers[-1]} at the same time" if workers and workers[-1] > 1 else ""
    return HOW.format(
        splits=_splits(results.get("tables", {}).values()),
        workers=together,
        machines=", ".join(sorted({name for table in tables for name in table["machines"]})),
        code=", ".join(sorted({name for table in tables for name in table["code"]})),
        dates=min(dates, default="") if len(set(dates)) < 2 else f"{min(dates)} to {max(dates)}",
    )


def _splits(tables: Any) -> str:
    counts = sorted({len(table["splits"]) for table in tables})
    if not counts:
        return "no splits"
    if len(counts) > 1:
        return f"{counts[0]} to {counts[-1]} splits"
    return f"{counts[0]} split{'s' * (counts[0] > 1)}"
