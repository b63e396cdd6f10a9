"""What both estimators share: how X and groups become tables, and how models are trained, kept and asked."""

from __future__ import annotations

import json
import numbers
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from pfedbayes.constraints import LARGEST_SEED
from pfedbayes.data import shards_from_table
from pfedbayes.data.own.familiarity import Familiarity
from pfedbayes.data.own.table_builder import table_of
from pfedbayes.errors import UserError
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import Experiment, read_experiment
from pfedbayes.serving.newcomers import Joined
from pfedbayes.serving.options import Options
from pfedbayes.sklearn.columns import Texts, as_names, categorical, columns_of, framed, free_name, is_frame
from pfedbayes.sklearn.fitted import FittedRun
from pfedbayes.sklearn.saved import Labels, Saved, read_saved, write_saved

ONE_GROUP = "all"  # the group of all rows, if there are no groups
MOST_NAMED = 5  # groups that a warning names
Columns = dict[str, NDArray[Any]]


@contextmanager
def as_value_error() -> Iterator[None]:
    """Raise what scikit-learn's users expect of wrong input."""
    try:
        yield
    except UserError as error:
        raise ValueError(str(error)) from None


class Personalized(BaseEstimator):  # type: ignore[misc]
    """A model for each group of rows.

    method: of the federation; see `pfedbayes methods`. rounds: default: those of the method. group_column: the column
    of X with the group of each row, for tools of scikit-learn that pass no groups on; it is no input. settings: other
    settings of `pfedbayes run --set`, such as {"evaluation.folds": 3}. random_state: None for the default seed, with
    which every fit gives the same models. device: auto, cpu or cuda.

    Fitted: `groups_` holds the names of the groups, and `joining_` what joining bought each of them.
    """

    _task: str

    def __init__(
        self,
        *,
        method: str = "hierarchical",
        rounds: int | None = None,
        group_column: str | None = None,
        settings: dict[str, Any] | None = None,
        random_state: Any = None,
        device: str = "auto",
    ) -> None:
        self.method = method
        self.rounds = rounds
        self.group_column = group_column
        self.settings = settings
        self.random_state = random_state
        self.device = device

    def __sklearn_tags__(self) -> Any:
        """Say which inputs are possible."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        return tags

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Train a model for each group.

        X: an array (n, d), or a data frame whose columns hold numbers, texts or categories; cells may be missing.
        y: targets (n,). groups: the group of each row (n,); default: the column `group_column`, else one group.
        """
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        columns, names = self._read(X, groups, reset=True)
        targets = self._fit_targets(y)
        check_consistent_length(next(iter(columns.values())), targets)
        if names is None:
            names = np.full(len(targets), ONE_GROUP, dtype=object)
        target = free_name(getattr(y, "name", None), columns, "target")
        group = free_name(self.group_column or getattr(groups, "name", None), [*columns, target], "group")
        run = FittedRun(trusted=True)  # the user has named the code, if any
        with as_value_error():
            categories = [name for name in categorical(X, self._names()) if name in columns]
            experiment = self._experiment(run.folder, target, group, categories)
            shards = shards_from_table(columns | {target: targets, group: names}, experiment.data)
            for _ in execute(experiment, run.folder, [experiment.training.seed], self.device, shards=shards):
                pass
        self._adopt(run)
        return self

    def join(self, X: Any, y: Any, group: Any, **options: Any) -> Joined:
        """Train a model for a group that was not in the training data, and return how well it does.

        X, y: its rows. group: its name. options: those of `pfedbayes.join`.
        """
        check_is_fitted(self)
        columns, _ = self._read(X, None, reset=False, grouped=False)
        targets = self._targets(y)
        check_consistent_length(next(iter(columns.values())), targets)
        (name,) = as_names([group])
        with as_value_error():
            target = self._run.preprocessing.target.name
            joined = self._run.join(columns | {target: targets}, name, **{"certify": False} | options)
        self.groups_ = np.array(self._run.names(), dtype=np.object_)
        return joined

    def predict_details(self, X: Any, groups: Any = None, **options: Any) -> Any:
        """Return all columns of `pfedbayes predict`, as a data frame like X; for an array, as arrays by name.

        options: such as coverage=0.95 or error=0.05, see `pfedbayes.serving.options.Options`.
        """
        columns = self._predict(X, groups, Options(**options), warn=True)
        return framed(columns, X) if is_frame(X) else columns

    def save(self, folder: str | Path) -> Path:
        """Save the estimator in a new folder, without pickle. All commands take it as a run folder."""
        check_is_fitted(self)
        state = self.random_state
        params = self.get_params(deep=False)
        params["random_state"] = int(state) if isinstance(state, numbers.Integral) else None
        names, labels = getattr(self, "feature_names_in_", None), getattr(self, "classes_", None)
        saved = Saved(
            type(self).__name__, params, self.n_features_in_, None if names is None else names.tolist(),
            None if labels is None else Labels.of(labels),
        )  # fmt: skip
        with as_value_error():
            self._run.save(Path(folder))
            write_saved(Path(folder), saved)
        return Path(folder)

    @classmethod
    def load(cls, folder: str | Path, trust_module: bool = False) -> Self:
        """Load a saved estimator. trust_module: whether to import the code that its folder names, if any."""
        with as_value_error():
            saved = read_saved(Path(folder), cls.__name__, cls._get_param_names(), trust_module)
            run = FittedRun.load(Path(folder), trust_module)
        model = cls(**saved.params)
        model.n_features_in_ = saved.n_features
        if saved.names is not None:
            model.feature_names_in_ = np.array(saved.names, dtype=object)
        if saved.labels is not None:
            model.classes_ = saved.labels.array
        model._adopt(run)
        return model

    # What the two differ in

    def _fit_targets(self, y: Any) -> NDArray[Any]:
        """Check the targets of the training rows, and return them as a column."""
        raise NotImplementedError

    def _targets(self, y: Any) -> NDArray[Any]:
        """Return the targets of other rows as a column."""
        raise NotImplementedError

    # Tables

    def _read(self, X: Any, groups: Any, reset: bool, grouped: bool = True) -> tuple[Columns, Texts | None]:
        """Return the input columns of X, and the group of each row; None without groups.

        reset: whether X is of training rows. grouped: whether rows have groups.
        """
        if is_frame(X):
            if len(set(X.columns)) < len(X.columns):
                raise ValueError("two columns of X have the same name: rename one of them")
            validate_data(self, X, reset=reset, skip_check_array=True)
            if not len(X) or not len(X.columns):
                raise ValueError(f"X has {len(X)} sample(s) and {len(X.columns)} feature(s): give at least one of each")
        else:
            X = validate_data(self, X, reset=reset, dtype=None, ensure_all_finite=False)
        columns = columns_of(X, self._names())
        if self.group_column is not None:
            inside = columns.pop(self.group_column, None)
            if inside is None and grouped and groups is None:
                raise ValueError(f"X has no column {self.group_column!r} (group_column): give a data frame that has it")
            groups = inside if groups is None else groups
        if groups is None or not grouped:
            return columns, None
        names = as_names(groups)
        check_consistent_length(next(iter(columns.values())), names)
        return columns, names

    def _names(self) -> list[str]:
        """Return the names of the columns of X."""
        given = getattr(self, "feature_names_in_", None)
        return [f"x{k}" for k in range(self.n_features_in_)] if given is None else list(given)

    # Models

    def _experiment(self, folder: Path, target: str, group: str, categories: list[str]) -> Experiment:
        """Return the experiment of `pfedbayes run` for these columns, without test rows."""
        given: dict[str, Any] = {
            "data.path": str(folder / "X"), "data.target": target, "data.client_column": group,
            "data.task": self._task, "data.categories": categories, "data.test_fraction": 0.0,
            "method.name": self.method,
        }  # fmt: skip
        if self.rounds is not None:
            given["training.rounds"] = int(self.rounds)
        if self.random_state is not None:
            given |= dict.fromkeys(("training.seed", "data.seed"), self._seed())
        given |= self.settings or {}
        return read_experiment(None, [f"{key}={json.dumps(each, ensure_ascii=False)}" for key, each in given.items()])

    def _seed(self) -> int:
        state = self.random_state
        if isinstance(state, numbers.Integral):
            return int(state)
        return int(check_random_state(state).randint(min(LARGEST_SEED, 2**31 - 1)))

    def _adopt(self, run: FittedRun) -> None:
        """Predict with the models of a run from now on."""
        with as_value_error():
            self._run = run
            self.groups_ = np.array(run.names(), dtype=np.object_)
            self.joining_ = run.verdicts()

    def _predict(self, X: Any, groups: Any, options: Options | None = None, warn: bool = False) -> Columns:
        """Return the columns of the prediction, in the order of the rows.

        warn: of columns that are unlike the training data, for which guarantees may not hold.
        """
        check_is_fitted(self)
        columns, names = self._read(X, groups, reset=False)
        with as_value_error():
            preprocessing = self._run.preprocessing
            table = table_of(columns, "X", preprocessing.inputs_schema())
            x = preprocessing.encode(table)
            if warn:
                familiarity = Familiarity(preprocessing)
                familiarity.add(table, x)
                for sentence in familiarity.warnings():
                    warnings.warn(sentence, stacklevel=4)
            rows = self._rows_by_model(names, len(x))
            found = [self._run.client(name).predictor(options or Options()).columns(x[own]) for name, own in rows]
        order = np.argsort(np.concatenate([own for _, own in rows]), kind="stable")
        every = dict.fromkeys(name for part in found for name in part)
        filled = [
            [
                part[name] if name in part else np.full(len(own), np.nan)
                for part, (_, own) in zip(found, rows, strict=True)
            ]
            for name in every
        ]
        return {name: np.concatenate(parts)[order] for name, parts in zip(every, filled, strict=True)}

    def _rows_by_model(self, names: Texts | None, count: int) -> list[tuple[str | None, NDArray[np.int64]]]:
        """Return the rows that each model predicts; None is the shared model. Warn of rows that fall to it."""
        if names is None:
            alone = self.groups_.tolist() == [ONE_GROUP]
            if not alone:
                warnings.warn("no groups are given: all rows get the shared model", stacklevel=5)
            return [(ONE_GROUP if alone else None, np.arange(count))]
        levels, codes = np.unique(names.astype(str), return_inverse=True)
        known = set(self.groups_.tolist())
        unknown = [level for level in levels.tolist() if level not in known]
        if unknown:
            more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
            warnings.warn(
                f"the shared model predicts for groups that were not in the training data: "
                f"{', '.join(unknown[:MOST_NAMED])}{more}; join() gives a group its own",
                stacklevel=5,
            )
        found: list[tuple[str | None, NDArray[np.int64]]] = [
            (level, np.flatnonzero(codes == k)) for k, level in enumerate(levels.tolist()) if level in known
        ]
        if unknown:
            found.append((None, np.flatnonzero(np.isin(levels, unknown)[codes])))
        return found
