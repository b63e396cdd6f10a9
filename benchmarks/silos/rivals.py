"""What one would do without this package: models of scikit-learn and statsmodels, per client or on pooled rows.

All are fitted to training and validation rows. Regression models of scikit-learn predict Gaussians whose variance is
the cross-validated mean squared error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV, RidgeCV
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_predict

from benchmarks.silos.encoding import Design
from benchmarks.silos.mixed import mixed_linear, mixed_logistic
from benchmarks.silos.scores import Floats, Ints, Labels, Numbers, Predictions
from benchmarks.silos.tables import Task

FOLDS = 5
RIDGE = np.logspace(-2, 4, 13)
INVERSE_RIDGE = np.logspace(-3, 1, 7)
UNSEEN = 1e-3  # weight of a class that the training rows of a model lack


def forest_classifier() -> Any:
    return RandomForestClassifier(200, min_samples_leaf=3, random_state=0)


def forest_regressor() -> Any:
    return RandomForestRegressor(100, min_samples_leaf=3, max_features=0.5, random_state=0)


def boosting_classifier() -> Any:
    return HistGradientBoostingClassifier(max_iter=100, learning_rate=0.05, early_stopping=False, random_state=0)


def boosting_regressor() -> Any:
    return HistGradientBoostingRegressor(max_iter=100, learning_rate=0.08, early_stopping=False, random_state=0)


def logistic(y: Ints) -> Any:
    """Return a logistic regression for these labels; its penalty is cross-validated if every class has two rows."""
    counts = np.bincount(y)
    folds = int(min(FOLDS, counts[counts > 0].min()))
    if folds < 2:
        return LogisticRegression(C=0.1, max_iter=500)
    cut = StratifiedKFold(folds, shuffle=True, random_state=0)
    return LogisticRegressionCV(Cs=INVERSE_RIDGE, cv=cut, scoring="neg_log_loss", max_iter=300)


def ridge() -> Any:
    return RidgeCV(RIDGE)


def local_labels(make: Callable[[Ints], Any]) -> Callable[[Design], Predictions]:
    """Return a rival that fits a classifier to the rows of each client."""

    def fit(design: Design) -> Predictions:
        p = np.zeros((len(design.y), design.num_classes))
        for client in range(design.num_clients):
            train, test = design.train & (design.client == client), design.test & (design.client == client)
            if test.any():
                p[test] = class_probabilities(design, make, design.x, train, test)
        return Labels(p[design.test], design.y[design.test], design.client[design.test])

    return fit


def class_frequencies(design: Design) -> Predictions:
    """Predict the class frequencies of each client's training rows: what is known without any input."""
    counts = np.ones((design.num_clients, design.num_classes))
    np.add.at(counts, (design.client[design.train], design.y[design.train]), 1.0)
    p = counts / counts.sum(1, keepdims=True)
    return Labels(p[design.client[design.test]], design.y[design.test], design.client[design.test])


def pooled_labels(make: Callable[[Ints], Any]) -> Callable[[Design], Predictions]:
    """Return a rival that fits a classifier to the rows of all clients, with the client as a column."""

    def fit(design: Design) -> Predictions:
        p = class_probabilities(design, make, design.x_with_client, design.train, design.test)
        return Labels(p, design.y[design.test], design.client[design.test])

    return fit


def class_probabilities(
    design: Design, make: Callable[[Ints], Any], x: Floats, train: NDArray[np.bool_], test: NDArray[np.bool_]
) -> Floats:
    """Fit a classifier and return its class probabilities of the test rows, with some weight on unseen classes.

    If all training rows have one class, return their class frequencies with one more row per class.
    """
    y = design.y[train]
    if len(np.unique(y)) < 2:
        counts = np.bincount(y, minlength=design.num_classes) + 1.0
        return np.tile(counts / counts.sum(), (int(test.sum()), 1))
    model = make(y).fit(x[train], y)
    p = np.full((int(test.sum()), design.num_classes), UNSEEN)
    p[:, model.classes_] = np.maximum(model.predict_proba(x[test]), 1e-6)
    normal: Floats = p / p.sum(1, keepdims=True)
    return normal


