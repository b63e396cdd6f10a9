"""The benchmark on real tables: its splits, scores and statistics, its records, and its page."""

import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import roc_auc_score

from benchmarks.silos import __main__ as bench
from benchmarks.silos import (
    activity,
    flamby,
    jobs,
    lines,
    newcomer_rivals,
    newcomers,
    ours,
    rates,
    records,
    rivals,
    statistics,
    survival,
    tables,
    text,
)
from benchmarks.silos.encoding import encode
from benchmarks.silos.jobs import Circumstances, Job
from benchmarks.silos.merging import merged
from benchmarks.silos.mixed import mixed_linear, mixed_logistic, random_effects
from benchmarks.silos.page import render
from benchmarks.silos.page_of_methods import methods_section
from benchmarks.silos.page_of_newcomers import by_size, clients_of, newcomers_section, over_clients
from benchmarks.silos.rivals import FREQUENCIES, LOCAL, find, predict, rivals_for
from benchmarks.silos.scores import (
    Labels,
    NotFitted,
    Numbers,
    auroc,
    calibration_error,
    gaussian_crps,
    number_scores,
    score,
)
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Classification, Regression
from pfedbayes.serving.newcomers import join


def clinics(rows=60, seed=0):
    """Three clinics with different intercepts, and an empty cell."""
    rng = np.random.default_rng(seed)
    clinic = np.arange(rows) % 3
    age, dose = rng.normal(50, 10, rows), rng.normal(size=rows)
    risk = dose + clinic - 1 + 0.5 * rng.normal(size=rows)
    frame = pd.DataFrame(
        {"age": age, "dose": dose, "sex": rng.choice(["m", "f"], rows), "clinic": np.array(["a", "b", "c"])[clinic],
         "cost": risk, "outcome": np.where(risk > 0, "ill", "well")}
    )  # fmt: skip
    frame.loc[3, "age"] = np.nan
    return frame


@pytest.fixture
def table(tmp_path):
    clinics().to_csv(tmp_path / "clinics.csv", index=False)
    return tables.Table("clinics", tmp_path / "clinics.csv", "outcome", "clinic", ("cost",))


@pytest.fixture
def split(table):
    return tables.split_table(table, 0)


@pytest.fixture
def numbers(table):
    return tables.split_table(dataclasses.replace(table, target="cost", ignore=("outcome",)), 0)


# Splits


def test_splits_are_disjoint_stratified_and_within_clients():
    clients = np.repeat(["a", "b", "c"], [100, 50, 7])
    labels = np.array(["no", "yes", "no", "no", "maybe"] * 40)[: len(clients)]
    parts = tables.assign(clients, labels, seed=3)
    for client, size in (("a", 100), ("b", 50)):
        own = clients == client
        counts = {part: int((own & (parts == part)).sum()) for part in np.unique(parts)}
        assert counts == {"train": 0.64 * size, "validation": 0.16 * size, "test": 0.2 * size}
        for label in np.unique(labels):
            share = (parts[own & (labels == label)] == "test").mean()
            assert abs(share - 0.2) < 0.05
    small = parts[clients == "c"]
    assert [(small == part).sum() for part in ("train", "validation", "test")] == [5, 1, 1]
    assert (parts != tables.assign(clients, labels, seed=4)).any()
    assert (parts == tables.assign(clients, labels, seed=3)).all()


def test_a_regression_splits_every_client_without_labels():
    parts = tables.assign(np.repeat(["a", "b"], [40, 1]), None, seed=0)
    assert [(parts[:40] == part).sum() for part in ("train", "validation", "test")] == [26, 6, 8]
    assert parts[40] == "train"


def test_the_digest_changes_with_rows_and_parts(split, table):
    assert split.digest == tables.split_table(table, 0).digest
    assert split.digest != tables.split_table(table, 1).digest
    clinics(seed=1).to_csv(table.path, index=False)
    assert split.digest != tables.split_table(table, 0).digest


def test_tables_are_described_in_toml_or_by_an_option(tmp_path, table):
    (tmp_path / "own.toml").write_text(
        '[tables.mine]\nfile = "clinics.csv"\ntarget = "cost"\nclient = "clinic"\n[reasons]\nmine = "It is noisy."\n'
    )
    found = tables.read_tables(tmp_path / "own.toml")["mine"]
    assert tables.task_of(found, tables.read_frame(found)) == "regression"
    assert tables.read_reasons(tmp_path / "own.toml") == {"mine": "It is noisy."}
    option = tables.parse_table(f"{table.path}:outcome:clinic")
    assert (option.name, option.path, option.target, option.client) == ("clinics", table.path, "outcome", "clinic")
    assert tables.task_of(option, tables.read_frame(option)) == "classification"
    assert len(tables.read_tables()) == 13
    for wrong in ("a.csv:b", "a.csv::c"):
        with pytest.raises(UserError, match="FILE:TARGET:CLIENT"):
            tables.parse_table(wrong)
    with pytest.raises(UserError, match="no column 'outcom'"):
        tables.read_frame(dataclasses.replace(table, target="outcom"))
    (tmp_path / "own.toml").write_text('[tables.mine]\nfile = "clinics.csv"\ntarget = "cost"\n')
    with pytest.raises(UserError, match="needs client"):
        tables.read_tables(tmp_path / "own.toml")


def test_lines_write_what_pandas_writes(tmp_path):
    frame = clinics(9)
    frame["note"] = ['a "b", c', "", "line\nbreak", *map(str, range(6))]
    whole = lines.Lines.read(frame.to_csv(index=False))
    kept = frame.iloc[[4, 0, 3]].assign(split=["x", "y", "z"]).drop(columns=["dose"])
    parts = ["y", "", "", "z", "x", *[""] * 4]
    whole.write(tmp_path / "some.csv", [4, 0, 3], {"split": parts}, without=("dose",))
    assert (tmp_path / "some.csv").read_text() == kept.to_csv(index=False)
    assert whole.text() == frame.to_csv(index=False)


