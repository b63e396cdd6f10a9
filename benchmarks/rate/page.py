"""The chart and the page, made from the records and from nothing else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.rate.measure import CLIENTS, DIFFERENCE, DRAWS, SIGMA_EPS
from benchmarks.rate.slopes import Slope, errors_of, fit, slope
from benchmarks.rate.units import CHANGES, unit_of
from pfedbayes import theory
from pfedbayes.report.charts import Series, log_chart, standalone

Records = list[dict[str, Any]]

ERRORS = {
    "hellinger": "squared Hellinger distance",
    "l2": "L2 error, averaged over the posterior",
    "l2_of_mean": "L2 error of the mean prediction",
}
HEADER = """# Theory, measured

Written by `python -m benchmarks.rate` from the measurements beside it; do not edit. The last of them were made on
{date} ({on}, commit {commit}), earlier ones may be of earlier commits.
What it means is in [../theory.md](../theory.md).

## The bound at the paper's sizes

Theorem 1 for the paper's DNN on MNIST with β = 1, ζ = 10, B = 2 and all unknown constants 1, as `pfedbayes bound`
prints it. A squared Hellinger distance is never more than 1.

"""
RATE = """
## The rate

pFedBayes with ζ = 1 on {clients} clients whose functions on [-1, 1] have smoothness β: y = f^i(x) + ε with ε of
standard deviation {noise:g}, as large as the functions themselves; f^i is a common function plus {difference:g}
times one of the client's own. One hidden layer of ReLUs with T = {budget:g} n^(1/(2β+1)) parameters as the
corollary wants it, {rounds} rounds of 20 steps, both rates {eta:g}, everything else as in the paper. Each replicate
has functions and data of its own.

Errors are those of the personal posteriors after the last round against the true functions, by {draws} draws.
Slopes are fitted by least squares in logarithms, with 95 % intervals by bootstrap over replicates and the clients
in them. Beside them stand the minimax exponent -2β/(2β+1) and the slopes of the paper's r_n and ε_n² over the same
n and T, which their logarithms make flatter.

![error against n](theory.svg)

"""
BENT = """
## What bends the curve

The curve for β = 1 once more at fewer n, each time with one thing changed: L2 error of the mean prediction, and what it
was for the same functions and data without the change.

"""
LEMMAS = """
## The lemmas with measured objectives

With the true functions known, both sides of the lemmas can be computed, but for the constants. The last two columns are
the smallest C and C' with which they hold at that n (ξ_n left out, C = 0 where the objective alone is enough).

"""


def curves(records: Records) -> dict[str, Records]:
    """The records by curve."""
    found: dict[str, Records] = {}
    for record in records:
        found.setdefault(record["series"], []).append(record)
    return found


def chart(records: Records) -> str:
    """The error of the mean prediction and the posterior's against n, with the theoretical slope beside them."""
    series = []
    main = [(label, own) for label, own in curves(records).items() if label not in CHANGES]
    for k, (label, own) in enumerate(sorted(main)):
        for name, dash in (("l2", ""), ("l2_of_mean", "5 3")):
            sizes, errors = errors_of(own, name)
            per_replicate = errors.mean(1)
            spread = per_replicate.std(0, ddof=1) / math.sqrt(len(errors)) if len(errors) > 1 else 0 * errors[0, 0]
            words = "posterior" if name == "l2" else "mean prediction"
            series.append(Series(f"{label}, {words}", sizes, per_replicate.mean(0).tolist(), spread.tolist(), k, dash))
        exponent = theory.rate_exponent(own[0]["smoothness"], own[0]["dimension"])
        middle = np.exp(np.log(per_replicate.mean(0)).mean())
        centre = math.exp(np.log(sizes).mean())
        line = [float(middle * (size / centre) ** exponent) for size in sizes]
        series.append(Series(f"n^{exponent:.2f}", sizes, line, [0.0] * len(sizes), k, "2 3", thin=True))
    description = (
        "Squared L2 error against the number of examples of a client, on logarithmic axes, with standard errors."
    )
    return standalone(
        log_chart(
            "Error against n", series, x_label="examples of a client, n", y_label="L2 error", description=description
        )
    )


def render(kept: dict[str, Any]) -> str:
    """The page."""
    records: Records = kept["records"]
    about = kept["about"]
    main = {label: own for label, own in sorted(curves(records).items()) if label not in CHANGES}
    found = curves(records)
    changed = {label: found[label] for label in CHANGES if label in found}
    first = records[0]
    parts = [
        HEADER.format(on=about["machine"]["gpu"] or about["machine"]["cpu"], **about),
        table(["n", "T", "σ_n", "r_n", "ε_n²", "ξ_n", "Theorem 1", "below 1 from n ="], bound_rows()),
        RATE.format(
            clients=CLIENTS, noise=SIGMA_EPS, difference=DIFFERENCE, draws=DRAWS,
            budget=first["budget"], rounds=first["rounds"], eta=first["eta"],
        ),
        table(["curve", "error", "slope", "minimax", "r_n", "ε_n²", "replicates"], slope_rows(main)),
        "\n",
        table(["curve", "n", "M", "T", *ERRORS.values()], error_rows(main)),
        LEMMAS,
        table(["curve", "n", "l_n / n", "KL / n", "r_n", "ε_n²", "d²", "C", "C'"], lemma_rows(main)),
    ]  # fmt: skip
    if changed:
        parts += [BENT, bent_table(main, changed)]
    return "".join(parts)