def local_numbers(make: Callable[[], Any]) -> Callable[[Design], Predictions]:
    """Return a rival that fits a regression to the rows of each client."""

    def fit(design: Design) -> Predictions:
        mean, variance = np.zeros(len(design.y)), np.ones(len(design.y))
        for client in range(design.num_clients):
            train, test = design.train & (design.client == client), design.test & (design.client == client)
            if test.any():
                mean[test], variance[test] = gaussian(make, design.x, design.y, train, test)
        return numbers(design, mean[design.test], variance[design.test])

    return fit


def pooled_numbers(make: Callable[[], Any]) -> Callable[[Design], Predictions]:
    """Return a rival that fits a regression to the rows of all clients, with the client as a column."""

    def fit(design: Design) -> Predictions:
        mean, variance = gaussian(make, design.x_with_client, design.y, design.train, design.test)
        return numbers(design, mean, np.full(len(mean), variance))

    return fit


def gaussian(
    make: Callable[[], Any], x: Floats, y: Floats, train: NDArray[np.bool_], test: NDArray[np.bool_]
) -> tuple[Floats, float]:
    """Fit a regression; return its predictions of the test rows and its cross-validated mean squared error."""
    mean: Floats = make().fit(x[train], y[train]).predict(x[test])
    folds = min(FOLDS, int(train.sum()))
    if folds < 2:
        return mean, 1.0
    cut = KFold(folds, shuffle=True, random_state=0)
    errors = y[train] - cross_val_predict(make(), x[train], y[train], cv=cut)
    return mean, float(np.mean(errors**2))


def numbers(design: Design, mean: Floats, variance: Floats) -> Numbers:
    """Return predictions in the units of the target, given those of the standardised target."""
    unit, test = design.unit, design.test
    return Numbers(unit * mean, unit * np.sqrt(variance), unit * design.y[test], design.client[test])


def mixed_numbers(slopes: bool) -> Callable[[Design], Predictions]:
    """Return a linear mixed-effects model."""
    return lambda design: numbers(design, *mixed_linear(design, slopes))


def mixed_labels(slopes: bool) -> Callable[[Design], Predictions]:
    """Return a logistic mixed-effects model."""
    return lambda design: Labels(mixed_logistic(design, slopes), design.y[design.test], design.client[design.test])


Rival = Callable[[Design], Predictions]
LOCAL: dict[Task, dict[str, Rival]] = {
    "classification": {
        "local logistic regression": local_labels(logistic),
        "local random forest": local_labels(lambda y: forest_classifier()),
    },
    "regression": {"local ridge": local_numbers(ridge), "local random forest": local_numbers(forest_regressor)},
}
BOOSTING = "pooled boosting"
POOLED: dict[Task, dict[str, Rival]] = {
    "classification": {
        "pooled logistic regression": pooled_labels(logistic),
        BOOSTING: pooled_labels(lambda y: boosting_classifier()),
        "mixed intercepts": mixed_labels(slopes=False),
        "mixed slopes": mixed_labels(slopes=True),
    },
    "regression": {
        "pooled ridge": pooled_numbers(ridge),
        BOOSTING: pooled_numbers(boosting_regressor),
        "mixed intercepts": mixed_numbers(slopes=False),
        "mixed slopes": mixed_numbers(slopes=True),
    },
}


FREQUENCIES = "most frequent class"


def rivals_for(task: Task) -> dict[str, Rival]:
    """Return the rivals by name, those per client first."""
    return LOCAL[task] | POOLED[task]


def find(name: str, task: Task) -> Rival | None:
    """Return a rival by its name; None if there is none. `FREQUENCIES` is one that no comparison counts."""
    return (rivals_for(task) | {FREQUENCIES: class_frequencies}).get(name)


def predict(rival: Rival, design: Design) -> Predictions:
    """Fit a rival and predict the test rows."""
    with quietly():
        return rival(design)


@contextmanager
def quietly() -> Iterator[None]:
    """Show no warnings, such as those of optimisers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
