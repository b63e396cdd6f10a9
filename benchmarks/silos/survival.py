"""Survival after breast cancer in six regions (TCGA-BRCA), with the training and test rows of FLamby.

The C-index is the share of comparable pairs that the risk scores order correctly. Its interval is a bootstrap over the
test rows, of which few have an event.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from lifelines import CoxPHFitter
from numpy.typing import NDArray

from benchmarks.silos.ours import PART, own_data, train
from benchmarks.silos.scores import Floats, NotFitted
from pfedbayes.errors import UserError
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.serving.open import open_client

EVENT, DAYS, REGION, FOLD, PATIENT = "event", "days", "region", "flamby_fold", "pid"
POOLED, PER_REGION, OURS = "Cox, pooled", "Cox per region", "default"
PENALTY = 0.1
DRAWS = 2000
PUBLISHED = {"FedAdam, FedYogi": 84.2, "FedAvg": 73.5, "pooled training": 70.4}
"""FLamby's C-index in % on the pooled test rows."""


@dataclass(frozen=True, eq=False)
class Survival:
    """The patients."""

    frame: Any
    """A pandas frame of covariates, event, days and region."""
    test: NDArray[np.bool_]
    digest: str
    task: str = "survival"

    @property
    def rows(self) -> tuple[int, int, int]:
        """Numbers of training, validation and test rows."""
        return int((~self.test).sum()), 0, int(self.test.sum())

    @property
    def regions(self) -> list[str]:
        """The names of the regions, sorted."""
        return sorted(self.frame[REGION].unique())

    @property
    def num_clients(self) -> int:
        """The number of regions."""
        return len(self.regions)


def read(path: Path) -> Survival:
    """Read the patients."""
    frame = pd.read_csv(path)
    test = (frame[FOLD] == "test").to_numpy()
    digest = hashlib.sha256(frame.to_csv(index=False).encode()).hexdigest()[:16]
    return Survival(frame.drop(columns=[FOLD, PATIENT]), test, digest)


def methods(data: Survival) -> list[str]:
    """Return the names of all methods: Cox models and ours."""
    return [POOLED, PER_REGION, *(only(region) for region in data.regions), OURS]


def only(region: str) -> str:
    """Return the name of the model that one region fits alone."""
    return f"Cox, {region} alone"


def measure(data: Survival, method: str, folder: Path) -> tuple[dict[str, float], dict[str, float], float]:
    """Return C-indices over all pairs of test rows and over pairs of the same region, and the seconds of training."""
    start = time.monotonic()
    risk = our_risks(data, folder) if method == OURS else cox_risks(data, method)
    seconds = time.monotonic() - start
    test = data.frame[data.test]
    arrays = risk, test[DAYS].to_numpy(float), test[EVENT].to_numpy() == 1, test[REGION].to_numpy()
    found = with_interval(*arrays, same_client=False)
    within = with_interval(*arrays, same_client=True)
    return found | {"events": float(arrays[2].sum())}, within, seconds


def cox_risks(data: Survival, method: str) -> Floats:
    """Return the log-risks of the test rows from Cox models with a small penalty."""
    region, test = data.frame[REGION].to_numpy(), data.test
    if method == POOLED:
        return _cox(data.frame[~test], data.frame[test])
    if method == PER_REGION:
        risk = np.zeros(len(region))
        for one in data.regions:
            own = region == one
            risk[own & test] = _cox(data.frame[own & ~test], data.frame[own & test])
        return risk[test]
    own = np.array([only(one) == method for one in region])
    return _cox(data.frame[own & ~test], data.frame[test])


def _cox(train_rows: Any, test_rows: Any) -> Floats:
    """Fit a Cox model and return the log-risks of the test rows; 0 for all where the training rows have no event."""
    if not (train_rows[EVENT] == 1).any():
        return np.zeros(len(test_rows))
    inputs = [name for name in train_rows if name not in (EVENT, DAYS, REGION) and train_rows[name].nunique() > 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fitted = CoxPHFitter(penalizer=PENALTY).fit(train_rows[[*inputs, EVENT, DAYS]], DAYS, EVENT)
        except (ValueError, np.linalg.LinAlgError) as error:
            raise NotFitted(f"CoxPHFitter failed: {error}") from None
        risk: Floats = fitted.predict_log_partial_hazard(test_rows[inputs]).to_numpy(float)
    return risk


def our_risks(data: Survival, folder: Path) -> Floats:
    """Return the risks of the test rows from the models of this package.

    This is the call that `pfedbayes run --target days --event event --client-column region` makes.
    """
    path = folder / "patients.csv"
    columns = {"path": str(path), "target": DAYS, "event": EVENT, "client_column": REGION, "split_column": PART}
    experiment = read_experiment(None, own_data(columns))
    if experiment.training.patience is not None:
        raise UserError("FLamby's split has no validation rows for early stopping: choose a method without it")
    data.frame.assign(**{PART: np.where(data.test, "test", "train")}).to_csv(path, index=False)
    train(experiment, folder / "run")
    test = data.frame[data.test]
    risk = np.zeros(len(test))
    for region in data.regions:
        own = (test[REGION] == region).to_numpy()
        predicted = open_client(folder / "run", region, device="cpu").predict(test[own].drop(columns=[EVENT, DAYS]))
        risk[own] = predicted["risk"]
    return risk


def with_interval(
    risk: Floats, days: Floats, event: NDArray[np.bool_], region: NDArray[Any], same_client: bool
) -> dict[str, float]:
    """Return the C-index in % with a 95 % bootstrap interval over patients.

    same_client: count only pairs of patients of the same region.
    """
    comparable, concordant = pairs(risk, days, event)
    if same_client:
        comparable = comparable & (region[:, None] == region)
    generator, draws = np.random.default_rng(0), []
    for _ in range(DRAWS):
        count = np.bincount(generator.integers(len(risk), size=len(risk)), minlength=len(risk)).astype(float)
        total = count @ comparable @ count
        if total:
            draws.append(float(count @ (comparable * concordant) @ count / total))
    if not comparable.any():
        raise NotFitted("the test rows have no comparable pair")
    low, high = np.quantile(draws, [0.025, 0.975])
    value = (comparable * concordant).sum() / comparable.sum()
    return {"c_index": 100 * float(value), "low": 100 * float(low), "high": 100 * float(high)}


def pairs(risk: Floats, days: Floats, event: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], Floats]:
    """Return which pairs (n, n) are comparable, and how far each is concordant: 1, 0, or 1/2 for equal risks.

    Patient i is comparable with j if i had the event before j had it or was last seen. If both times are equal, j must
    have been censored.
    """
    later = (days[:, None] < days) | ((days[:, None] == days) & ~event)
    comparable = event[:, None] & later
    concordant = (risk[:, None] > risk) + 0.5 * (risk[:, None] == risk)
    return comparable, concordant
