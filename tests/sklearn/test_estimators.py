"""Estimators of scikit-learn: their predictions are those of a run, and ordinary use of scikit-learn works."""

import copy
import gc
import json
import pickle
import sys

import numpy as np
import pandas
import pytest
import sklearn
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment
from pfedbayes.serving import open_client
from pfedbayes.sklearn import PersonalizedClassifier, PersonalizedRegressor

QUICK = {"evaluation.folds": 2, "training.local_steps": 4}
CHANGES = ["training.rounds=4", "evaluation.folds=2", "training.local_steps=4"]


def patients(size=120, sites=("north", "south", "east"), seed=0):
    """Numbers, texts and missing cells; who is ill depends on age and sex, and a little on the site."""
    rng = np.random.default_rng(seed)
    age, sex, site = rng.integers(20, 90, size).astype(float), rng.choice(["m", "f"], size), rng.choice(sites, size)
    risk = (age - 55) / 6 + 2 * (sex == "m") + (site == sites[0]) + rng.logistic(0, 0.5, size)
    age[rng.random(size) < 0.1] = np.nan
    columns = {"age": age, "sex": np.where(rng.random(size) < 0.1, None, sex), "hospital": site}
    frame = pandas.DataFrame(columns | {"cost": 10 * risk, "outcome": np.where(risk > 0, "ill", "well")})
    return frame.set_index(np.arange(size) + 1000)


def quick(cls, **params):
    return cls(**{"rounds": 4, "settings": QUICK} | params)


@pytest.fixture(scope="module")
def table():
    return patients()


@pytest.fixture(scope="module")
def rows(table):
    return table[["age", "sex"]]


@pytest.fixture(scope="module")
def classifier(table, rows):
    return quick(PersonalizedClassifier).fit(rows, table["outcome"], groups=table["hospital"])


@pytest.fixture(scope="module")
def regressor(table, rows):
    return quick(PersonalizedRegressor).fit(rows, table["cost"], groups=table["hospital"])


@pytest.mark.parametrize(("target", "cls"), [("outcome", PersonalizedClassifier), ("cost", PersonalizedRegressor)])
def test_predictions_are_those_of_a_run_on_the_same_rows(target, cls, table, rows, request, tmp_path):
    path = tmp_path / "table.csv"
    table[["age", "sex", "hospital", target]].to_csv(path, index=False)
    data = [f"data.path='{path}'", f"data.target={target}", "data.client_column=hospital", "data.test_fraction=0"]
    task = ["data.task=regression"] if target == "cost" else []
    experiment = read_experiment(None, [*data, *task, *CHANGES])
    for _ in execute(experiment, tmp_path / "run", [1]):
        pass
    model = request.getfixturevalue("regressor" if target == "cost" else "classifier")
    assert isinstance(model, cls)
    for site, own in table.groupby("hospital"):
        theirs = open_client(tmp_path / "run", site).predict(own[["age", "sex"]])
        ours = model.predict_details(rows.loc[own.index], own["hospital"])
        assert list(ours.index) == list(own.index)
        assert {*ours} >= {"label", "p_ill", "conformal_set"} or {*ours} >= {"mean", "conformal_lower"}
        for name in ours:
            np.testing.assert_array_equal(ours[name].to_numpy(), theirs[name])
        if target == "outcome":
            p = model.predict_proba(rows.loc[own.index], own["hospital"])
            np.testing.assert_allclose(p, np.stack([theirs["p_ill"], theirs["p_well"]], 1), atol=1e-6)
            assert (model.predict(rows.loc[own.index], own["hospital"]) == theirs["label"]).all()
        else:
            np.testing.assert_allclose(model.predict(rows.loc[own.index], own["hospital"]), theirs["mean"])


def test_rows_keep_their_order(classifier, table, rows):
    shuffled = rows.sample(frac=1, random_state=0)
    p = pandas.DataFrame(classifier.predict_proba(rows, table["hospital"]), rows.index)
    q = classifier.predict_proba(shuffled, table["hospital"].loc[shuffled.index])
    np.testing.assert_allclose(p.loc[shuffled.index], q, atol=1e-5)


