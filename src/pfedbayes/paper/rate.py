"""The page on the theory: the bound at the paper's sizes and the rate that `python -m benchmarks.rate` measures."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pfedbayes.errors import UserError
from pfedbayes.files.reading import NUMBER, Kinds, read_json, require_keys
from pfedbayes.paper import theory
from pfedbayes.paper.log_log_slope import Slope, errors_of, fit, slope, whole_replicates
from pfedbayes.paper.pages import Page
from pfedbayes.report.charts import Figure, Series, log_chart
from pfedbayes.report.page import Table

Records = list[dict[str, Any]]
Curves = dict[str, Records]  # by name

# Settings of the experiment that its page states.
DIFFERENCE = 0.5  # of the clients' functions, see `benchmarks.rate.functions.draw_functions`
SIGMA_EPS = 1.0  # as large as the functions, so that estimation and not the optimiser limits the error
DRAWS = 50
# Ablations: a few points of the curve with one change each.
CHANGES: dict[str, dict[str, Any]] = {
    "no noise in the targets": {"exact": True},
    "nor in the weights, and no prior": {"exact": True, "zeta": 0.0, "weight_noise": 0.0},
    "three times the rounds": {"rounds": 1200},
    "a third of the parameters": {"budget": 5.0},
    "three times the parameters": {"budget": 45.0},
    "ζ = 10": {"zeta": 10.0},
}

TITLE = "Theory: the bound and the measured rate"
SIZES_OF_THE_PAPER = (250, 1000, 4500)
ERRORS = {
    "hellinger": "squared Hellinger distance",
    "l2": "L2 error, averaged over the posterior",
    "l2_of_mean": "L2 error of the mean prediction",
}
ABOUT = (
    "The last measurements are from {date} ({on}, commit {commit}); earlier ones may be from earlier commits.",
    "docs/theory.md explains the results.",
)
ABOUT_THE_BOUND = (
    "Theorem 1 for the paper's MLP on MNIST with β = 1, ζ = 10, B = 2 and all unknown constants 1, as “pfedbayes paper "
    "bound” prints it. A squared Hellinger distance is at most 1, so a bound above 1 is vacuous."
)
ABOUT_THE_RATE = (
    "Slopes are least-squares fits in logarithms, with 95 % intervals by bootstrap over replicates and their clients. "
    "The minimax exponent is -2β/(2β+1). The slopes of the paper's r_n and ε_n² over the same n and T are flatter "
    "because of their logarithms."
)
SETTING_OF_THE_RATE = (
    "The rate: pFedBayes with ζ = 1 on {clients} clients. Client i observes y = f^i(x) + ε on [-1, 1] with noise of "
    "standard deviation {noise:g}, as large as the functions; f^i has smoothness β and is a common function plus "
    "{difference:g} times the client's own function.",
    "The network has one hidden ReLU layer and T = {budget:g} n^(1/(2β+1)) parameters, as in the corollary. Training "
    "takes {rounds} rounds of 20 steps at learning rates {eta:g}; all other settings are the paper's. Each replicate "
    "draws new functions and data.",
    "Errors compare the personal posteriors after the last round with the true functions, by {draws} draws.",
)
ABOUT_THE_LEMMAS = (
    "The true functions are known, so both sides of the lemmas can be computed up to the constants. C and C' are the "
    "smallest constants for which the lemmas hold at that n, without ξ_n; C = 0 where the objective alone is enough."
)
ABOUT_THE_CHANGES = (
    "The curve for β = 1 at fewer n, with one change each: L2 error of the mean prediction and, in parentheses, the "
    "error without the change for the same functions and data."
)
RECORD: Kinds = {
    "series": str, "smoothness": NUMBER, "dimension": int, "size": int, "zeta": NUMBER, "budget": NUMBER,
    "rounds": int, "eta": NUMBER, "width": int, "replicate": int, "clients": list,
}  # fmt: skip


def read_records(path: Path) -> dict[str, Any]:
    """Read the measurements of the experiment."""
    remedy = "measure it with python -m benchmarks.rate, or remove it"
    kept: dict[str, Any] = read_json(path, "measurements of the rate", _check, remedy)
    return kept


def _check(content: Any) -> None:
    require_keys(content, {"about": dict, "records": list}, "it")
    require_keys(content["about"], {"date": str, "commit": str | None, "machine": dict}, "'about'")
    require_keys(content["about"]["machine"], {"gpu": str | None, "cpu": str}, "'machine'")
    for number, record in enumerate(content["records"], 1):
        require_keys(record, RECORD, f"record {number}")
        for client in record["clients"]:
            require_keys(client, dict.fromkeys((*ERRORS, "log_ratio", "kl"), NUMBER), f"a client of record {number}")


def page(kept: dict[str, Any]) -> Page:
    """Return the page, made from the measurements only."""
    curves: Curves = {}
    for record in kept["records"]:
        curves.setdefault(record["series"], []).append(record)
    main = {label: own for label, own in sorted(curves.items()) if label not in CHANGES and _has_a_slope(own)}
    if not main:
        raise UserError("no curve of the rate has been measured at two n yet: continue with python -m benchmarks.rate")
    known = {own[0]["smoothness"] for own in main.values()}
    changed = {name: curves[name] for name in CHANGES if name in curves and curves[name][0]["smoothness"] in known}
    about = kept["about"]
    on = about["machine"]["gpu"] or about["machine"]["cpu"]
    notes = [*_setting_notes(main), *(text.format(on=on, **about) for text in ABOUT)]
    tables = [_slope_table(main), _bound_table(), _error_table(main), _lemma_table(main)]
    return Page(TITLE, _lead(main), [*tables, _change_table(main, changed)] if changed else tables, notes)


def _lead(main: Curves) -> list[str]:
    """Return three sentences: the bound, the measured slopes, and their relation to the minimax rate."""
    bounds = [theory.theorem1(theory.Setting(size=size)) for size in SIZES_OF_THE_PAPER]
    vacuous = sum(bound >= theory.LARGEST_DISTANCE for bound in bounds)
    slopes = {label: slope(*errors_of(own, "hellinger")) for label, own in main.items()}
    excluded = sum(not found.low <= _exponent(main[label]) <= found.high for label, found in slopes.items())
    measured = "; ".join(
        f"{label}: {_interval(found)}, minimax {_exponent(main[label]):.2f}" for label, found in slopes.items()
    )
    return [
        f"Theorem 1 is vacuous at {vacuous} of the paper's {len(bounds)} training-set sizes.",
        f"The measured error falls as a power of n ({measured}).",
        f"The 95 % interval excludes the minimax exponent for {excluded} of {len(slopes)} smoothness values β.",
    ]


def _setting_notes(main: Curves) -> list[str]:
    first = next(iter(main.values()))[0]
    facts = {"clients": len(first["clients"]), **{name: first[name] for name in ("budget", "rounds", "eta")}}
    facts |= {"noise": SIGMA_EPS, "difference": DIFFERENCE, "draws": DRAWS}
    return [text.format(**facts) for text in SETTING_OF_THE_RATE]


def _has_a_slope(own: Records) -> bool:
    return len({record["size"] for record in own}) > 1 and bool(whole_replicates(own))


def mean(record: dict[str, Any], name: str) -> float:
    """Return the mean over the clients of a record."""
    return float(np.mean([client[name] for client in record["clients"]]))


def _bound_table() -> Table:
    rows = []
    for size in SIZES_OF_THE_PAPER:
        s = theory.Setting(size=size)
        figures = (
            math.sqrt(theory.sigma_n_squared(s)), theory.r_n(s), theory.epsilon_n(s) ** 2, theory.xi_n(s),
            theory.theorem1(s), theory.useful_size(s) or math.inf,
        )  # fmt: skip
        rows.append((f"n = {size:,}", [f"{s.num_params:,}", *(f"{figure:.3g}" for figure in figures)]))
    heads = ["T", "σ_n", "r_n", "ε_n²", "ξ_n", "Theorem 1", "below 1 from n ="]
    return Table("The bound at the paper's sizes", heads, [("", rows)], [ABOUT_THE_BOUND])


def _slope_table(main: Curves) -> Table:
    blocks = []
    for label, own in main.items():
        by_size = {record["size"]: _setting(record) for record in own}
        rows = []
        for name, words in ERRORS.items():
            sizes, errors = errors_of(own, name)
            r_n = np.array([theory.r_n(by_size[size]) for size in sizes])
            epsilon = np.array([theory.epsilon_n(by_size[size]) ** 2 for size in sizes])
            predicted = [f"{value:.2f}" for value in (_exponent(own), fit(sizes, r_n), fit(sizes, epsilon))]
            rows.append((words, [_interval(slope(sizes, errors)), *predicted, str(len(errors))]))
        blocks.append((label, rows))
    heads = ["slope, 95 % interval", "minimax", "r_n", "ε_n²", "replicates"]
    return Table("The rate", heads, blocks, [ABOUT_THE_RATE], {"theory": _figure(main)})


def _figure(main: Curves) -> Figure:
    """Draw the errors of the posterior and of the mean prediction against n, with the minimax slope."""
    series = []
    for k, (label, own) in enumerate(main.items()):
        for name, words, dash in (("l2", "posterior", ""), ("l2_of_mean", "mean prediction", "5 3")):
            sizes, errors = errors_of(own, name)
            per_replicate = errors.mean(1)
            spread = per_replicate.std(0, ddof=1) / math.sqrt(len(errors)) if len(errors) > 1 else 0 * errors[0, 0]
            series.append(Series(f"{label}, {words}", sizes, per_replicate.mean(0).tolist(), spread.tolist(), k, dash))
        exponent = _exponent(own)
        middle = np.exp(np.log(per_replicate.mean(0)).mean())
        centre = math.exp(np.log(sizes).mean())
        line = [float(middle * (size / centre) ** exponent) for size in sizes]
        series.append(Series(f"n^{exponent:.2f}", sizes, line, [0.0] * len(sizes), k, "2 3", thin=True))
    title = "Error against n"
    caption = "Squared L2 error against the number of examples per client, on logarithmic axes, with standard errors."
    svg = log_chart(title, series, x_label="examples per client, n", y_label="L2 error", description=caption)
    return Figure(title, svg, caption)


def _error_table(main: Curves) -> Table:
    def cells(s: theory.Setting, here: Records) -> list[str]:
        found = [str(s.width), str(s.num_params)]
        for name in ERRORS:
            values = [mean(record, name) for record in here]
            error = f" ± {np.std(values, ddof=1) / math.sqrt(len(values)):.1g}" if len(values) > 1 else ""
            found.append(f"{np.mean(values):.3g}{error}")
        return found

    return Table("The errors, with standard errors", ["M", "T", *ERRORS.values()], _by_size(main, cells))


def _lemma_table(main: Curves) -> Table:
    def cells(s: theory.Setting, here: Records) -> list[str]:
        ratio, kl, distance = (np.mean([mean(r, name) for r in here]) for name in ("log_ratio", "kl", "hellinger"))
        epsilon, r_n = theory.epsilon_n(s) ** 2, theory.r_n(s)
        c = max(0.0, (distance - (ratio / s.zeta + kl) / s.size) / epsilon)
        c_prime = (ratio + s.zeta * kl) / (s.size * s.zeta * r_n)
        return [f"{figure:.3g}" for figure in (ratio / s.size, kl / s.size, r_n, epsilon, distance, c, c_prime)]

    heads = ["l_n / n", "KL / n", "r_n", "ε_n²", "d²", "C", "C'"]
    return Table("The lemmas with measured objectives", heads, _by_size(main, cells), [ABOUT_THE_LEMMAS])


def _by_size(
    main: Curves, cells: Callable[[theory.Setting, Records], list[str]]
) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Return a block per curve with a row per n."""
    blocks = []
    for label, own in main.items():
        by_size = {size: [r for r in own if r["size"] == size] for size in sorted({r["size"] for r in own})}
        rows = [(f"n = {size:,}", cells(_setting(here[0]), here)) for size, here in by_size.items()]
        blocks.append((label, rows))
    return blocks


