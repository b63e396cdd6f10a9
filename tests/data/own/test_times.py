"""Times to an event in tables: what is read, what is refused, and the intervals of the hazard."""

import dataclasses
import json

import numpy as np
import pandas
import pytest
import torch

from pfedbayes.data import ClientSummary, DataConfig, Preprocessing, Shards, combine, load_shards, summarise
from pfedbayes.data.own.columns import Schema
from pfedbayes.data.own.intervals import MAX_INTERVALS
from pfedbayes.data.own.loading import load_client, shards_from_tables, summarise_client
from pfedbayes.data.own.new_rows import read_examples
from pfedbayes.data.own.table_builder import table_of
from pfedbayes.errors import UserError


def patients(size=60, seed=0, **columns):
    rng = np.random.default_rng(seed)
    table = {
        "age": rng.uniform(30, 80, size), "days": rng.exponential(500, size).round(), "died": rng.integers(0, 2, size),
        "region": np.resize(["n", "s", "w"], size),
    }  # fmt: skip
    return pandas.DataFrame(table | columns)


def load(folder, table, **settings):
    table.to_csv(folder / "patients.csv", index=False)
    given = {"target": "days", "event": "died", "client_column": "region"} | settings
    return load_shards(DataConfig(name="files", path=str(folder / "patients.csv"), **given))


def test_targets_are_times_and_events_and_the_event_is_no_input(tmp_path):
    table = patients()
    shards = load(tmp_path, table)
    assert [column.name for column in shards.preprocessing.inputs] == ["age"]
    target = shards.preprocessing.target
    assert (target.task, target.event, target.classes) == ("survival", "died", None)
    north = table[table["region"] == "n"]
    own = torch.cat([part[0] for part in (shards.train, shards.test)]).sort().values
    np.testing.assert_array_equal(shards.y[own], north[["days", "died"]].astype("float32"))
    assert shards.task_shape.num_targets == 1
    assert Preprocessing.from_json(shards.preprocessing.to_json(), "here") == shards.preprocessing
    assert "survival, with events in died" in shards.preprocessing.describe()


def test_rate_is_events_by_time_and_edges_are_quantiles_of_the_times_of_events(tmp_path):
    table = patients(3000)
    shards = load(tmp_path, table, test_fraction=0.0)
    target = shards.preprocessing.target
    assert target.rate == pytest.approx(table["died"].sum() / table["days"].sum())
    times = table.loc[table["died"] == 1, "days"]
    levels = np.arange(1, MAX_INTERVALS) / MAX_INTERVALS
    np.testing.assert_allclose(target.edges[:-1], np.quantile(times, levels), rtol=0.1)
    assert np.quantile(times, 0.9) < target.edges[-1] < times.max()


def test_clients_without_events_need_nothing_else(tmp_path):
    table = patients(300, died=0)
    table.loc[0, "died"] = 1
    shards = load(tmp_path, table, test_fraction=0.0)
    assert shards.preprocessing.target.edges == (3 * table.loc[0, "days"],)


def test_without_quantiles_edges_are_those_of_an_exponential_distribution(tmp_path):
    table = patients(300)
    edges = load(tmp_path, table, pieces=0, test_fraction=0.0).preprocessing.target.edges
    mean = table.loc[table["died"] == 1, "days"].mean()
    shares = 1 - np.exp(-np.array(edges) / mean)
    np.testing.assert_allclose(shares, [*np.arange(1, MAX_INTERVALS) / MAX_INTERVALS, 1 - np.exp(-3)])


@pytest.mark.parametrize(
    "values",
    [["1", "0"], ["1.0", "0.0"], ["True", "false"], ["yes", "NO"], [1, 0], [1.0, 0.0], [True, False], ["1", "no"]],
)
def test_events_can_be_written_in_several_ways(tmp_path, values):
    table = patients()
    plain = load(tmp_path, table)
    table["died"] = pandas.Series([values[1 - died] for died in table["died"]], dtype=object)
    assert torch.equal(load(tmp_path, table).y, plain.y)
    parts = {name: part.drop(columns="region") for name, part in table.groupby("region")}
    assert torch.equal(shards_from_tables(parts, "days", event="died").y, plain.y)