def test_models_are_personal_and_learn(classifier, regressor, table, rows):
    assert classifier.score(rows, table["outcome"], groups=table["hospital"]) > 0.8
    assert regressor.score(rows, table["cost"], groups=table["hospital"]) > 0.3
    one = rows.iloc[[0, 0, 0]]
    assert len(set(classifier.predict_proba(one, ["north", "south", "east"])[:, 0])) == 3
    assert classifier.groups_.tolist() == ["east", "north", "south"]
    assert {verdict.client for verdict in classifier.joining_} == set(classifier.groups_)


def test_an_unknown_group_gets_the_shared_model_and_hears_of_it(classifier, rows):
    two = rows.iloc[:2]
    with pytest.warns(UserWarning, match=r"were not in the training data: moon; join"):
        of_moon = classifier.predict_proba(two, ["moon", "moon"])
    with pytest.warns(UserWarning, match="no groups are given: all rows get the shared model"):
        shared = classifier.predict_proba(two)
    np.testing.assert_array_equal(of_moon, shared)
    with pytest.warns(UserWarning, match="and 2 more"):
        mixed = classifier.predict_proba(rows.iloc[[0] * 8], [*"abcdefg", "east"])
    np.testing.assert_allclose(mixed[0], shared[0], atol=1e-6)
    assert mixed[7, 0] != mixed[0, 0]


def test_sets_and_intervals_keep_the_kind_of_the_input(classifier, regressor, table, rows):
    sets = classifier.predict_set(rows, table["hospital"], coverage=0.8)
    assert list(sets) == ["ill", "well"]
    assert list(sets.index) == list(rows.index)
    own = sets.to_numpy()[np.arange(len(table)), (table["outcome"] == "well").astype(int)]
    assert own.mean() > 0.75
    ends = regressor.predict_interval(rows, table["hospital"], coverage=0.8)
    assert list(ends) == ["lower", "upper"]
    assert ((ends["lower"] <= table["cost"]) & (table["cost"] <= ends["upper"])).mean() > 0.75
    x, y = np.random.default_rng(0).normal(size=(2, 40))
    model = quick(PersonalizedRegressor).fit(x[:, None], y)
    assert model.predict_interval(x[:, None]).shape == (40, 2)
    assert set(model.predict_details(x[:, None])) >= {"mean", "lower", "upper"}


def test_columns_unlike_the_training_data_are_told_where_guarantees_count(regressor, table, rows):
    far = rows.assign(age=9000.0)
    with pytest.warns(UserWarning, match="'age'"):
        regressor.predict_interval(far, table["hospital"])
    regressor.predict(far, table["hospital"])  # without a warning


def test_a_newcomer_joins(table, rows, classifier):
    model = copy.deepcopy(classifier)
    west = patients(60, ("west",), seed=1)
    joined = model.join(west[["age", "sex"]], west["outcome"], "west")
    assert joined.trained == 60
    assert [*model.groups_] == ["east", "north", "south", "west"]
    assert [*classifier.groups_] == ["east", "north", "south"]
    own = model.predict_proba(rows, ["west"] * len(rows))
    with pytest.warns(UserWarning, match="west"):
        assert abs(own - classifier.predict_proba(rows, ["west"] * len(rows))).max() > 0.01
    again = pickle.loads(pickle.dumps(model))  # noqa: S301
    np.testing.assert_array_equal(again.predict_proba(rows, ["west"] * len(rows)), own)
    with pytest.raises(ValueError, match="already a client"):
        classifier.join(rows, table["outcome"], "east")
    with pytest.raises(ValueError, match="not a known class"):
        model.join(rows, ["odd"] * len(rows), "moon")