def bound_rows() -> Iterator[list[str]]:
    for size in (250, 1000, 4500):
        s = theory.Setting(size=size)
        figures = (
            math.sqrt(theory.sigma_n_squared(s)), theory.r_n(s), theory.epsilon_n(s) ** 2, theory.xi_n(s),
            theory.theorem1(s), theory.useful_size(s) or math.inf,
        )  # fmt: skip
        yield [f"{size:,}", f"{s.num_params:,}", *(f"{figure:.3g}" for figure in figures)]


def setting_of(record: dict[str, Any]) -> theory.Setting:
    """The setting of a record, with the constants at 1."""
    return dataclasses.replace(unit_of(record).setting, constants=theory.Constants())


def slope_rows(main: dict[str, Records]) -> Iterator[list[str]]:
    for label, own in main.items():
        for name, words in ERRORS.items():
            sizes, errors = errors_of(own, name)
            by_size = {record["size"]: setting_of(record) for record in own}
            r_n = np.array([theory.r_n(by_size[size]) for size in sizes])
            epsilon = np.array([theory.epsilon_n(by_size[size]) ** 2 for size in sizes])
            exponent = theory.rate_exponent(own[0]["smoothness"], own[0]["dimension"])
            predicted = [f"{value:.2f}" for value in (exponent, fit(sizes, r_n), fit(sizes, epsilon))]
            yield [label, words, interval(slope(sizes, errors)), *predicted, str(len(errors))]


def error_rows(main: dict[str, Records]) -> Iterator[list[str]]:
    for label, own in main.items():
        for size in sorted({record["size"] for record in own}):
            here = [record for record in own if record["size"] == size]
            s = setting_of(here[0])
            cells = []
            for name in ERRORS:
                values = [mean(record, name) for record in here]
                error = f" ± {np.std(values, ddof=1) / math.sqrt(len(values)):.1g}" if len(values) > 1 else ""
                cells.append(f"{np.mean(values):.3g}{error}")
            yield [label, f"{size:,}", str(s.width), str(s.num_params), *cells]


def lemma_rows(main: dict[str, Records]) -> Iterator[list[str]]:
    for label, own in main.items():
        for size in sorted({record["size"] for record in own}):
            here = [record for record in own if record["size"] == size]
            s = setting_of(here[0])
            ratio, kl, distance = (np.mean([mean(r, name) for r in here]) for name in ("log_ratio", "kl", "hellinger"))
            epsilon, r_n = theory.epsilon_n(s) ** 2, theory.r_n(s)
            c = max(0.0, (distance - (ratio / s.zeta + kl) / size) / epsilon)
            c_prime = (ratio + s.zeta * kl) / (size * s.zeta * r_n)
            figures = (ratio / size, kl / size, r_n, epsilon, distance, c, c_prime)
            yield [label, f"{size:,}", *(f"{figure:.3g}" for figure in figures)]


def bent_table(main: dict[str, Records], changed: dict[str, Records]) -> str:
    """The error of the mean prediction by change, each time beside the unchanged one of the same functions."""
    sizes = sorted({record["size"] for own in changed.values() for record in own})
    rows = []
    for label, own in changed.items():
        (plain,) = (other for other in main.values() if other[0]["smoothness"] == own[0]["smoothness"])
        cells, replicates = [], set()
        for size in sizes:
            found = {record["replicate"]: mean(record, "l2_of_mean") for record in own if record["size"] == size}
            was = {record["replicate"]: mean(record, "l2_of_mean") for record in plain if record["size"] == size}
            both = sorted(found.keys() & was.keys())
            pair = (np.mean([values[r] for r in both]) for values in (found, was))
            cells.append("{:.3g} (was {:.3g})".format(*pair) if both else "–")
            replicates |= {len(both)} - {0}
        rows.append([label, *cells, " or ".join(map(str, sorted(replicates)))])
    return table(["change", *(f"n = {size:,}" for size in sizes), "replicates"], rows)


def mean(record: dict[str, Any], name: str) -> float:
    """The mean over the clients of a record."""
    return float(np.mean([client[name] for client in record["clients"]]))


def interval(found: Slope) -> str:
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def table(heads: Sequence[str], rows: Iterable[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
