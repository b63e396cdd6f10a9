"""Judge every Bayesian method by exact posteriors, and write docs/results/court.md.

    python -m benchmarks.court [--out docs/results/court.md] [--fresh]

Call it again to continue after an interruption: results are kept in court.json beside the page.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.court import collapse, exact, judge
from benchmarks.court.cases import CASES, JUDGED, TAU2, TUNED, Data, Name, network, simulate
from benchmarks.court.draws import SHOWN
from benchmarks.court.page import page
from benchmarks.court.train import ROUNDS, STEPS, Federations, methods_of
from pfedbayes.methods import Method
from pfedbayes.report.charts import standalone

SBC_SETS, SBC_DRAWS = 200, 99
MEAN_FIELD = "exact mean-field optimum"
CALIBRATED: tuple[str, ...] = (
    MEAN_FIELD,
    "PVI",
    "FedEP",
    "FedSEP",
    "FedIvon",
)  # methods of case A with a prior of their own
Sizes = dict[str, int]


def truth_loss(federations: Federations, name: Name, datasets: list[Data]) -> float:
    """Return the mean held-out loss over data sets, up to a constant."""
    if name != "E":
        claims = federations.claims(CASES[name].personal)
        return float(
            np.mean(
                [judge.loss_to_truth(q, data, CASES[name].binary) for q, data in zip(claims, datasets, strict=True)]
            )
        )
    losses = []
    for k, data in enumerate(datasets):
        outputs = federations.outputs(k, torch.from_numpy(data.held_out), 100)
        true = torch.from_numpy(network(data.theta[0], data.held_out))
        noise = torch.full_like(true, 0.25)
        losses.append(float(judge.normal_kl(true, noise, outputs.mean(0), outputs.var(0) + noise).mean()))
    return float(np.mean(losses)) if all(map(math.isfinite, losses)) else math.inf


def trained(method: Method, name: Name, datasets: list[Data], sizes: Sizes) -> Federations:
    """Return the federations of all data sets after training."""
    found = Federations(method, name, datasets, sizes["rounds"], sizes["steps"])
    for _ in found.train():
        pass
    return found


def chosen(name: Name, settings: list[Method], sizes: Sizes) -> Method:
    """Return the setting with the least held-out loss on the tuning data sets."""
    datasets = [simulate(name, 1000 + k) for k in range(sizes["tuned"])]
    losses = [truth_loss(trained(each, name, datasets, sizes), name, datasets) for each in settings]
    return settings[int(np.argmin([loss if math.isfinite(loss) else math.inf for loss in losses]))]


def posterior_of(name: Name, number: int, data: Data) -> tuple[exact.Gaussian, Tensor | None]:
    """Return the exact posterior of a data set, and its draws where NUTS has made it."""
    if name == "A":
        return exact.linear(data, exact.prior_variance(name)), None
    if name == "B":
        return exact.hierarchical(data, exact.prior_variance(name), data.tau2), None
    draws = exact.draws(name, number)["theta"]
    draws = draws if name == "D" else draws[:, None]
    return exact.of_draws(draws), draws


def judge_case(
    name: Name, label: str, settings: list[Method] | None, sizes: Sizes, numbers: list[int]
) -> dict[str, Any]:
    """Return the scores of a method, or of a baseline, on every data set of a case."""
    datasets = [simulate(name, number) for number in numbers]
    if settings is None:
        rows = zip(datasets, (posterior_of(name, *each) for each in zip(numbers, datasets, strict=True)), strict=True)
        scores = [
            judge.judge(p if label == "exact" else exact.baselines(name, data)[label], p, data, draws)
            for data, (p, draws) in rows
        ]
        return {"trained": False, "scores": scores}
    method = chosen(name, settings, sizes)
    federations = trained(method, name, datasets, sizes)
    if name == "E":
        scores = [
            judge.judge_outputs(
                federations.outputs(k, torch.from_numpy(data.held_out[:SHOWN]), 500),
                exact.draws(name, number)["outputs"],
            )
            for k, (number, data) in enumerate(zip(numbers, datasets, strict=True))
        ]
    else:
        posteriors = [posterior_of(name, *each) for each in zip(numbers, datasets, strict=True)]
        claims = federations.claims(CASES[name].personal)
        scores = [
            judge.judge(q, p, data, draws) for q, (p, draws), data in zip(claims, posteriors, datasets, strict=True)
        ]
    rates = {key: value for key, value in vars(method).items() if key.startswith("eta")}
    return {"trained": True, "rates": rates, "scores": scores}


def calibration(claims: list[exact.Gaussian], datasets: list[Data]) -> float:
    """Return chi^2 per degree of freedom of the ranks of the true weights."""
    generator = torch.Generator().manual_seed(7)
    ranks = [judge.ranks(q, data, SBC_DRAWS, generator) for q, data in zip(claims, datasets, strict=True)]
    return judge.rank_test(torch.cat(ranks), SBC_DRAWS)


def simulations(results: dict[str, Any], sizes: Sizes, save: Callable[[], None]) -> None:
    """Fill in the simulation-based calibration of cases A and B."""
    sbc = results.setdefault("sbc", {"count": sizes["sbc"], "limit": 1 + 2.33 * math.sqrt(2 / 19), "chi2": {}})
    judged: list[tuple[Name, str]] = [("A", "exact"), *(("A", each) for each in CALIBRATED)]
    for name, label in (*judged, ("B", "exact"), ("B", MEAN_FIELD)):
        if f"{name}: {label}" in sbc["chi2"]:
            continue
        datasets = [simulate(name, 5000 + k) for k in range(sizes["sbc"])]
        if label == "exact":
            claims = [posterior_of(name, 0, data)[0] for data in datasets]
        elif label == MEAN_FIELD:
            claims = [exact.mean_field(data, name) for data in datasets]
        else:
            claims = trained(chosen(name, methods_of(name)[label], sizes), name, datasets, sizes).claims(personal=False)
        sbc["chi2"][f"{name}: {label}"] = calibration(claims, datasets)
        save()


def hold_court(out: Path, sizes: Sizes, names: str, fresh: bool = False) -> dict[str, Any]:
    """Judge, and write the page, its numbers and its picture."""
    kept = out.with_suffix(".json")
    protocol = {"rounds": sizes["rounds"], "steps": sizes["rounds"] * sizes["steps"], "tuned": sizes["tuned"]}
    results: dict[str, Any] = {"protocol": protocol, "cases": {}}
    if kept.exists() and not fresh and (before := json.loads(kept.read_text()))["protocol"] == protocol:
        results = before

    def save() -> None:
        kept.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")

    stored = exact.stored()
    for name in CASES:
        if name not in names or not (numbers := stored.get(name, list(range(sizes["judged"])))[: sizes["judged"]]):
            continue
        found = results["cases"].setdefault(name, {})
        still: list[tuple[str, list[Method] | None]] = []
        if name != "E":
            still = [("exact", None), *((each, None) for each in exact.baselines(name, simulate(name, numbers[0])))]
        every = [*still, *methods_of(name).items()]
        for label, settings in every:
            if len(found.get(label, {"scores": []})["scores"]) != len(numbers):
                start = time.monotonic()
                found[label] = judge_case(name, label, settings, sizes, numbers)
                save()
                print(f"{name}: {label}, {time.monotonic() - start:.0f} s", flush=True)
        results["cases"][name] = {label: found[label] for label, _ in every}
    results["cases"] = dict(sorted(results["cases"].items()))
    if "collapse" not in results:
        results["collapse"] = {
            "few": collapse.curves(8, sizes["judged"]), "many": collapse.curves(30, sizes["judged"]),
        }  # fmt: skip
    if sizes["sbc"]:
        simulations(results, sizes, save)
    save()
    out.with_suffix(".svg").write_text(standalone(collapse.picture(results["collapse"]["few"])))
    out.write_text(page(results, 8, TAU2**0.5, collapse.EXPECTED))
    return results


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.court", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results/court.md"))
    parser.add_argument("--cases", default="ABCDE", help="cases to judge, such as AB")
    parser.add_argument("--fresh", action="store_true", help="do not continue from court.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"rounds": ROUNDS, "steps": STEPS, "judged": JUDGED, "tuned": TUNED, "sbc": SBC_SETS}
    hold_court(options.out, sizes, options.cases, options.fresh)


if __name__ == "__main__":
    main()