def test_an_estimator_is_saved_without_pickle(classifier, regressor, table, rows, tmp_path):
    for model, cls in ((classifier, PersonalizedClassifier), (regressor, PersonalizedRegressor)):
        folder = model.save(tmp_path / cls.__name__)
        again = cls.load(folder)
        assert again.get_params() == model.get_params()
        assert [*again.feature_names_in_] == ["age", "sex"]
        np.testing.assert_array_equal(again.predict(rows, table["hospital"]), model.predict(rows, table["hospital"]))
        with pytest.raises(ValueError, match="holds other files"):
            model.save(folder)
    assert (again.groups_ == classifier.groups_).all()
    with pytest.raises(ValueError, match="it is of a PersonalizedClassifier"):
        PersonalizedRegressor.load(tmp_path / "PersonalizedClassifier")
    with pytest.raises(ValueError, match="an estimator has saved"):
        PersonalizedRegressor.load(tmp_path)
    new = rows.head(3).to_dict("list")
    assert len(open_client(tmp_path / "PersonalizedClassifier", "north").predict(new)["label"]) == 3


def test_a_saved_estimator_is_checked_and_names_no_code(classifier, tmp_path):
    folder = classifier.save(tmp_path / "saved")
    path = folder / "estimator.json"
    text = path.read_text()
    path.write_text(text.replace('"age"', '"agf"'))
    with pytest.raises(ValueError, match="checksum"):
        PersonalizedClassifier.load(folder)
    content = json.loads(text)
    del content["checksum"]
    for changes in ({"method": "evil:Method"}, {"settings": {"net.name": "evil:Net"}}):
        path.write_text(json.dumps(content | {"params": content["params"] | changes}))
        with pytest.raises(ValueError, match="--trust-module"):
            PersonalizedClassifier.load(folder)
        PersonalizedClassifier.load(folder, trust_module=True)
    path.write_text(json.dumps(content | {"params": {}}))
    with pytest.raises(ValueError, match="parameters"):
        PersonalizedClassifier.load(folder)


def test_random_states_are_reproducible(table, rows):
    def fitted(state):
        model = quick(PersonalizedRegressor, rounds=1, random_state=state)
        return model.fit(rows, table["cost"], table["hospital"]).predict(rows, table["hospital"])

    default, first, other = fitted(None), fitted(1), fitted(7)
    np.testing.assert_array_equal(default, first)  # 1 is the default seed of a run
    assert abs(first - other).max() > 1e-3
    np.testing.assert_array_equal(fitted(np.random.RandomState(3)), fitted(np.random.RandomState(3)))


def test_small_and_odd_groups_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = patients(60, seed=2).reset_index(drop=True)
    table["same"], table["empty"], table["site"] = 1.0, np.nan, table["hospital"]
    table.loc[0, "site"] = "single"
    table.loc[table["site"] == "north", "outcome"] = "ill"
    table.loc[table.index[-5:], "outcome"] = "dead"
    table.loc[table.index[-5:], "site"] = "south"
    inputs = table[["age", "sex", "same", "empty"]]
    model = quick(PersonalizedClassifier, rounds=2).fit(inputs, table["outcome"], table["site"])
    p = model.predict_proba(inputs, table["site"])
    assert model.classes_.tolist() == ["dead", "ill", "well"]
    assert np.isfinite(p).all()
    np.testing.assert_allclose(p.sum(1), 1)
    details = model.predict_details(inputs, table["site"].replace("single", "south"))
    assert details["strangeness"].notna().all()
    assert list(tmp_path.iterdir()) == []  # nothing is written to the working directory


def test_the_files_go_with_the_estimator():
    x = np.arange(20.0)[:, None]
    model = quick(PersonalizedRegressor, rounds=1).fit(x, x[:, 0])
    folder = model._run.folder
    assert folder.is_dir()
    del model
    gc.collect()
    assert not folder.exists()


def test_a_column_of_the_frame_may_hold_the_groups(table):
    inputs = table[["age", "sex", "hospital"]]
    model = quick(PersonalizedClassifier, group_column="hospital", rounds=2).fit(inputs, table["outcome"])
    assert model.groups_.tolist() == ["east", "north", "south"]
    assert [*model._run.preprocessing.describe().split()][:2] == ["2", "columns"]
    pipeline = make_pipeline(FunctionTransformer(), clone(model))
    assert (cross_val_score(pipeline, inputs, table["outcome"], cv=2) > 0.5).all()
    search = GridSearchCV(clone(model), {"rounds": [1, 2]}, cv=2).fit(inputs, table["outcome"])
    assert search.best_estimator_.groups_.tolist() == ["east", "north", "south"]
    with pytest.raises(ValueError, match="group_column"):
        model.fit(inputs[["age"]], table["outcome"])