def test_a_table_travels_as_text(table, tmp_path):
    text.write(tmp_path / "packed", table, range(2), range(1))
    (packed,) = text.tables(tmp_path / "packed").values()
    assert tables.task_of(packed, None) == "classification"
    for number in range(2):
        there, here = jobs.data_of(Job("tables", packed, number, "local")), tables.split_table(table, number)
        assert (there.digest, there.clients, there.task) == (here.digest, here.clients, here.task)
        assert (there.parts == here.parts).all()
        assert there.lines == here.lines
    there, here = jobs.data_of(Job("newcomers", packed, 0, "default")), newcomers.read(table, 0)
    assert (there.digest, there.groups, there.rows, there.num_clients) == (
        here.digest, here.groups, here.rows, here.num_clients
    )  # fmt: skip
    assert there.own.keys() == here.own.keys()
    assert all((a == b).all() for name in there.own for a, b in zip(there.own[name], here.own[name], strict=True))
    with pytest.raises(UserError, match="no split 2"):
        jobs.data_of(Job("tables", packed, 2, "local"))
    with pytest.raises(UserError, match="no file that ends in"):
        text.tables(tmp_path)


def test_methods_train_where_pandas_and_scikit_learn_are_missing(table, tmp_path):
    text.write(tmp_path / "packed", table, range(1), range(1))
    script = (
        "import sys\n"
        "for name in ('pandas', 'sklearn', 'statsmodels', 'lifelines', 'rich', 'typer', 'threadpoolctl'):\n"
        "    sys.modules[name] = None\n"
        "from benchmarks.silos import elsewhere, ours\n"
        "ours.choose = lambda *_: ['training.rounds=1', 'training.local_steps=1']\n"
        f"paths = [{str(tmp_path / 'packed')!r}, {str(tmp_path / 'records')!r}]\n"
        "elsewhere.main(['run', *paths, '--methods', 'default,fedavg', '--splits', '0'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = records.read_records(tmp_path / "records")
    assert {(one.protocol, one.method, one.split) for one in found} == {
        ("tables", "default", 0), ("tables", "fedavg", 0), ("newcomers", "default", 0)
    }  # fmt: skip
    assert all(one.scores and math.isfinite(one.scores.get("nll", 0)) for one in found)


def test_rates_are_chosen_by_rank_over_tables():
    def at(method, table, losses, **others):
        return [
            record(protocol="rates", method=rates.label(method, rate), table=table, scores={"nll": loss}, **others)
            for rate, loss in zip(rates.GRID, losses, strict=True)
        ]

    # 0.1 is best on two of three tables, and 0.3 fails on one.
    kept = [*at("ditto", "a", [4, 3, 2, 1]), *at("ditto", "b", [4, 3, 1, 2]), *at("ditto", "c", [4, 2, 1, 3])]
    kept[-1] = dataclasses.replace(kept[-1], scores=None, failed="it diverged")
    kept += at("ditto", "d", [2, 1, 1, 3], task="classification")  # a tie: the lower rate

    def choose(some):
        return rates.choose(records.collect(some)["rates"])

    assert choose(kept) == {"classification": {"ditto": 0.03}, "regression": {"ditto": 0.1}}
    assert choose(kept[:4]) == {"regression": {"ditto": 0.3}}
    assert choose(kept[:3]) == {}  # a table without all rates does not count
    assert rates.at("ditto", 0.1) == ["method.eta=0.1", "method.eta_personal=0.1"]
    assert rates.at("pfedbayes", None) == []


def test_rates_are_tried_on_validation_rows_only(table, tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "BUDGET", ("training.rounds=2", "training.local_steps=2", "training.evaluate_every=1"))
    read = []
    train = ours.train
    monkeypatch.setattr(
        ours, "train", lambda made, folder: read.append(pd.read_csv(made.data.path)[ours.PART]) or train(made, folder)
    )
    job = Job(rates.PROTOCOL, table, 0, rates.label("fedavg", 0.1))
    (done,) = jobs.finished([job], Circumstances(tmp_path / "records", "0.1", None, "a CPU", 1))
    assert set(read[0]) == {"train", "validation"}
    assert done.failed is None
    assert done.scores["nll"] > 0


def test_all_methods_have_the_budget_of_the_default_one():
    default = ours.experiment_for("y", "c", "regression", "default", Path("t.csv")).training
    for method in ours.METHODS[1:]:
        own = ours.experiment_for("y", "c", "regression", method, Path("t.csv")).training
        assert (own.rounds, own.local_steps) == (default.rounds, default.local_steps)
        assert own.patience >= own.rounds


def test_no_job_starts_after_the_time_is_up(table, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(jobs, "work", lambda job, _: started.append(job))
    planned = [Job("tables", table, split, "local") for split in range(3)]
    here = Circumstances(tmp_path, "0.1", None, "a CPU", 1)
    clock = iter([0.0, 1.0, 5.0, 11.0])
    monkeypatch.setattr(jobs.time, "monotonic", lambda: next(clock))
    assert len(list(jobs.finished(planned, here, seconds=10))) == len(started) == 2


# Encoding and rivals


def test_the_design_is_fitted_to_training_and_validation_rows(split):
    design = encode(split)
    assert design.x.shape == (60, 4)  # age with its indicator, dose, sex
    assert np.abs(design.x[design.train].mean(0)).max() < 1e-12
    assert design.x[design.train][:, 2].std() == pytest.approx(1)
    assert design.x_with_client.shape == (60, 7)
    assert (design.x_with_client[:, 4:].argmax(1) == np.arange(60) % 3).all()
    assert design.num_classes == 2


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_every_rival_beats_guessing(task, split, numbers):
    chosen = split if task == "classification" else numbers
    design = encode(chosen)
    y = design.y[design.train]
    guess = math.log(2) if task == "classification" else 0.5 * math.log(2 * math.pi * math.e) + math.log(design.unit)
    assert len(y) == 48
    for name, rival in rivals_for(task).items():
        pooled, by_client = score(predict(rival, design))
        assert pooled["nll"] < guess, name
        assert pooled.keys() == by_client.keys()


def test_a_client_of_one_class_predicts_its_smoothed_frequencies(split):
    frame = split.frame.copy()
    frame.loc[frame["clinic"] == "a", "outcome"] = "ill"
    one = tables.make_split("one", frame, "outcome", "clinic", "classification", split.parts)
    predicted = predict(LOCAL["classification"]["local logistic regression"], encode(one))
    assert isinstance(predicted, Labels)
    trained = ((frame["clinic"] == "a") & (split.parts != "test")).sum()
    assert predicted.probabilities[predicted.client == 0] == pytest.approx(
        np.array([[trained + 1, 1]] * 4) / (trained + 2)
    )


def test_the_frequencies_of_a_client_need_no_input(split):
    rival = find(FREQUENCIES, "classification")
    assert rival is not None
    assert FREQUENCIES not in rivals_for("classification")
    predicted = predict(rival, encode(split))
    own = (split.frame["clinic"] == "b").to_numpy() & ~split.test
    ill = ((split.frame["outcome"] == "ill").to_numpy() & own).sum()
    assert predicted.probabilities[predicted.client == 1][0] == pytest.approx(
        [(ill + 1) / (own.sum() + 2), 1 - (ill + 1) / (own.sum() + 2)]
    )
    assert find("nobody", "classification") is None


def test_random_effects_are_the_posterior_mean_of_a_gaussian_model():
    # One effect with variance 2, noise 1: precision 3 + 1/2 after three observations.
    mean, cov = random_effects(np.ones((3, 1)), np.array([1.0, 2.0, 3.0]), np.array([[2.0]]), 1.0)
    assert mean == pytest.approx([6 / 3.5])
    assert cov == pytest.approx(np.array([[1 / 3.5]]))


def test_mixed_models_recover_client_effects(numbers):
    design = encode(numbers)
    mean, variance = mixed_linear(design, slopes=False)
    pooled = design.x @ np.linalg.lstsq(design.x[design.train], design.y[design.train], rcond=None)[0]
    y = design.y[design.test]
    assert np.mean((y - mean) ** 2) < 0.5 * np.mean((y - pooled[design.test]) ** 2)
    assert (variance > 0).all()
    with pytest.raises(NotFitted, match="two classes"):
        mixed_logistic(dataclasses.replace(design, num_classes=3), slopes=False)


# Scores


def test_label_scores_by_hand():
    p = np.array([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8], [0.7, 0.3]])
    pooled, by_client = score(Labels(p, np.array([0, 1, 0, 1]), np.array(["a", "a", "b", "b"])))
    losses = [-math.log(value) for value in (0.9, 0.6, 0.2, 0.3)]
    assert pooled["nll"] == pytest.approx(np.mean(losses))
    assert pooled["accuracy"] == pooled["balanced_accuracy"] == 50
    assert pooled["auroc"] == pytest.approx(0.5)  # of the pairs (0.1, 0.6), (0.1, 0.3), (0.8, 0.6), (0.8, 0.3)
    assert pooled["ece"] == pytest.approx((0.1 + 0.4 + 0.8 + 0.7) / 4)
    assert by_client["nll"] == pytest.approx((np.mean(losses[:2]) + np.mean(losses[2:])) / 2)
    assert by_client["accuracy"] == 50
    one_class, _ = score(Labels(p, np.zeros(4, int), np.zeros(4)))
    assert "auroc" not in one_class


def test_equal_scores_count_half_in_the_auroc():
    rng = np.random.default_rng(0)
    values, positive = rng.integers(0, 5, 60).astype(float), rng.random(60) < 0.4
    assert auroc(values, positive) == pytest.approx(roc_auc_score(positive, values))


def test_confidences_of_a_bin_cancel():
    p = np.array([[0.72, 0.28], [0.78, 0.22]])
    assert calibration_error(p, np.array([0, 1])) == pytest.approx(0.25)


def test_number_scores_by_hand():
    found = number_scores(np.array([0.0, 2.0]), np.array([1.0, 2.0]), np.array([1.7, 2.0]))
    log_density = [-0.5 * 1.7**2 - 0.5 * math.log(2 * math.pi), -math.log(2) - 0.5 * math.log(2 * math.pi)]
    assert found["nll"] == pytest.approx(-np.mean(log_density))
    assert found["rmse"] == pytest.approx(1.7 / math.sqrt(2))
    assert found["coverage"] == 50
    own = number_scores(np.zeros(2), np.ones(2), np.ones(2), np.array([1.0, 3.0]))
    assert own["nll"] == 2


def test_the_closed_form_of_crps_is_its_integral():
    mean, deviation, y = 0.3, 1.7, -0.9
    grid = np.linspace(-20, 20, 400_001)
    cdf = 0.5 * (1 + np.vectorize(math.erf)((grid - mean) / deviation / math.sqrt(2)))
    integral = np.trapezoid((cdf - (grid >= y)) ** 2, grid)
    assert gaussian_crps(np.array([mean]), np.array([deviation]), np.array([y])) == pytest.approx([integral], abs=1e-4)


def test_outputs_of_clients_become_one_prediction():
    logits = torch.tensor([[[2.0, 0.0]], [[0.0, 0.0]]])  # two draws, one row
    labels = ours.collect([(Classification(), logits, torch.tensor([0]), 5)])
    assert isinstance(labels, Labels)
    assert labels.probabilities[0, 0] == pytest.approx((1 / (1 + math.exp(-2)) + 0.5) / 2)
    assert labels.client.tolist() == [5]
    likelihood = Regression(sigma_eps=0.5, unit=10.0)
    means = torch.tensor([[[1.0]], [[3.0]]])
    found = ours.collect([(likelihood, means, torch.tensor([[2.0]]), 0)])
    assert isinstance(found, Numbers)
    assert found.mean == pytest.approx([20])
    assert found.deviation == pytest.approx([10 * math.sqrt(1 + 0.25)])
    # Both draws are 1 off, so the mixture has the density of one of them, per unit of 10.
    assert found.nll == pytest.approx([0.5 * 4 + math.log(0.5) + 0.5 * math.log(2 * math.pi) + math.log(10)])


# Statistics


def test_the_corrected_interval_by_hand():
    # Mean 2, variance 1 with J = 3 and n_test/n_train = 1/4: standard error sqrt(1/3 + 1/4), t(2) = 4.302653.
    found = statistics.corrected_interval([1.0, 2.0, 3.0], 0.25)
    assert found.mean == 2
    assert found.high - 2 == pytest.approx(4.302653 * math.sqrt(7 / 12), rel=1e-6)
    assert 2 - found.low == pytest.approx(found.high - 2)
    assert found.word == "indistinguishable"
    assert statistics.corrected_interval([-1.0, -1.1], 0.0).word == "better"
    assert statistics.corrected_interval([1.0, 1.0, 1.0], 0.25).word == "worse"
    assert statistics.corrected_interval([1.0], 0.25).word == "not tested"


def test_pairs_are_splits_that_both_have():
    found = statistics.paired([1.0, None, 3.0], [0.5, 1.0, 1.5], 0.25)
    assert found is not None
    assert (found.mean, found.splits) == (1.0, 2)
    assert statistics.paired([None], [1.0], 0.25) is None


def test_equal_scores_share_their_rank():
    assert statistics.ranks({"a": 0.4, "b": 0.3001, "c": 0.2999, "d": 0.5}) == {"a": 3, "b": 1.5, "c": 1.5, "d": 4}


def test_the_verdict_counts_tables():
    def table(ours, rival, boosting):
        nll = {"default": ours, "forest": rival, "ridge": [9.0, 9.0], "boosting": boosting}
        return statistics.compare("t", nll, "default", ["ridge", "forest", "absent"], "boosting", 0.25)

    better = table([1.0, 1.01], [2.0, 2.02], [1.5, 1.5])
    close = table([1.0, 1.1], [1.05, 1.04], [1.2, 0.8])
    worse = table([1.0, 1.0], [0.9, 0.9], [0.9, 0.9])
    assert (better.rival, better.theirs) == ("forest", 2.01)
    assert (close.close, close.below, close.reaches_boosting, close.misses) == (True, False, False, True)
    found = statistics.verdict([better, close, worse])
    assert dataclasses.astuple(found) == (3, 2, 1, 1)
    assert statistics.compare("t", {"default": [1.0]}, "default", ["forest"], "boosting", 0.25) is None


# FLamby's protocols


def test_heart_is_split_and_standardised_by_hospital(tmp_path):
    frame = clinics(90).rename(columns={"clinic": "hospital"}).drop(columns="cost")
    frame[["slope", "ca", "thal"]] = np.nan
    frame["age"] += 100 * (frame["hospital"] == "b")
    frame.to_csv(tmp_path / "heart.csv", index=False)
    own = tables.Table("heart", tmp_path / "heart.csv", "outcome", "hospital")
    found = flamby.split_heart(own, 0)
    assert list(found.frame) == ["age", "dose", "sex", "hospital", "outcome"]
    assert len(found.frame) == 89  # without the row that misses an age
    for hospital in "abc":
        rows = (found.frame["hospital"] == hospital).to_numpy()
        train = rows & ~found.test
        assert train.sum() == int(0.66 * rows.sum())
        assert found.frame.loc[train, "age"].mean() == pytest.approx(0, abs=1e-12)
        assert found.frame.loc[train, "age"].std(ddof=0) == pytest.approx(1)
        share = [(found.frame.loc[some, "outcome"] == "ill").mean() for some in (train, rows)]
        assert abs(share[0] - share[1]) < 0.04


def patients(n=120):
    rng = np.random.default_rng(0)
    grade = rng.normal(size=n)
    days = rng.exponential(np.exp(-grade)) * 100
    return pd.DataFrame(
        {"pid": np.arange(n), "grade": grade, "age": rng.normal(size=n), "constant": 1, "event": rng.random(n) < 0.7,
         "days": days, "region": np.array(["N", "S", "W"])[np.arange(n) % 3],
         "flamby_fold": np.where(np.arange(n) % 4 == 0, "test", "train")}
    ).astype({"event": float})  # fmt: skip


def test_the_c_index_agrees_with_lifelines():
    from lifelines.utils import concordance_index

    rng = np.random.default_rng(0)
    risk, days, event = rng.integers(0, 4, 40).astype(float), rng.exponential(9, 40), rng.random(40) < 0.6
    comparable, concordant = survival.pairs(risk, days, event)
    assert (comparable * concordant).sum() / comparable.sum() == pytest.approx(concordance_index(days, -risk, event))
    region = np.arange(40) % 2
    within = survival.with_interval(risk, days, event, region, same_client=True)
    same = comparable & (region[:, None] == region)
    assert within["c_index"] == pytest.approx(100 * (same * concordant).sum() / same.sum())
    assert within["low"] < within["c_index"] < within["high"]


def test_equal_times_are_comparable_with_who_was_censored_then():
    comparable, concordant = survival.pairs(np.array([1.0, 1.0, 0.0]), np.ones(3), np.array([True, True, False]))
    assert comparable.tolist() == [[False, False, True], [False, False, True], [False] * 3]
    assert concordant[0].tolist() == [0.5, 0.5, 1]


def test_cox_models_and_ours_rank_patients(tmp_path):
    patients().to_csv(tmp_path / "brca.csv", index=False)
    data = survival.read(tmp_path / "brca.csv")
    assert (data.rows, data.num_clients) == ((90, 0, 30), 3)
    for method in survival.methods(data):
        found, within, _ = survival.measure(data, method, tmp_path)
        assert found["c_index"] > 60, method
        assert found["low"] < found["c_index"] < found["high"]
        assert within.keys() <= found.keys()


# Activities


def test_windows_are_split_by_person_or_leave_people_out():
    person = np.repeat([f"p{k:02}" for k in range(30)], 50)
    parts = activity.assign(person, activity.RANDOM, 0)
    assert [(parts == part).sum() for part in ("train", "validation", "test")] == [960, 240, 300]
    left = [set(person[activity.assign(person, activity.LEFT_OUT, fold) == ""]) for fold in range(5)]
    assert [len(people) for people in left] == [6] * 5
    assert set.union(*left) == set(person)
    assert not (activity.assign(person, activity.LEFT_OUT, 0) == "test").any()


def test_the_cnn_maps_windows_to_classes():
    assert activity.network((9, 128), 6)(torch.zeros(2, 9, 128)).shape == (2, 6)


# Records, jobs, and the page


def record(**others):
    blank = records.Record(
        protocol="tables", table="clinics", split=0, method="local ridge", task="regression", digest="d",
        rows=(30, 10, 10), clients=3, scores={"nll": 1.0}, by_client={"nll": 1.1}, seconds=2.0, failed=None,
        settings=None, resolved=None, version="0.1", commit="abc", machine="a CPU", workers=1, date="2026-01-01T00:00",
    )  # fmt: skip
    return dataclasses.replace(blank, **others)


def test_records_survive_and_are_collected_by_split(tmp_path):
    kept = [record(), record(split=1, scores={"nll": 3.0}), record(split=2, scores=None, by_client=None, failed="no")]
    for one in kept:
        records.write_record(tmp_path, one)
    assert records.read_records(tmp_path) == kept
    table = records.collect(kept)["tables"]["clinics"]
    assert table["splits"] == [0, 1, 2]
    method = table["methods"]["local ridge"]
    assert method["nll"] == [1.0, 3.0, None]
    assert method["by_client"]["nll"] == [1.1, 1.1, None]
    assert method["failed"] == ["no"]


def test_results_of_two_machines_become_one():
    old = records.collect([record(), record(split=1, scores={"nll": 3.0}), record(method="pooled ridge")])
    newer = record(
        method="default", split=1, digest="new", scores={"nll": 7.0}, machine="another CPU", date="2026-02-02",
        per_client={"a": {"nll": 7.0}}, resolved="local",
    )  # fmt: skip
    again = record(scores={"nll": 5.0}, per_client=None, date="2026-02-01")
    failed = record(method="pooled ridge", split=2, scores=None, by_client=None, failed="no")
    both = merged(old, records.collect([newer, again, failed]))
    table = both["tables"]["clinics"]
    assert (table["splits"], table["digests"]) == ([0, 1, 2], ["d", "new", "d"])
    assert table["machines"] == ["a CPU", "another CPU"]
    assert table["dates"] == ["2026-01-01T00:00", "2026-02-02"]
    methods = table["methods"]
    assert methods["local ridge"]["nll"] == [5.0, None, None]  # that of split 1 is on other rows
    assert methods["default"]["nll"] == [None, 7.0, None]
    assert methods["default"]["per_client"] == [None, {"a": {"nll": 7.0}}, None]
    assert methods["default"]["resolved"] == ["local"]
    assert methods["pooled ridge"]["nll"] == [1.0, None, None]
    assert methods["pooled ridge"]["by_client"] == {"nll": [1.1, None, None]}
    assert methods["pooled ridge"]["failed"] == ["no"]
    assert merged({}, old) == old == merged(old, {})
    assert merged(old, old) == old


def test_scores_of_other_rows_are_left_out():
    newer = record(method="pooled ridge", digest="new", date="2026-02-01T00:00")
    methods = records.collect([record(), newer])["tables"]["clinics"]["methods"]
    assert "nll" not in methods["local ridge"]
    assert methods["pooled ridge"]["nll"] == [1.0]


def test_a_failing_method_leaves_its_reason_and_is_not_repeated(table, tmp_path, monkeypatch):
    def fail(*_):
        raise NotFitted("it did not converge")

    monkeypatch.setattr(rivals, "predict", fail)
    job = Job("tables", table, 0, "mixed slopes")
    here = Circumstances(tmp_path / "records", "0.1", None, "a CPU", 1)
    (done,) = jobs.finished([job], here)
    assert (done.failed, done.scores) == ("it did not converge", None)
    assert jobs.unfinished([job], here.records, retry=False) == []
    assert jobs.unfinished([job], here.records, retry=True) == [job]
    clinics(seed=1).to_csv(table.path, index=False)
    assert jobs.unfinished([job], here.records, retry=False) == [job]


def test_a_method_with_other_defaults_is_measured_again(table, tmp_path, monkeypatch):
    job = Job("tables", table, 0, "fedavg")
    digest = tables.split_table(table, 0).digest
    records.write_record(
        tmp_path, record(method="fedavg", digest=digest, settings=ours.settings_digest("fedavg", "classification"))
    )  # fmt: skip
    assert jobs.unfinished([job], tmp_path, retry=False) == []
    monkeypatch.setattr(ours, "settings_digest", lambda *_: "others")
    assert jobs.unfinished([job], tmp_path, retry=False) == [job]


def test_a_rival_has_a_time_limit():
    def wait():
        with jobs.at_most(0.01):
            time.sleep(10)

    with pytest.raises(TimeoutError, match="not done"):
        wait()


@pytest.mark.parametrize("target", ["outcome", "cost"])
def test_a_tiny_benchmark_from_table_to_page(table, target, tmp_path, capsys, monkeypatch):
    quick = ["training.rounds=2", "training.local_steps=2", "training.evaluate_every=2"]
    monkeypatch.setattr(ours, "choose", lambda *_: quick)
    other = {"outcome": "cost", "cost": "outcome"}[target]
    (tmp_path / "own.toml").write_text(
        f'[tables.clinics]\nfile = "clinics.csv"\ntarget = "{target}"\nclient = "clinic"\nignore = ["{other}"]\n'
    )
    methods = "default,local random forest,pooled boosting"
    arguments = [
        "--tables-file", str(tmp_path / "own.toml"), "--splits", "1", "--methods", methods,
        "--records", str(tmp_path / "records"), "--out", str(tmp_path / "silos.json"),
    ]  # fmt: skip
    bench.main(arguments)
    assert "0 of 3 jobs are done" in capsys.readouterr().err
    results = json.loads((tmp_path / "silos.json").read_text())
    found = results["tables"]["clinics"]["methods"]
    assert found.keys() == {"default", "local random forest", "pooled boosting"}
    assert all(len(scores["nll"]) == 1 and math.isfinite(scores["nll"][0]) for scores in found.values())
    assert len(found["default"]["resolved"]) == 1
    page = (tmp_path / "silos.md").read_text()
    assert "| clinics | 3 | 60 |" in page
    bench.main(arguments)
    assert "3 of 3 jobs are done" in capsys.readouterr().err
    assert (tmp_path / "silos.md").read_text() == page
    bench.main(["--render", "--out", str(tmp_path / "silos.json")])
    assert (tmp_path / "silos.md").read_text() == page


def test_a_split_without_early_stopping_trains_on_validation_rows(split, tmp_path, monkeypatch):
    written = {}

    def train(experiment, folder):
        frame = pd.read_csv(experiment.data.path)
        written[experiment.training.patience] = sorted(frame[ours.PART].unique())
        raise InterruptedError

    monkeypatch.setattr(ours, "train", train)
    experiment = ours.experiment_for("outcome", "clinic", "classification", "fedavg", tmp_path / "table.csv")
    for patience in (5, None):
        training = dataclasses.replace(experiment.training, patience=patience)
        changed = dataclasses.replace(experiment, training=training)
        monkeypatch.setattr(ours, "experiment_for", lambda *_, changed=changed: changed)
        with pytest.raises(InterruptedError):
            ours.fit(split, "fedavg", tmp_path)
    assert written == {5: ["test", "train", "validation"], None: ["test", "train"]}


def test_protocols_are_planned_with_their_methods(tmp_path):
    (tmp_path / "silos").mkdir()
    patients().to_csv(tmp_path / "silos" / "tcga_brca.csv", index=False)

    def plan(*options):
        return bench.plan(bench.arguments([str(tmp_path), *options]))

    heart = plan("--protocols", "heart", "--methods", f"fedavg,{FREQUENCIES},pooled boosting")
    assert [job.method for job in heart] == ["fedavg", FREQUENCIES] * 5
    assert [job.split for job in heart[::2]] == [0, 1, 2, 3, 4]
    assert [job.method for job in plan("--protocols", "survival")] == survival.methods(
        survival.read(tmp_path / "silos" / "tcga_brca.csv")
    )
    people = plan("--protocols", "activity")
    assert [(job.table.name, job.split) for job in people] == [
        (activity.RANDOM, 0), *((activity.LEFT_OUT, fold) for fold in range(5))
    ]  # fmt: skip
    assert bench.arguments(["--quick"]).out != bench.PAGE


# Newcomers


def many_clinics(path, sizes):
    """Clinics of these sizes, with one input."""
    rng = np.random.default_rng(0)
    clinic = np.repeat([f"c{k:02}" for k in range(len(sizes))], sizes)
    dose = rng.normal(size=len(clinic))
    outcome = np.where(dose + rng.logistic(0, 0.5, len(clinic)) > 0, "ill", "well")
    pd.DataFrame({"dose": dose, "clinic": clinic, "outcome": outcome}).to_csv(path, index=False)
    return tables.Table("many", path, "outcome", "clinic")


def test_newcomers_are_drawn_with_the_seed_and_left_out_a_tenth_at_a_time(tmp_path):
    table = many_clinics(tmp_path / "many.csv", [7, 8, 200, *[30] * 22])
    drawn = newcomers.read(table, 0)
    names = [name for group in drawn.groups for name in group]
    assert (len(names), len(set(names)), {len(group) for group in drawn.groups}) == (10, 10, {2})
    assert drawn.digest == newcomers.read(table, 0).digest != newcomers.read(table, 1).digest
    assert drawn.num_clients == 25
    client = drawn.frame["clinic"].to_numpy()
    for name, (brought, tested) in drawn.own.items():
        assert sorted([*brought, *tested]) == np.flatnonzero(client == name).tolist()
    assert drawn.rows == (875 - drawn.rows[2], 0, sum(len(tested) for _, tested in drawn.own.values()))
    small = many_clinics(tmp_path / "small.csv", [7, 8, 200])
    found = newcomers.read(small, 0)
    # Who cannot bring five rows is no newcomer; nobody brings more than a hundred.
    assert {name: tuple(map(len, rows)) for name, rows in found.own.items()} == {"c01": (5, 3), "c02": (100, 100)}
    assert sorted(found.groups) == [("c01",), ("c02",)]


def test_newcomers_and_their_rivals_see_the_rows_that_they_bring(tmp_path, monkeypatch):
    data = newcomers.read(many_clinics(tmp_path / "many.csv", [40] * 4), 0)
    group = data.groups[0]
    (name,) = group
    brought, tested = data.own[name]
    seen = []

    def keep(design, make, x, train, test):
        seen.append((np.flatnonzero(train).tolist(), np.flatnonzero(test).tolist()))
        return np.full((int(test.sum()), 2), 0.5)

    def train(experiment, folder):
        seen.append(sorted(pd.read_csv(experiment.data.path)["clinic"].unique()))
        assert (experiment.evaluation.folds, experiment.evaluation.alone) == (0, False)

    monkeypatch.setattr(newcomer_rivals, "class_probabilities", keep)
    monkeypatch.setattr(newcomers, "train", train)
    newcomer_rivals.predict(data, name, encode(newcomer_rivals.without(data, group)))
    assert seen == [(sorted(brought[:size].tolist()), sorted(tested.tolist())) for size in (5, 20)]
    seen.clear()
    newcomers.federation(data, group, tmp_path)
    assert seen == [[other for other in ("c00", "c01", "c02", "c03") if other != name]]
    assert (newcomer_rivals.without(data, group).test == np.isin(np.arange(160), tested)).all()


def test_newcomers_get_the_models_of_pfedbayes_personalize(table, tmp_path, monkeypatch):
    quick = ["training.rounds=2", "training.local_steps=2"]
    monkeypatch.setattr(ours, "choose", lambda *_: quick)
    table = many_clinics(tmp_path / "many.csv", [40] * 4)
    data = newcomers.read(table, 0)
    group = data.groups[0]
    run = newcomers.federation(data, group, tmp_path)
    found = newcomers._ours(data, group[0], run, tmp_path)
    brought, tested = data.own[group[0]]
    assert found.keys() == {("shared", 0), ("joined", 5), ("joined", 20), ("alone", 5), ("alone", 20)}
    data.lines.write(tmp_path / "brought.csv", brought[:20].tolist(), without=("clinic",))
    inputs = data.frame.iloc[tested].drop(columns=["clinic", "outcome"])
    for model in ("joined", "alone"):
        client = join(run, tmp_path / "brought.csv", folds=0, certify=False, device="cpu", model=model).client
        p = client.predict(inputs)
        expected = np.stack([p["p_ill"], p["p_well"]], 1)
        assert found[model, 20].probabilities == pytest.approx(expected, abs=0.02)
        assert np.abs(found[model, 5].probabilities - expected).max() > 1e-4


@pytest.mark.parametrize("target", ["outcome", "cost"])
def test_newcomers_from_table_to_page(table, target, tmp_path, capsys, monkeypatch):
    quick = ["training.rounds=2", "training.local_steps=2", "training.evaluate_every=2"]
    monkeypatch.setattr(ours, "choose", lambda *_: quick)
    other = {"outcome": "cost", "cost": "outcome"}[target]
    (tmp_path / "own.toml").write_text(
        f'[tables.clinics]\nfile = "clinics.csv"\ntarget = "{target}"\nclient = "clinic"\nignore = ["{other}"]\n'
    )
    arguments = [
        "--tables-file", str(tmp_path / "own.toml"), "--protocols", "newcomers", "--splits", "1",
        "--records", str(tmp_path / "records"), "--out", str(tmp_path / "silos.json"),
    ]  # fmt: skip
    bench.main(arguments)
    assert "0 of 2 jobs are done" in capsys.readouterr().err
    table = json.loads((tmp_path / "silos.json").read_text())["newcomers"]["clinics"]
    found = table["methods"]["default"]
    (people,) = found["per_client"]
    assert people.keys() == {"a", "b", "c"}
    keys = {f"{model} {0 if model == 'shared' else 5} nll" for model in newcomers.MODELS}
    for scores in clients_of(table).values():
        assert keys <= scores.keys()
        assert all(map(math.isfinite, scores.values()))
        assert not any(" 20 " in name for name in scores)  # nobody has so many rows
    assert found["joined 5 nll"] == [pytest.approx(np.mean([one["joined 5 nll"] for one in people.values()]), abs=1e-4)]
    page = (tmp_path / "silos.md").read_text()
    assert "| clinics | 5 | 3 |" in page
    assert ("| Accuracy, % | rows brought |" in page) == (target == "outcome")
    assert ("| RMSE | rows brought |" in page) == (target == "cost")
    bench.main(arguments)
    assert "2 of 2 jobs are done" in capsys.readouterr().err
    monkeypatch.setattr(ours, "settings_digest", lambda *_: "others")
    job = bench.plan(bench.arguments(arguments))[0]
    assert jobs.unfinished([job], tmp_path / "records", retry=False) == [job]


def test_the_page_compares_newcomers_client_by_client():
    def split(shift):
        """Three clients, of which only two have 20 rows; the joined model is best with 5 rows."""
        people = {}
        for k, name in enumerate("abc"):
            people[name] = {"shared 0 nll": 1.0 + k + shift, "joined 5 nll": 0.5 + k + shift + 0.01 * k,
                            "alone 5 nll": 2.0 + k + shift, "rival 5 nll": 0.4 + k * (k - 1) + shift}  # fmt: skip
            if name != "c":
                people[name] |= {"joined 20 nll": 2.0 + 2 * k, "alone 20 nll": 1.0, "rival 20 nll": 1.0}
        return people

    kept = [
        record(protocol="newcomers", split=k, method="default", per_client=split(shift), scores={"nll": 1.0})
        for k, shift in enumerate((-0.25, 0.25))
    ]
    results = json.loads(json.dumps(records.collect(kept)))["newcomers"]
    clients = clients_of(results["clinics"])
    assert clients["b"]["shared 0 nll"] == pytest.approx(2.0)  # the mean of both draws
    assert by_size(clients, 5, "nll")["joined"] == pytest.approx([0.5, 1.51, 2.52])
    assert [len(by_size(clients, size, "nll")["joined"]) for size in newcomers.SIZES] == [3, 2, 0]
    difference = over_clients([0.5, 1.51, 2.52], [1.0, 2.0, 3.0])
    assert difference.mean == pytest.approx(-0.49)
    reach = 4.302652729911275 * np.std([-0.5, -0.49, -0.48], ddof=1) / 3**0.5
    assert (difference.low, difference.high) == pytest.approx((-0.49 - reach, -0.49 + reach))
    page = "\n".join(newcomers_section(results))
    assert (
        "With **5 rows**, of 1 tables, the joined model has a lower NLL than the shared model on 1 (interval below 0 "
        "on 1, above 0 on 0); the same method alone on 1 (interval below 0 on 1, above 0 on 0); logistic regression or "
        "ridge alone on 0 (interval below 0 on 0, above 0 on 0)."
    ) in page
    assert "| clinics | 5 | 3 | 2.000 | 1.510 | 3.000 | 1.067 | −0.490 [−0.515, −0.465] | better |" in page
    assert "| clinics | 20 | 2 | 1.500 | 3.000 |" in page
    assert "| clinics | 100 |" not in page
    assert newcomers_section(records.collect([record(protocol="newcomers", method="default")])["newcomers"]) == []


def test_the_page_shows_the_gain_over_people():
    def fold(number, gains):
        people = {
            f"{number}{k}": {"accuracy": 90.0 + gain, "shared_accuracy": 90.0, "alone_accuracy": 70.0}
            for k, gain in enumerate(gains)
        }
        return record(protocol="activity", table=activity.LEFT_OUT, method="pfedbayes", split=number,
                      scores={"accuracy": 92.0}, per_client=people)  # fmt: skip

    page = render(records.collect([fold(0, [1, 3]), fold(1, [2])]), {})
    assert "| left-out people | 2 | 3 | 92.0 ± 1.0 | 90.0 ± 0.0 | +2.0 (−0.5 to +4.5) | 70.0 ± 0.0 |" in page


def test_mistakes_on_the_command_line_are_named(table, tmp_path):
    option = ["--table", f"{table.path}:outcome:clinic", "--records", str(tmp_path / "r"), "--out", str(tmp_path / "o")]
    for arguments, message in (
        ([], "there are no tables"),
        ([*option, "--methods", "fedavgg"], "no method 'fedavgg'"),
        ([*option, "--tables", "clinic"], "no table 'clinic'"),
        ([*option, "--protocols", "hart"], "no protocol 'hart'"),
        ([*option, "--protocols", "heart"], "the protocols heart, survival, activity need DATA_DIR"),
        ([*option, "--workers", "0"], "--workers is 0"),
    ):
        with pytest.raises(UserError, match=message):
            bench.main(arguments)


def test_the_page_counts_ranks_and_names_reasons():
    def one(method, nll, **others):
        return [record(method=method, split=k, scores={"nll": value}, **others) for k, value in enumerate(nll)]

    kept = [
        *one("default", [1.2, 1.3], resolved="pfedbayes"), *one("local ridge", [1.0, 1.1]),
        *one("local random forest", [1.5, 1.5]), *one("pooled boosting", [1.4, 1.4]),
        *one("mixed slopes", [1.0, 1.1], failed=None),
    ]  # fmt: skip
    kept[-1] = dataclasses.replace(kept[-1], scores=None, by_client=None, failed="it did not converge")
    page = render(records.collect(kept), {"clinics": "Its columns are random."})
    assert "on **0 of 1** tables. On **0** " in page
    assert "On **1** the mean NLL is at or below" in page
    assert "| clinics | 3 | 50 | 1.250 | 1.050 (ridge) | +0.200 [" in page
    assert "- clinics, behind the best local rival (+0.200): Its columns are random." in page
    assert "| local ridge | 1.050 | 2.0 |" in page
    assert "| mixed slopes | **1.000** | 1.0 |" in page
    assert "- clinics, mixed slopes, 1 of 2 splits: it did not converge" in page
    assert "**default: pFedBayes**" in page


def test_the_page_compares_the_methods_of_the_package():
    def one(method, nll, table="clinics"):
        return [record(method=method, table=table, split=k, scores={"nll": value}) for k, value in enumerate(nll)]

    kept = [
        *one("default", [1.0, 1.1]), *one("fedavg", [2.0, 2.1]), *one("ditto", [0.9, 1.3]),
        *one("default", [1.0, 1.1], "wards"), *one("fedavg", [0.5, 0.6], "wards"),
    ]  # fmt: skip
    tables_of = records.collect(kept)["tables"]
    page = "\n".join(methods_section(tables_of))
    assert "| FedAvg | 1 | 0 | 1 | 3.0 |" in page  # only clinics has all methods
    assert "| Ditto | 0 | 1 | 0 | 2.0 |" in page
    assert "that of the default one is 1.0" in page
    assert "| wards | **+0.500 [+0.500, +0.500]** |  |" in page
    assert "| clinics | **−1.000 [−1.000, −1.000]** | −0.050 [" in page
    assert methods_section(records.collect(one("default", [1.0]))["tables"]) == []


def test_the_page_of_the_repository_is_made_from_its_results():
    assert bench.PAGE.with_suffix(".md").read_text() == render(
        json.loads(bench.PAGE.read_text()), tables.read_reasons()
    )  # fmt: skip
