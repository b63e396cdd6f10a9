"""Piecewise-linear inputs of columns of numbers: fitted to quantiles of the clients, centred on the training rows."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedbayes.data import (
    ClientSummary,
    DataConfig,
    Preprocessing,
    combine,
    load_client,
    shards_from_tables,
    summarise,
    summarise_client,
)
from pfedbayes.data.own.columns import Schema
from pfedbayes.data.own.inputs import Input
from pfedbayes.data.own.summaries import interior_quantiles
from pfedbayes.data.own.table_builder import table_of
from pfedbayes.data.own.target import Target
from pfedbayes.errors import UserError
from pfedbayes.runs.calibration import CalibrationRecord
from pfedbayes.runs.sections import NetConfig


def table(a, **columns):
    return table_of({"a": np.asarray(a, dtype=float), "y": np.arange(len(a)) % 2, **columns}, "table", Schema())


def summary(name, a, **columns):
    own = table(a, **columns)
    sent = summarise(name, own, "y", np.arange(len(own)), "regression")
    return ClientSummary.from_json(sent.to_json())


def fit(*parts, **settings):
    return combine([summary(f"client {k}", a) for k, a in enumerate(parts)], "regression", **settings)


def column(*parts, **settings):
    return fit(*parts, **settings).inputs[0]


class TestQuantiles:
    """What a client sends."""

    @pytest.mark.parametrize(
        ("count", "ranks"),
        [(0, []), (1, []), (7, []), (8, [1, 5]), (9, [2, 6]), (12, [1, 5, 9]), (132, [*range(1, 132, 4)])],
    )
    def test_ranks_are_the_middles_of_equal_parts(self, count, ranks):
        numbers = np.random.default_rng(0).permutation(count).astype(float)
        assert interior_quantiles(numbers) == tuple(map(float, ranks))

    @given(st.integers(8, 400))
    def test_the_extreme_rows_stay_with_the_client(self, count):
        quantiles = interior_quantiles(np.arange(float(count)))
        assert len(quantiles) == min(count // 4, 33)
        assert quantiles[0] > 0
        assert quantiles[-1] < count - 1
        assert min(np.diff(quantiles)) >= 4

    def test_only_inputs_that_hold_numbers_have_some_and_only_if_asked(self):
        own = table_of({"a": np.arange(20.0), "c": ["u", "v"] * 10, "y": np.arange(20.0)}, "table", Schema())
        sent = summarise("c", own, "y", np.arange(20))
        assert [len(each.quantiles) for each in (*sent.columns, sent.target)] == [5, 0, 0]
        sent = summarise("c", own, "y", np.arange(20), quantiles=False)
        assert [len(each.quantiles) for each in (*sent.columns, sent.target)] == [0, 0, 0]

    def test_only_training_rows_that_are_not_missing_count(self):
        own = table([*range(16), np.nan, np.nan, 1000.0])
        sent = summarise("c", own, "y", np.arange(18), "regression")
        assert sent.columns[0].quantiles == interior_quantiles(np.arange(16.0))


class TestEdges:
    """The bins."""

    def test_uniform_numbers_of_one_client(self):
        fitted = column((np.arange(33_000) + 0.5) / 33_000)
        assert fitted.edges == pytest.approx([1 / 66, 1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 65 / 66], abs=1e-4)
        # Of a ramp from a to b the mean is 1 - (a + b) / 2.
        expected = [1 - (a + b) / 2 for a, b in itertools.pairwise(fitted.edges)]
        assert fitted.centres == pytest.approx(expected, abs=2e-3)

    def test_disjoint_clients_weigh_by_their_rows(self):
        """Three quarters of the rows lie in [0, 1], one quarter in [10, 11]."""
        low, high = np.linspace(0, 1, 3000), np.linspace(10, 11, 1000)
        fitted = column(low, high, pieces=4)
        assert fitted.edges[:3] == pytest.approx([1 / 66, 1 / 3, 2 / 3], abs=0.02)
        a, b = fitted.edges[3:]
        assert 1 < a < 10  # no row lies there
        assert b == pytest.approx(10 + 65 / 66, abs=0.02)
        assert fitted.centres[-1] == pytest.approx((10.5 - a) / (b - a) / 4, abs=0.001)

    @settings(deadline=None, max_examples=40)
    @given(st.lists(st.integers(8, 300), min_size=1, max_size=5), st.integers(2, 12), st.integers(0, 10**6))
    def test_the_fit_to_summaries_is_the_fit_to_all_rows(self, sizes, bins, seed):
        """Edges lie at the levels of the pooled rows, and centres are their means, as exactly as quantiles allow."""
        rng = np.random.default_rng(seed)
        parts = [rng.normal(3 * rng.normal(), rng.uniform(0.1, 2), size) for size in sizes]
        rows, fitted = np.concatenate(parts), column(*parts, pieces=bins)
        if not fitted.edges:
            assert sum(len(interior_quantiles(part)) for part in parts) < 3
            return
        apart = sum(size / len(interior_quantiles(part)) for size, part in zip(sizes, parts, strict=True)) / len(rows)
        if len(fitted.edges) == bins + 1 < sum(len(interior_quantiles(part)) for part in parts):
            for k, edge in enumerate(fitted.edges):
                below, within = (rows < edge).mean(), (rows <= edge).mean()
                assert below - apart <= k / bins <= within + apart
        encoded = fitted.encode_pieces(rows)
        assert np.abs(encoded.mean(0)).max() < 2 * apart

    @pytest.mark.parametrize("count", [3, 7])
    def test_few_different_numbers_are_the_edges(self, count):
        values = np.arange(count) ** 2.0 / 7
        parts = [np.repeat(values, 10), np.repeat(values[:2], 20)]
        fitted = column(*parts)
        assert fitted.edges == tuple(values)
        encoded = fitted.encode_pieces(values)
        steps = encoded / 2 + np.array(fitted.centres)
        assert steps.round(6).tolist() == np.tri(count, count - 1, -1).tolist()

    def test_more_different_numbers_than_edges_are_cut_at_levels(self):
        fitted = column(np.repeat(np.arange(12.0), 50))
        assert len(fitted.edges) == 7
        assert (fitted.edges[0], fitted.edges[-1]) == (0, 11)

    def test_equal_edges_are_dropped(self):
        fitted = column(np.concatenate([np.zeros(700), np.arange(1.0, 301)]))
        assert fitted.edges[0] == 0
        assert len(fitted.edges) == 3  # of the levels 0, 1/6, ..., 1, four are at zero; 5/6 and 1 are not
        assert np.diff(fitted.edges).min() > 0

    @pytest.mark.parametrize(
        "numbers", [np.full(100, 0.1), np.arange(100) % 2, 0.1 + np.arange(100) % 3 * 1e-17, np.full(100, np.nan)]
    )
    def test_constant_and_two_valued_columns_have_no_pieces(self, numbers):
        fitted = combine([summary("c", numbers, b=np.arange(100.0))], "regression")
        assert [each.pieces for each in fitted.inputs if each.name == "a"] in ([], [0])
        assert fitted.pieces == 6

    def test_numbers_that_are_equal_up_to_rounding_are_one_edge(self):
        values = np.array([0.3, 0.1 + 0.2, 0.5, 1.0])
        assert column(np.repeat(values, 20)).edges == (0.3, 0.5, 1.0)

    @pytest.mark.parametrize("bins", [0, 1, 2, 6, 32])
    def test_the_number_of_bins_is_a_setting(self, bins):
        assert column(np.arange(1000.0), pieces=bins).pieces == (bins if bins > 1 else 0)

    @pytest.mark.parametrize("bins", [-1, 33])
    def test_absurd_numbers_of_bins_are_refused(self, bins):
        with pytest.raises(UserError, match=f"pieces is {bins}: give a number between 0 and 32"):
            column(np.arange(100.0), pieces=bins)

    def test_large_numbers_keep_their_order(self):
        numbers = np.concatenate([-np.logspace(-30, 30, 200), np.logspace(-30, 30, 200)])
        fitted = fit(numbers)
        fitted.check()
        assert torch.isfinite(fitted.encode(table(numbers))).all()


class TestClients:
    """Many clients, small clients, and clients of earlier versions."""

    def test_their_order_does_not_matter_to_the_bit(self):
        rng = np.random.default_rng(3)
        parts = [np.where(rng.random(n) < 0.1, np.nan, rng.lognormal(0, 2, n).round(2)) for n in (1, 5, 9, 40, 41, 300)]
        sent = [summary(f"client {k}", part) for k, part in enumerate(parts)]
        fits = {combine(order, "regression").to_json() for order in itertools.permutations(sent)}
        assert len(fits) == 1
        assert Preprocessing.from_json(fits.pop(), "here").pieces == 6

    def test_clients_with_few_rows_do_not_move_the_edges_but_the_centres(self):
        rows, one = np.arange(100.0), [99.0]
        with_one, without = column(rows, *[one] * 10), column(rows)
        assert with_one.edges == without.edges
        assert with_one.centres == pytest.approx([(100 * c + 10) / 110 for c in without.centres])

    @pytest.mark.parametrize("sizes", [[1], [7, 7], [1] * 50, [8, 9], [20, 7, 7, 7]])
    def test_there_are_no_pieces_without_quantiles_of_half_of_the_rows(self, sizes):
        rng = np.random.default_rng(0)
        fitted = column(*(np.append(rng.normal(size=size), 0.0)[:size] for size in sizes), pieces=3)
        assert fitted.pieces == (3 if sizes == [8, 9] else 0)

    def test_summaries_of_earlier_versions_combine_without_pieces(self):
        sent = [summary(f"client {k}", np.arange(50.0) + k) for k in range(2)]
        old = []
        for each in sent:
            fields = json.loads(each.to_json())
            del fields["checksum"]
            for own in (*fields["columns"], fields["target"]):
                del own["quantiles"]
            old.append(ClientSummary.from_json(json.dumps(fields)))
        fitted = combine(old, "regression")
        assert fitted.pieces == 0
        plain = [dataclasses.replace(each, edges=(), centres=()) for each in combine(sent, "regression").inputs]
        assert list(fitted.inputs) == plain

    def test_a_node_without_pieces_sends_no_quantiles(self, tmp_path):
        (tmp_path / "a.csv").write_text("a,y\n" + "".join(f"{k},{k % 2}\n" for k in range(50)))
        config = DataConfig(name="files", path=str(tmp_path / "a.csv"), target="y")
        sent = summarise_client(config, 0, "north")
        assert len(sent.columns[0].quantiles) == 10
        assert not summarise_client(dataclasses.replace(config, pieces=0), 0, "north").columns[0].quantiles
        shards = load_client(config, 0, "north", combine([sent]))
        assert shards.task_shape.pieces == 6
        assert shards.x.shape == (50, 7)


class TestEncoding:
    """Inputs."""

    def test_training_rows_have_mean_zero_and_plain_inputs_come_first(self):
        rng = np.random.default_rng(1)
        frames = {
            name: {
                "a": np.where(rng.random(200) < 0.2, np.nan, rng.lognormal(0, 1, 200)),
                "c": rng.choice(["u", "v"], 200),
                "b": rng.normal(size=200),
                "y": rng.normal(size=200),
            }
            for name in ("north", "south")
        }
        some, none = (shards_from_tables(frames, "y", test_fraction=0, pieces=bins) for bins in (4, 0))
        assert none.preprocessing.pieces == none.task_shape.pieces == 0
        assert some.preprocessing.pieces == some.task_shape.pieces == 8
        assert some.preprocessing.shape == some.task_shape.inputs == (2 + 3 + 1 + 8,)
        assert torch.equal(some.x[:, :6], none.x)
        pieces = some.x[:, 6:]
        assert pieces.mean(0).abs().max() < 0.02
        assert -2 <= pieces.min() < pieces.max() <= 2
        assert some.preprocessing.describe().startswith(
            "3 columns (2 numeric, 1 categorical) as 14 inputs, 8 of them piecewise linear; y"
        )

    def test_missing_cells_count_as_the_mean(self):
        numbers = np.append(np.arange(100.0), [np.nan] * 50)
        fitted = fit(numbers)
        own = fitted.inputs[0]
        encoded = fitted.encode(table([np.nan, own.mean]))
        assert torch.equal(encoded[0, 2:], encoded[1, 2:])
        assert fitted.encode(table(numbers))[:, 2:].mean(0).abs().max() < 0.02
        a, b = own.edges[2:4]
        ramp = np.clip((numbers[:100] - a) / (b - a), 0, 1).sum() + 50 * np.clip((own.mean - a) / (b - a), 0, 1)
        assert own.centres[2] == pytest.approx(ramp / 150, abs=0.01)

    def test_a_closed_form(self):
        own = Input("a", "number", 1.0, 2.0, edges=(0.0, 1.0, 3.0), centres=(0.5, 0.25))
        encoded = own.encode_pieces(np.array([-5.0, 0.0, 0.5, 1.0, 2.0, 3.0, 9.0, np.nan]))
        expected = [[-1, -0.5], [-1, -0.5], [0, -0.5], [1, -0.5], [1, 0.5], [1, 1.5], [1, 1.5], [1, -0.5]]
        assert encoded.tolist() == expected

    def test_numbers_far_away_are_still_refused(self):
        with pytest.raises(UserError, match=r"'a' is 1e\+29, more than 1e\+12 standard deviations"):
            fit(np.arange(100.0)).encode(table([1e29]))

    def test_the_record_of_a_run_knows_the_pieces(self):
        fitted = fit(np.arange(100.0))
        record = CalibrationRecord((), fitted, 1, NetConfig(), False, {}, None)
        assert record.task_shape.pieces == fitted.pieces == 6
        assert record.task_shape.inputs == fitted.shape == (7,)


class TestFiles:
    """preprocessing.json."""

    def test_it_reads_back(self):
        fitted = fit(np.random.default_rng(0).normal(size=100), np.arange(9.0))
        back = Preprocessing.from_json(fitted.to_json(), "here")
        assert back == fitted
        assert back.digest() == fitted.digest()

    def test_files_of_earlier_versions_are_read_and_written_as_they_were(self):
        old = {
            "format": 1,
            "inputs": [
                {"name": "a", "kind": "number", "mean": 2.0, "deviation": 4.0, "indicator": True, "categories": []},
                {"name": "c", "kind": "category", "mean": 0.0, "deviation": 1.0, "indicator": False,
                 "categories": ["u", "v"]},
            ],
            "shape": [5],
            "target": {"name": "y", "task": "classification", "classes": ["0", "1"], "mean": 0.0, "deviation": 1.0},
            "image": False,
            "others": [],
        }  # fmt: skip
        read = Preprocessing.from_object(old, "here")
        assert read.pieces == 0
        assert json.loads(json.dumps(read.as_object())) == old
        own = table_of({"a": [6.0, np.nan], "c": ["v", "w"]}, "table", Schema())
        assert read.encode(own).tolist() == [[1, 0, 0, 1, 0], [0, 1, 0, 0, 1]]

    @pytest.mark.parametrize(
        "changes",
        [
            {"edges": [0.0, 2.0, 1.0]},
            {"edges": [0.0, 1.0, 1.0]},
            {"edges": [0.0, 1.0]},
            {"edges": [0.0, 1.0, 1e40]},
            {"edges": [0.0, 1.0, None]},
            {"edges": []},
            {"edges": list(range(34)), "centres": [0.5] * 33},
            {"centres": []},
            {"centres": [0.5]},
            {"centres": [0.5, 1.5]},
            {"centres": [0.5, -0.5]},
            {"edges": [0.0, 1.0], "centres": [0.5]},
            {"kind": "category", "categories": ["u"]},
        ],
    )
    def test_bins_that_cannot_be_are_refused(self, changes):
        own = Input("a", "number", edges=(0.0, 1.0, 2.0), centres=(0.5, 0.25))
        good = Preprocessing((own,), (3,), Target("y", "regression"))
        good.check()
        content = json.loads(json.dumps(good.as_object()))
        content["inputs"][0] |= changes
        content["shape"] = [1 + len(content["inputs"][0]["centres"])]
        with pytest.raises(UserError) as caught:
            Preprocessing.from_object(content, "here")
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("place", ["edges", "centres"])
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_numbers_that_are_not_finite_are_refused(self, place, value):
        own = Input("a", "number", edges=(0.0, 1.0, 2.0), centres=(0.5, 0.25))
        own = dataclasses.replace(own, **{place: (*getattr(own, place)[:-1], value)})
        with pytest.raises(ValueError, match="bin"):
            Preprocessing((own,), (3,), Target("y", "regression")).check()


class TestHostileSummaries:
    """Quantiles that no table has."""

    @pytest.mark.parametrize(
        "quantiles",
        [
            [3.0, 2.0], [1e31, 1e31], [-1e31, 3.0], [1e300, 1e300], [2.0, 9.0], [float(k) for k in range(6)], ["1"],
            [None], [[1.0]], 3.0, "12", None, [10**400], [True],
        ],
    )  # fmt: skip
    def test_quantiles_that_cannot_be_are_refused(self, quantiles):
        fields = json.loads(summary("north", np.arange(20) % 5).to_json())
        del fields["checksum"]
        fields["columns"][0]["quantiles"] = quantiles
        with pytest.raises(UserError, match=r"^[^\n]*make it again with data\.summarise$"):
            ClientSummary.from_json(json.dumps(fields))

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_quantiles_that_are_not_finite_are_refused(self, value):
        sent = summary("north", np.arange(20.0))
        own = dataclasses.replace(sent.columns[0], quantiles=(1.0, value))
        with pytest.raises(UserError, match=r"has the quantile (nan|inf|-inf)"):
            combine([dataclasses.replace(sent, columns=(own,))])

    def test_text_and_few_rows_have_none(self):
        sent = summary("north", np.arange(7.0), c=list("uvuvuvu"))
        for k, wrong in ((0, (3.0, 3.0)), (1, (0.0,))):
            columns = list(sent.columns)
            columns[k] = dataclasses.replace(columns[k], quantiles=wrong)
            with pytest.raises(UserError, match=rf"has {len(wrong)} quantiles of"):
                combine([dataclasses.replace(sent, columns=tuple(columns))])

    @settings(deadline=None)
    @given(st.lists(st.floats(-1e30, 1e30), min_size=8, max_size=40))
    def test_what_a_client_sends_is_never_refused(self, numbers):
        fitted = combine([summary("north", numbers)])
        fitted.check()
        assert torch.isfinite(fitted.encode(table(numbers))).all()


def test_work_is_linear_in_clients():
    """Ten times as many clients take ten times as many points, and not a hundred times as long."""
    import sys

    calls = {}
    for count in (20, 200):
        sent = [summary(f"client {k}", np.arange(40.0) + k) for k in range(count)]
        seen = []
        sys.setprofile(lambda frame, event, argument, seen=seen: seen.append(event))
        try:
            combine(sent, "regression")
        finally:
            sys.setprofile(None)
        calls[count] = len(seen)
    assert calls[200] < 12 * calls[20]
