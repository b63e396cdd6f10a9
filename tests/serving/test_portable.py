"""What a client's file must hold, by hand."""

import json

import pytest
import torch
from safetensors.torch import load

import pfedbayes as package
from pfedbayes.errors import UserError
from pfedbayes.runs.calibration import read_calibration_scores
from pfedbayes.serving import portable
from pfedbayes.serving.portable import _weights, client_bytes, read_client
from pfedbayes.trust.calibration import Scores

ONE = torch.ones(3)


@pytest.fixture
def cost(home, monkeypatch, tmp_path):
    """Return a function that reads the exported client of a regression with other metadata."""
    content = client_bytes(package.open_client(home / "cost", "north"))
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about = json.loads(header["__metadata__"]["client"])

    def read(**changes):
        monkeypatch.setattr(portable, "read_safetensors", lambda *_: (load(content), about | changes))
        return read_client(tmp_path / "north.safetensors", "cpu")

    return read


def test_the_noise_of_a_regression_is_learned_or_a_positive_number(cost):
    client = cost()
    assert client.likelihood.unit == client.preprocessing.target.deviation
    for value in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match="its seed or its noise is not a number that it can have"):
            cost(sigma_eps=value)
    for learned, noise in ((True, 0.5), (False, None)):  # a file of an early version, without its likelihood
        with pytest.raises(UserError, match="its noise must be either known or learned"):
            cost(likelihood=None, learned_noise=learned, sigma_eps=noise)


class TestWeights:
    def test_a_mean_and_perhaps_deviations(self):
        assert _weights({"mean": ONE})[1] is None
        mean, deviation = _weights({"mean": ONE.double(), "deviation": 0 * ONE})
        assert (mean.tolist(), deviation.tolist()) == ([1.0] * 3, [0.0] * 3)

    @pytest.mark.parametrize(
        ("tensors", "reason"),
        [
            ({}, "the mean of its weights is missing"),
            ({"deviation": ONE}, "the mean of its weights is missing"),
            ({"mean": ONE[None]}, "or has another shape"),
            ({"mean": ONE, "deviation": ONE[:2]}, "its weights have another shape or type"),
            ({"mean": ONE, "deviation": ONE[None]}, "its weights have another shape or type"),
            ({"mean": ONE.half()}, "its weights have another shape or type"),
            ({"mean": ONE, "deviation": ONE.int()}, "its weights have another shape or type"),
            ({"mean": ONE / 0}, "its weights are not finite"),
            ({"mean": ONE, "deviation": ONE / 0}, "its weights are not finite"),
            ({"mean": ONE, "deviation": torch.tensor([1.0, -1e-9, 1.0])}, "a deviation of its weights is negative"),
        ],
    )
    def test_others_are_refused(self, tensors, reason):
        with pytest.raises(ValueError, match=reason):
            _weights(tensors)


class TestScores:
    def scores(self, odd=ONE, sure=ONE, wrong=ONE > 2):
        named = {"own.odd": odd, "own.sure": sure, "own.wrong": wrong}
        return read_calibration_scores({name: values for name, values in named.items() if values is not None}, "own")

    def test_all_of_one_length_or_only_the_first(self):
        assert all(map(torch.equal, self.scores(), Scores(ONE, ONE, ONE > 2)))
        assert [len(values) for values in self.scores(sure=ONE[:0], wrong=ONE[:0] > 2)] == [3] + [0] * 6

    @pytest.mark.parametrize("change", [{"odd": None}, {"sure": None}, {"wrong": None}, {"sure": ONE[:2]}])
    def test_missing_ones_and_other_lengths(self, change):
        with pytest.raises(ValueError, match="the scores 'own' are missing or have another shape"):
            self.scores(**change)

    @pytest.mark.parametrize(
        "change", [{"wrong": ONE}, {"odd": ONE > 2}, {"sure": ONE.long()}, {"odd": ONE.to(torch.complex64)}]
    )
    def test_other_types(self, change):
        with pytest.raises(ValueError, match="the scores 'own' have another type"):
            self.scores(**change)

    def test_labels_are_whole_numbers(self):
        named = {f"own.{name}": values for name, values in Scores(ONE, ONE, ONE > 2, ONE)._asdict().items()}
        with pytest.raises(ValueError, match="the scores 'own' have another type"):
            read_calibration_scores(named, "own")
        assert len(read_calibration_scores(named | {"own.label": ONE.long()}, "own").label) == 3

    @pytest.mark.parametrize("change", [{"sure": ONE[:0]}, {"wrong": ONE[:0] > 2}])
    def test_confidence_and_errors_go_together(self, change):
        with pytest.raises(ValueError, match="do not fit each other"):
            self.scores(**change)

    def test_their_number_is_that_of_the_clients(self):
        named = {f"own.{name}": values for name, values in Scores(ONE, ONE, ONE > 2)._asdict().items()}
        assert len(read_calibration_scores(named, "own", 3).odd) == 3
        for size in (2, 4):
            with pytest.raises(ValueError, match="or their clients"):
                read_calibration_scores(named, "own", size)
        nothing = {name: values[:0] for name, values in named.items()}
        assert len(read_calibration_scores(nothing, "own", 3).odd) == 0

    @pytest.mark.parametrize("name", ["odd", "sure"])
    def test_other_ranks_and_what_is_no_number(self, name):
        with pytest.raises(ValueError, match="have another shape"):
            self.scores(**{name: ONE[:, None]})
        with pytest.raises(ValueError, match="the scores 'own' are not numbers"):
            self.scores(**{name: torch.tensor([1.0, torch.nan, 1.0])})
