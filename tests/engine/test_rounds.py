"""The records that training yields, and short descriptions of what a user holds."""

import json
import math
import statistics

import pandas
import pytest

import pfedbayes
from federations import federation, make_shards
from pfedbayes.engine.rounds import TrainedRound
from pfedbayes.methods import FedAvg, PFedBayes


def test_records_are_round_numbers_and_rows_of_a_table():
    ours = federation(PFedBayes())
    records = list(ours.rounds(evaluate="test", samples=3))
    assert records == [1, 2, 3]
    assert [record.round for record in records] == [1, 2, 3]
    assert f"{records[2]} {records[2]:02d} {json.dumps(records[2])}" == "3 03 3"
    table = pandas.DataFrame(records)
    assert list(table["round"]) == [1, 2, 3]
    assert table["seconds"].is_monotonic_increasing
    assert (table["seconds"] > 0).all()
    assert table["personal_nll"].isna().tolist() == [True, True, False]  # evaluate_every is 10, and the last round
    scores = ours.evaluate(3)["shared"][ours.headline(3)]["nll"]
    assert records[2]["shared_nll"] == pytest.approx(statistics.fmean(scores[0]))
    assert records[2].scores["shared"][ours.headline(3)]["nll"] == scores
    assert dict(records[0]) == {"round": 1, "seconds": records[0].seconds}


def test_training_without_scores_and_with_a_bar(capsys):
    ours = federation(FedAvg())
    assert [{*record} for record in ours.rounds(2, show=True)] == [{"round", "seconds"}] * 2
    assert "FedAvg" in capsys.readouterr().out
    assert list(ours.rounds(2)) == []
    assert list(ours.rounds(2, show=True)) == []


def test_means_leave_out_what_is_not_defined():
    scores = {"personal": {"one": {"nll": [[1.0, None], [3.0, math.nan]], "c_index": [[None, None]]}}}
    record = TrainedRound(5, 0.5, scores, "mean")
    assert record["personal_nll"] == 2
    assert math.isnan(record["personal_c_index"])
    assert repr(record) == "TrainedRound(5, seconds=0.5, personal_nll=2, personal_c_index=nan)"
    assert len(record) == 4


def test_what_a_user_holds_describes_itself():
    assert repr(make_shards()) == "Shards(5 clients, rows: 61 train, 39 test, inputs (3,), 3 classes)"
    ours = federation(FedAvg())
    assert repr(ours).startswith("Federation(FedAvg, 5 clients, round 0 of 3, ")
    assert repr(ours).endswith(" parameters, cpu)")
    numbers = pfedbayes.load_shards(pfedbayes.DataConfig("regression", clients=2))
    assert repr(numbers).endswith("inputs (4,), numbers)")