def test_groups_are_routed_as_metadata(table, rows):
    with sklearn.config_context(enable_metadata_routing=True):
        model = quick(PersonalizedClassifier, rounds=2)
        model.set_fit_request(groups=True).set_score_request(groups=True)
        scores = cross_validate(
            model, rows, table["outcome"], params={"groups": table["hospital"]}, cv=2, return_estimator=True
        )
    assert all(len(each.groups_) == 3 for each in scores["estimator"])
    assert (scores["test_score"] > 0.5).all()


@pytest.mark.parametrize("labels", [[False, True], [3, 12], ["10", "9"], [0.5, 2.5]])
def test_labels_come_back_as_they_were(labels):
    x = np.linspace(-2, 2, 40)[:, None]
    y = np.where(x[:, 0] > 0, labels[1], labels[0])
    if isinstance(labels[0], float):
        y = y.astype(object).astype(str)
    model = quick(PersonalizedClassifier, rounds=6).fit(x, y)
    assert (model.classes_ == np.unique(y)).all()
    assert model.predict(x).dtype == y.dtype
    assert (model.predict(x) == y).mean() > 0.9
    again = pickle.loads(pickle.dumps(model))  # noqa: S301
    assert (again.predict(x) == model.predict(x)).all()


def test_category_columns_of_numbers_are_categories(table):
    rows = table[["age"]].assign(ward=pandas.Categorical(np.arange(len(table)) % 3))
    model = quick(PersonalizedRegressor, rounds=1).fit(rows, table["cost"])
    assert "1 categorical" in model._run.preprocessing.describe()


def test_other_methods_and_settings_train(table, rows):
    settings = {"training.local_steps": 2, "data.validation": 0.2}
    model = PersonalizedClassifier(method="fedavg", rounds=2, settings=settings)
    model.fit(rows, table["outcome"], table["hospital"])
    p = model.predict_proba(rows, table["hospital"])  # all groups have the one shared model
    np.testing.assert_allclose(p, model.predict_proba(rows, ["east"] * len(rows)), atol=1e-3)


def test_mistakes_are_value_errors_of_one_line(classifier, rows, table):
    model = quick(PersonalizedClassifier)
    wrong = [
        (lambda: model.fit(rows, ["ill"] * len(rows)), "one class"),
        (lambda: model.fit(rows, ["a|b", "c"] * (len(rows) // 2)), r"without '\|'"),
        (lambda: model.fit(rows, [" a", "a"] * (len(rows) // 2)), "rename"),
        (lambda: model.fit(rows, table["outcome"], table["hospital"].head(3)), "inconsistent numbers of samples"),
        (lambda: model.fit(rows, table["outcome"], [None] * len(rows)), "is missing"),
        (lambda: model.fit(rows.head(0), table["outcome"].head(0)), "at least one"),
        (lambda: model.fit(pandas.concat([rows, rows], axis=1), table["outcome"]), "same name"),
        (lambda: clone(model).set_params(settings={"training.lokal_steps": 1}).fit(rows, table["outcome"]), "lokal"),
        (lambda: classifier.predict(rows[["age"]], table["hospital"]), "feature names"),
        (lambda: classifier.predict(rows.assign(age="old"), table["hospital"]), "must hold numbers"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "Traceback" not in str(caught.value)
    with pytest.raises(NotFittedError):
        PersonalizedRegressor().predict(rows)


def test_polars_frames_come_back_as_polars(table, rows, classifier):
    polars = pytest.importorskip("polars")
    theirs = polars.DataFrame({name: rows[name].to_list() for name in rows}, strict=False)
    sets = classifier.predict_set(theirs, table["hospital"])
    assert isinstance(sets, polars.DataFrame)
    assert (sets.to_numpy() == classifier.predict_set(rows, table["hospital"]).to_numpy()).all()


def test_without_scikit_learn_the_import_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pfedbayes.sklearn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install 'pfedbayes\[sklearn\]'"):
        import pfedbayes.sklearn  # noqa: F401
