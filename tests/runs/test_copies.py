"""The federations beside those of a run, and what they say about joining."""

import dataclasses

import pytest
import torch

from federations import make_model, make_shards
from pfedbayes.data.splits import SplitPurpose, folds_of
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import Plan
from pfedbayes.engine.setup import Copy
from pfedbayes.evaluation.posterior import trained_model
from pfedbayes.runs.experiment import copies_of_run, read_experiment
from pfedbayes.runs.joining import judge_joining
from pfedbayes.trust.calibration import DRAWS

SIZES = (23, 1, 11, 7)
SHARDS = make_shards(SIZES, (9, 5, 8, 3))
SETTINGS = ["data.name=blobs", "method.name=hierarchical", "training.rounds=2", "training.local_steps=2"]


def experiment(*more):
    return read_experiment(None, [*SETTINGS, *more])


def federation(experiment, shards=SHARDS, seeds=(5,)):
    return Federation(
        shards, make_model(), experiment.method, experiment.training, seeds,
        plan=Plan(dtype="float64", threads=1), copies=copies_of_run(experiment, shards, len(seeds)).federations,
    )  # fmt: skip


def fold_rows(experiment, shards):
    return copies_of_run(experiment, shards, 1).left_out


def trains_alone(experiment, shards):
    return copies_of_run(experiment, shards, 1).alone is not None


def with_validation(shards):
    halves = [rows.tensor_split(2) for rows in shards.test]
    test, validation = zip(*halves, strict=True)
    return dataclasses.replace(shards, test=test, validation=validation)


class TestFolds:
    def test_every_row_is_left_out_once(self):
        folds = fold_rows(experiment("evaluation.folds=4"), SHARDS)
        assert len(folds) == 4
        for i, rows in enumerate(SHARDS.train):
            left_out = torch.cat([fold[i] for fold in folds])
            expected = rows if len(rows) > 1 else rows[:0]  # a single row is always trained on
            assert sorted(left_out.tolist()) == sorted(expected.tolist())

    def test_they_are_stratified_and_of_the_client(self):
        asked = experiment("evaluation.folds=3")
        folds = fold_rows(asked, SHARDS)
        for i, rows in enumerate(SHARDS.train):
            if len(rows) > 1:
                labels = SHARDS.y[rows].numpy()
                own = folds_of(labels, len(rows), 3, SplitPurpose.FOLDS.stream(i), asked.data.seed)
                assert all(torch.equal(folds[k][i], rows[torch.from_numpy(own == k)]) for k in range(3))

    def test_numbers_are_not_stratified(self):
        shards = dataclasses.replace(SHARDS, y=torch.randn(len(SHARDS.y), 1), num_classes=None)
        asked = experiment("evaluation.folds=3")
        rows = shards.train[0]
        own = folds_of(None, len(rows), 3, SplitPurpose.FOLDS.stream(0), asked.data.seed)
        assert torch.equal(fold_rows(asked, shards)[1][0], rows[torch.from_numpy(own == 1)])

    def test_there_are_none_with_validation_rows_or_unless_asked_for(self):
        assert fold_rows(experiment("evaluation.folds=4"), with_validation(SHARDS)) == []
        assert fold_rows(experiment("evaluation.folds=0"), SHARDS) == []


class TestAlone:
    def test_if_asked_for(self):
        assert trains_alone(experiment("evaluation.alone=true"), SHARDS)
        assert not trains_alone(experiment("evaluation.alone=false"), SHARDS)

    def test_if_that_differs_from_the_method(self):
        for method in ("local", "pooled", "bnfed"):
            settings = ["data.name=blobs", f"method.name={method}", "evaluation.alone=true"]
            assert not trains_alone(read_experiment(None, settings), SHARDS)
        one = make_shards((20,), (5,))
        assert not trains_alone(experiment("evaluation.alone=true"), one)


def test_copies_are_folds_then_clients_alone_then_their_folds():
    asked = experiment("evaluation.folds=2", "evaluation.alone=true")
    found = copies_of_run(asked, SHARDS, 3)
    copies, folds = found.federations, found.left_out
    assert [copy.alone for copy in copies] == [False, False, True, True, True]
    assert copies[2] == Copy(None, alone=True)
    for copy, fold in ((copies[0], 0), (copies[1], 1), (copies[3], 0), (copies[4], 1)):
        assert all(torch.equal(*each) for each in zip(copy.left_out, folds[fold], strict=True))
    assert [index for index, _ in found.folds()] == [3, 4]
    assert found.alone == 5
    assert [index for index, _ in found.folds(alone=True)] == [6, 7]
    joined = copies_of_run(experiment("evaluation.folds=2", "evaluation.alone=false"), SHARDS, 3)
    assert [copy.alone for copy in joined.federations] == [False, False]


def loss(result, client, index, rows):
    """Return the negative log-likelihood of the averaged prediction, example by example."""
    outputs = trained_model(result, "personal", client, index).outputs(DRAWS)(SHARDS.x[rows])
    probabilities = torch.stack([draw.softmax(-1) for draw in outputs]).mean(0)
    return -probabilities[torch.arange(len(rows)), SHARDS.y[rows]].log()


@pytest.mark.parametrize("folds", [0, 2])
def test_verdicts_compare_the_federation_with_clients_alone(folds):
    asked = experiment(f"evaluation.folds={folds}", "evaluation.alone=true")
    shards = SHARDS if folds else with_validation(SHARDS)
    result = federation(asked, shards, seeds=(5, 6))
    for _ in result.rounds(2):
        pass
    records = {record.client: record for record in judge_joining(result, asked)}
    names = [name for name, rows in zip(shards.names, shards.train, strict=True) if not folds or len(rows) > 1]
    assert list(records) == names
    for i, name in enumerate(shards.names):
        if name not in records:
            continue
        verdict, test = records[name].folds, records[name].test
        if folds:
            held = fold_rows(asked, shards)
            joined = torch.cat([loss(result, i, 2 + k, held[k][i]) for k in range(2)])
            alone = torch.cat([loss(result, i, 5 + k, held[k][i]) for k in range(2)])
        else:
            joined, alone = loss(result, i, 0, shards.validation[i]), loss(result, i, 2, shards.validation[i])
        assert verdict.joined == pytest.approx(float(joined.mean()), rel=1e-6)
        assert verdict.alone == pytest.approx(float(alone.mean()), rel=1e-6)
        assert verdict.rows == len(joined)
        assert test.joined == pytest.approx(float(loss(result, i, 0, shards.test[i]).mean()), rel=1e-6)
        assert test.alone == pytest.approx(float(loss(result, i, 2 + folds, shards.test[i]).mean()), rel=1e-6)


def test_without_clients_alone_or_rows_there_is_no_verdict():
    asked = experiment("evaluation.folds=2", "evaluation.alone=false")
    assert judge_joining(federation(asked), asked) is None
    asked = experiment("evaluation.folds=0", "evaluation.alone=true")
    assert judge_joining(federation(asked), asked) is None