def test_splits_are_stratified_by_event(tmp_path):
    table = patients(100, region=["n"] * 50 + ["s"] * 50, died=[1] * 10 + [0] * 40 + [1] * 5 + [0] * 45)
    shards = load(tmp_path, table)
    assert [int(shards.y[rows, 1].sum()) for rows in shards.test] == [2, 1]
    assert shards.strata(shards.test[0]).tolist() == shards.y[shards.test[0], 1].tolist()


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("days", -1.0, r"patients.csv, line 7: 'days' is -1, but a time cannot be negative"),
        ("days", np.nan, r"patients.csv, line 7: the target 'days' is missing"),
        ("days", "soon", r"patients.csv, line 7: .*'soon'"),
        ("days", 1e29, r"patients.csv, line 7: 'days' is 1e\+29, more than 1e\+09 times the mean time"),
        ("died", "dead", r"patients.csv, line 7: 'died' is 'dead': write 1, true or yes where the event happened"),
        ("died", 2, r"patients.csv, line 7: 'died' is '2': write 1"),
        ("died", None, r"patients.csv, line 7: 'died' is missing: fill it in"),
    ],
)
def test_a_cell_that_cannot_be_is_one_clear_line(tmp_path, column, value, told):
    table = patients().astype({"died": object, "days": object})
    table.loc[5, column] = value
    split = {"split_column": "part"} if value == 1e29 else {}  # not in the training rows
    table["part"] = np.where(table.index == 5, "test", "train")
    with pytest.raises(UserError, match=told) as error:
        load(tmp_path, table, **split)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"event": "dies"}, r"has no column 'dies': did you mean 'died'\?"),
        ({"event": "days"}, "event is 'days', which is another column already"),
        ({"event": "region"}, "event is 'region', which is another column already"),
        ({"event": None, "task": "survival"}, "survival needs the column that says whether the event happened"),
        ({"task": "count"}, "the task survival, but task is count: leave one of them out"),
        ({"target": "age", "event": "days"}, "'days' is '.*': write 1, true or yes"),
    ],
)
def test_settings_that_do_not_fit_are_one_clear_line(tmp_path, settings, told):
    with pytest.raises((UserError, ValueError), match=told):
        load(tmp_path, patients(), **settings)


def test_a_table_without_events_or_without_time_is_refused(tmp_path):
    with pytest.raises(UserError, match="'died' says that no training row has an event"):
        load(tmp_path, patients(died=0))
    with pytest.raises(UserError, match="the times 'days' of all training rows are 0"):
        load(tmp_path, patients(days=0))


def test_time_zero_is_allowed(tmp_path):
    table = patients()
    table.loc[:9, "days"] = 0
    assert (load(tmp_path, table).y[:, 0] == 0).sum() == 10


def test_separate_clients_get_the_preprocessing_of_one_file(tmp_path):
    table = patients(200)
    whole = load(tmp_path, table)
    sent, names = [], sorted(set(table["region"]))
    configs = []
    for k, name in enumerate(names):
        table[table["region"] == name].drop(columns="region").to_csv(tmp_path / f"{name}.csv", index=False)
        configs.append(DataConfig(name="files", path=str(tmp_path / f"{name}.csv"), target="days", event="died"))
        sent.append(ClientSummary.from_json(summarise_client(configs[-1], k, name).to_json()))
    fitted = combine(sent)
    assert fitted == dataclasses.replace(whole.preprocessing, others=())
    shards = load_client(configs[0], 0, names[0], fitted)
    assert torch.equal(shards.y[shards.test[0]], whole.y[whole.test[0]])
    with pytest.raises(UserError, match="have different columns of events"):
        combine([sent[0], dataclasses.replace(sent[1], events=None)])


def summary(**columns):
    columns = {"age": np.arange(40.0), "days": np.arange(40.0), "died": np.tile([1.0, 0.0], 20)} | columns
    return summarise("north", table_of(columns, "north", Schema()), "days", np.arange(40), event="died")


def test_a_summary_has_the_times_of_events_only():
    sent = summary()
    assert (sent.events.name, sent.events.count, sent.events.missing) == ("died", 20, 20)
    assert sent.events.mean == pytest.approx(np.arange(0, 40, 2).mean())
    assert [column.name for column in sent.columns] == ["age"]
    assert sent.target.values is None
    assert sent.target.quantiles == ()
    assert 0 < min(sent.events.quantiles) <= max(sent.events.quantiles) < 38  # neither the first nor the last event


@pytest.mark.parametrize(
    ("place", "value"),
    [("mean", -1.0), ("count", 30), ("kind", "category"), ("quantiles", [-1.0, 2.0]), ("name", "age"), ("squares", -1)],
)
def test_a_summary_of_events_that_cannot_be_true_is_refused(place, value):
    content = json.loads(summary().to_json())
    content["events"][place] = value
    with pytest.raises(UserError, match=r"cannot be true|is damaged"):
        ClientSummary.from_json(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "value"),
    [("edges", ()), ("edges", (2.0, 1.0)), ("edges", (0.0, 1.0)), ("edges", (1.0, float("inf"))),
     ("edges", tuple(map(float, range(1, 100)))), ("event", None), ("rate", 0.0), ("task", "regression"),
     ("edges", (1.0, float("nan")))],
)  # fmt: skip
def test_a_damaged_target_is_refused(name, value):
    fitted = combine([summary()])
    with pytest.raises(ValueError, match=r"time|rate|survival|events"):
        dataclasses.replace(fitted, target=dataclasses.replace(fitted.target, **{name: value})).check()


def test_a_newcomer_brings_times_and_events(tmp_path):
    fitted = combine([summary()])
    table = patients(10)[["age", "days", "died"]]
    table.to_csv(tmp_path / "new.csv", index=False)
    _, y = read_examples(tmp_path / "new.csv", fitted)
    np.testing.assert_array_equal(y, table[["days", "died"]].astype("float32"))
    table.drop(columns="died").to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(UserError, match="lacks the target column 'died'"):
        read_examples(tmp_path / "new.csv", fitted)


def test_arrays_of_times_and_events_are_targets_of_two_numbers():
    y = np.stack([np.arange(1.0, 9.0), np.tile([0.0, 1.0], 4)], 1)
    shards = Shards.from_arrays([(np.random.default_rng(0).normal(size=(8, 3)), y)])
    np.testing.assert_array_equal(shards.y, y)
