"""Preprocessing is fitted from summaries alone, and is what it would be if all rows lay together."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedbayes.data import ClientSummary, Preprocessing, combine, summarise
from pfedbayes.data.own.columns import Schema
from pfedbayes.data.own.table_builder import table_of
from pfedbayes.errors import UserError


def table(where="table", **columns):
    return table_of(columns, where, Schema())


def fit(*tables, target="y", task=None):
    summaries = [summarise(f"client {i}", own, target, np.arange(len(own)), task) for i, own in enumerate(tables)]
    return combine(
        [ClientSummary.from_json(summary.to_json()) for summary in summaries], task
    )  # as if they had been sent


numbers = st.lists(
    st.one_of(st.none(), st.floats(-1e6, 1e6, allow_nan=False, allow_subnormal=False)), min_size=1, max_size=9
)


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=5))
def test_clients_together_are_standardised_as_one(parts):
    """The pooled mean and deviation by NumPy, from all rows at once."""
    tables = [table(a=np.array(part, dtype=float), y=(["u", "v"] * 5)[: len(part)]) for part in parts]
    tables.append(table(a=[0.0, 1.0], y=["u", "v"]))
    (column,) = fit(*tables).inputs
    pooled = np.concatenate([own.columns["a"] for own in tables])
    present = pooled[~np.isnan(pooled)]
    assert column.mean == pytest.approx(present.mean(), rel=1e-9, abs=1e-9)
    assert column.deviation == pytest.approx(present.std(), rel=1e-9)
    assert column.indicator == np.isnan(pooled).any()


def test_large_means_do_not_cost_precision():
    years = [1.7e9 + np.arange(50.0), 1.7e9 + 100 + np.arange(30.0)]
    (column,) = fit(*(table(a=own, y=["u", "v"] * (len(own) // 2)) for own in years)).inputs
    assert column.deviation == pytest.approx(np.concatenate(years).std(), rel=1e-12)


def test_what_becomes_of_numbers_and_categories():
    one = table(a=[1.0, 3.0, np.nan], c=["x", "y", None], y=[0, 1, 0])
    other = table(a=[2.0, 2.0], c=["z", "x"], y=[1, 1])
    fitted = fit(one, other)
    assert [column.width for column in fitted.inputs] == [2, 4]
    assert fitted.shape == (6,)
    deviation = np.std([1, 3, 2, 2])
    expected = [
        [-1 / deviation, 0, 1, 0, 0, 0],
        [1 / deviation, 0, 0, 1, 0, 0],
        [0, 1, 0, 0, 0, 1],  # what is missing: the mean with its indicator, and the last slot
    ]
    torch.testing.assert_close(fitted.encode(one), torch.tensor(expected, dtype=torch.float32))
    unseen = fitted.encode(table(a=[2.0], c=["never seen"], y=[0]))
    torch.testing.assert_close(unseen, torch.tensor([[0.0, 0, 0, 0, 0, 1]]))


def test_only_rows_to_train_on_count_but_all_labels():
    whole = table(a=[1.0, 3.0, 1000.0], y=["u", "v", "w"])
    fitted = combine([summarise("c", whole, "y", np.array([0, 1]))])
    assert fitted.inputs[0].mean == 2
    assert fitted.target.classes == ("u", "v", "w")
    regression = combine([summarise("c", table(a=[1.0, 2, 3], y=[1.5, 2.5, 1e6]), "y", np.array([0, 1]))])
    assert (regression.target.mean, regression.target.deviation) == (2.0, 0.5)


def test_a_constant_column_and_an_empty_one_do_no_harm():
    fitted = fit(table(a=[0.1] * 3, e=[np.nan] * 3, b=[1.0, 2, 3], y=["u", "v", "u"]))
    assert [column.name for column in fitted.inputs] == ["a", "b"]
    assert torch.allclose(fitted.encode(table(a=[0.1], e=[5.0], b=[2.0], y=["u"]).without("e")), torch.zeros(1))


@pytest.mark.parametrize(
    ("y", "task", "classes"),
    [
        (["no", "yes", "no"], "classification", ("no", "yes")),
        ([True, False, True], "classification", ("False", "True")),
        ([10, 9, 2], "classification", ("2", "9", "10")),
        ([0.0, 1.0, 1.0], "classification", ("0", "1")),
        ([0.5, 1.0, 1.5], "regression", None),
        (np.arange(30), "regression", None),
    ],
)
def test_the_task_is_inferred(y, task, classes):
    target = fit(table(a=np.arange(float(len(y))), y=y)).target
    assert (target.task, target.classes) == (task, classes)


def test_the_task_can_be_said():
    few = table(a=[1.0, 2, 3], y=[3, 5, 4])
    assert fit(few, task="regression").target.mean == 4
    assert fit(table(a=np.arange(30.0), y=np.arange(30)), task="classification").target.classes[:3] == ("0", "1", "2")
    with pytest.raises(UserError, match="holds text"):
        fit(table(a=[1.0, 2], y=["u", "v"]), task="regression")
    with pytest.raises(UserError, match="more than 1000"):
        fit(table(a=np.arange(2000.0), y=np.arange(2000.0)), task="classification")


@pytest.mark.parametrize("y", [np.arange(25), [0.5, 1.5, 1.5]])
def test_a_target_that_is_a_number_tells_no_values(y):
    whole = table(a=np.arange(float(len(y))), y=y)
    assert summarise("c", whole, "y", np.arange(len(y))).target.values is None
    few = table(a=[1.0, 2], y=[3, 4])
    assert summarise("c", few, "y", np.arange(2)).target.values == ("3", "4")
    assert summarise("c", few, "y", np.arange(2), "regression").target.values is None


def test_targets_are_encoded_and_keep_their_names():
    one, other = table(a=[1.0, 2], y=["b", "c"]), table(a=[1.0, 2], y=["c", "a"])
    target = fit(one, other).target
    assert target.classes == ("a", "b", "c")
    assert target.encode(other).tolist() == [2, 0]
    numbers = fit(table(a=[1.0, 2, 3], y=[10.5, 20.5, 30.5])).target
    encoded = numbers.encode(table(y=[20.5, 30.5]))
    assert encoded.shape == (2, 1)
    assert (encoded[:, 0] * numbers.deviation + numbers.mean).tolist() == pytest.approx([20.5, 30.5])


def test_a_client_of_one_class_is_no_trouble_but_a_federation_is():
    one, other = table(a=[1.0, 2], y=["b", "b"]), table(a=[1.0, 2], y=["a", "a"])
    assert fit(one, other).target.classes == ("a", "b")
    with pytest.raises(UserError, match="is 'b' in every row"):
        fit(one, one)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"a": [1.0], "y": [0]}, "client 0 has the column 'c' but client 1 has not"),
        ({"a": [1.0], "c": ["x"], "d": [1], "y": [0]}, "client 1 has the column 'd' but client 0 has not"),
        ({"a": ["old"], "c": ["x"], "y": [0]}, "'a' holds numbers for client 0 and text for client 1"),
    ],
)
def test_clients_that_differ_are_named(other, words):
    with pytest.raises(UserError) as caught:
        fit(table(a=[1.0, 2], c=["x", "y"], y=[0, 1]), table(**other))
    assert words in str(caught.value)


def test_too_many_categories_of_all_clients_together():
    parts = [table(c=[f"{i}-{k}" for k in range(60)], y=[0, 1] * 30) for i in range(2)]
    with pytest.raises(UserError, match=r"no column to predict from \(c has more than 100 categories"):
        fit(*parts)
    fitted = fit(*(dataclasses.replace(part, columns={"a": np.arange(60.0) % 7} | part.columns) for part in parts))
    assert [column.name for column in fitted.inputs] == ["a"]
    assert fitted.left_out[0].name == "c"


def test_the_order_of_columns_is_the_first_clients():
    one, other = table(a=[1.0, 2], b=[10.0, 20], y=[0, 1]), table(b=[30.0, 30], a=[3.0, 3], y=[0, 1])
    fitted = fit(one, other)
    assert [(column.name, column.mean) for column in fitted.inputs] == [("a", 2.25), ("b", 22.5)]
    assert torch.equal(fitted.encode(other), fitted.encode(table(a=[3.0, 3], b=[30.0, 30], y=[0, 1])))


@pytest.fixture
def fitted():
    return dataclasses.replace(fit(table(age=[1.0, 2, 3], sex=["m", "f", "m"], y=["u", "v", "u"])), others=("id",))


def test_it_reads_back(fitted):
    assert Preprocessing.from_json(fitted.to_json(), "here") == fitted
    for text in ("{", "{}", fitted.to_json().replace('"format": 1', '"format": 9')):
        with pytest.raises(UserError, match=r"^here"):
            Preprocessing.from_json(text, "here")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"age": [1.0]}, "lacks the column 'sex'"),
        ({"age": [1.0], "sex": ["m"], "height": [2]}, "has the column 'height'"),
        ({"age": ["old"], "sex": ["m"]}, "'age' holds text, but the models were trained with numbers"),
        ({"age": [1.0], "sex": [3]}, "'sex' holds numbers, but the models were trained with text"),
    ],
)
def test_a_table_that_does_not_fit_is_named(fitted, columns, words):
    with pytest.raises(UserError) as caught:
        fitted.encode(table("new.csv", **columns))
    assert str(caught.value).startswith("new.csv")
    assert words in str(caught.value)


def test_columns_without_any_value_fit_all_the_same(fitted):
    encoded = fitted.encode(table(age=[None, None], sex=[np.nan, np.nan]))
    assert encoded.tolist() == [[0, 0, 0, 1]] * 2