def _change_table(main: Curves, changed: Curves) -> Table:
    """The error of the mean prediction with each change, beside the unchanged error of the same functions."""
    sizes = sorted({record["size"] for own in changed.values() for record in own})
    rows = []
    for label, own in changed.items():
        (plain,) = (other for other in main.values() if other[0]["smoothness"] == own[0]["smoothness"])
        cells, replicates = [], set()
        for size in sizes:
            found, was = (
                {record["replicate"]: mean(record, "l2_of_mean") for record in records if record["size"] == size}
                for records in (own, plain)
            )
            both = sorted(found.keys() & was.keys())
            pair = (np.mean([values[r] for r in both]) for values in (found, was))
            cells.append("{:.3g} ({:.3g})".format(*pair) if both else "–")
            replicates |= {len(both)} - {0}
        rows.append((label, [*cells, " or ".join(map(str, sorted(replicates)))]))
    heads = [*(f"n = {size:,}" for size in sizes), "replicates"]
    return Table("Ablations: what bends the curve", heads, [("", rows)], [ABOUT_THE_CHANGES])


def _setting(record: dict[str, Any]) -> theory.Setting:
    """Return the setting of the theory for a record, with all constants 1."""
    return theory.Setting(
        size=record["size"],
        width=record["width"],
        inputs=record["dimension"],
        outputs=1,
        zeta=record["zeta"],
        smoothness=record["smoothness"],
    )


def _exponent(own: Records) -> float:
    return theory.rate_exponent(own[0]["smoothness"], own[0]["dimension"])


def _interval(found: Slope) -> str:
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"
