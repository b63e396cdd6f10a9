"""PersonalizedClassifier and PersonalizedRegressor.

`fit` trains what `pfedbayes run` trains on the same rows, without test rows, and predictions are those of
`pfedbayes predict`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_array, column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from pfedbayes.serving.options import Options
from pfedbayes.sklearn.base import Personalized
from pfedbayes.sklearn.columns import as_names, framed, is_frame

SEPARATOR = "|"  # between the labels of a set


class PersonalizedClassifier(ClassifierMixin, Personalized):  # type: ignore[misc]
    __doc__ = f"A classifier with {(Personalized.__doc__ or '').removeprefix('A').lstrip()}"

    _task = "classification"

    def predict(self, X: Any, groups: Any = None) -> NDArray[Any]:
        """Return the most probable label (n,) of each row, by the model of its group."""
        places = self.predict_proba(X, groups).argmax(1)
        found: NDArray[Any] = self.classes_[places]
        return found

    def predict_proba(self, X: Any, groups: Any = None) -> NDArray[np.float64]:
        """Return the probabilities (n, C) of the labels in `classes_`, averaged over draws of the model."""
        columns = self._predict(X, groups)
        p = np.stack([columns[f"p_{name}"] for name in as_names(self.classes_)], axis=1).astype(np.float64)
        p /= p.sum(1, keepdims=True)
        return p

    def predict_set(self, X: Any, groups: Any = None, coverage: float = 0.9) -> Any:
        """Return which labels (n, C) belong to the set that contains the true one with this probability.

        For a data frame, the result is a data frame with a column for each label.
        """
        sets = self._predict(X, groups, Options(coverage=coverage), warn=True)["conformal_set"]
        names = as_names(self.classes_)
        members = [set(text.split(SEPARATOR)) for text in sets]
        within = {name: np.array([name in own for own in members]) for name in names}
        return framed(within, X) if is_frame(X) else np.stack(list(within.values()), axis=1)

    def score(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> float:
        """Return the accuracy."""
        return float(accuracy_score(y, self.predict(X, groups), sample_weight=sample_weight))

    def _fit_targets(self, y: Any) -> NDArray[Any]:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        names = as_names(self.classes_)
        if len(names) < 2:
            raise ValueError(f"y has one class ({', '.join(names)}), and a classifier needs two or more")
        if len(set(names)) < len(names) or any(SEPARATOR in name for name in names):
            raise ValueError(f"labels must differ as texts and be without {SEPARATOR!r}: rename some")
        return as_names(y)

    def _targets(self, y: Any) -> NDArray[Any]:
        return as_names(column_or_1d(y, warn=True))


class PersonalizedRegressor(RegressorMixin, Personalized):  # type: ignore[misc]
    __doc__ = f"A regressor with {(Personalized.__doc__ or '').removeprefix('A').lstrip()}"

    _task = "regression"

    def predict(self, X: Any, groups: Any = None) -> NDArray[np.float64]:
        """Return the mean (n,) of the prediction for each row, by the model of its group."""
        return self._predict(X, groups)["mean"].astype(np.float64)

    def predict_interval(self, X: Any, groups: Any = None, coverage: float = 0.9) -> Any:
        """Return the lower and upper ends (n, 2) of the interval that contains the target with this probability.

        An end is infinite where a group has too few rows for the coverage. For a data frame, the result is a data frame
        with the columns lower and upper.
        """
        columns = self._predict(X, groups, Options(coverage=coverage), warn=True)
        ends = {end: columns[f"conformal_{end}"].astype(np.float64) for end in ("lower", "upper")}
        return framed(ends, X) if is_frame(X) else np.stack(list(ends.values()), axis=1)

    def score(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> float:
        """Return R², the share of the variance that is explained."""
        return float(r2_score(y, self.predict(X, groups), sample_weight=sample_weight))

    def _fit_targets(self, y: Any) -> NDArray[Any]:
        return self._targets(y)

    def _targets(self, y: Any) -> NDArray[np.float64]:
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y", estimator=self)
        numbers: NDArray[np.float64] = column_or_1d(y, warn=True)
        return numbers
