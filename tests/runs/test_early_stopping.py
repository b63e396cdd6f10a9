"""Early stopping keeps the best round on validation data, and survives a kill."""

import gc
import math

import pytest
import torch

import pfedbayes
from federations import federation
from pfedbayes import runs
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Classification
from pfedbayes.methods import METHODS, FedAvg
from pfedbayes.report import render, tables
from pfedbayes.runs.early_stopping import EarlyStopping, _losses, validation_loss
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import Evaluation, read_experiment

# Labels that are noise: the loss on validation data soon becomes worse.
NOISY = [
    "data.name=blobs", "data.clients=3", "data.examples=60", "data.noise=3", "data.validation=0.3", "net.hidden=[20]",
    "training.batch_size=16", "training.local_steps=10", "training.rounds=60", "training.evaluate_every=2",
    "training.patience=6", "method.name=fedavg", "method.eta=0.3", "execution.checkpoint_seconds=0",
]  # fmt: skip

OTHER_METHOD = [text for text in NOISY if not text.startswith("method.")]


def finish(folder, overrides=(), seeds=(1,), **options):
    return list(execute(read_experiment(None, [*NOISY, *overrides]), folder, list(seeds), "cpu", **options))


def losses(run):
    return {record.round: record.validation_nll for record in run.rounds}


@pytest.mark.parametrize("seeds", [(1,), (1, 2, 3)])
def test_the_best_round_is_kept_and_training_stops(tmp_path, seeds):
    steps = finish(tmp_path / "run", seeds=seeds)
    run = runs.read_run(tmp_path / "run")
    by_round = losses(run)
    best = run.summary.kept_round
    # No worse than the best round by more than chance allows, and not later: rounds before it are worse.
    assert by_round[best] < min(by_round.values()) + 0.05
    assert best <= min(by_round, key=by_round.get)
    assert all(by_round[earlier] > by_round[best] for earlier in by_round if earlier < best)
    stopped = steps[-1].round
    assert stopped == run.summary.rounds == best + 6 < 60
    assert run.summary.kept_round == best
    kept = pfedbayes.load(tmp_path / "run")
    assert kept.round == best
    (record,) = [record for record in run.rounds if record.round == best]
    assert kept.evaluate()["shared"] == record.shared
    assert validation_loss(kept, Evaluation()) == by_round[best]
    assert tables.final(run) == record
    page = render([run])
    assert f"Early stopping kept the models of round {best} of" in page
    assert f"After {best} rounds" in page


def test_the_loss_is_that_of_all_validation_examples(tmp_path):
    finish(tmp_path / "run", ["training.rounds=2"], seeds=(1, 2))
    kept = pfedbayes.load(tmp_path / "run")
    total, count = 0.0, 0
    for s in range(2):
        for i, rows in enumerate(kept.shards.validation):
            outputs = kept.predict("shared", i, kept.shards.x[rows], seed_index=s)[0]
            total += float(torch.nn.functional.cross_entropy(outputs, kept.shards.y[rows], reduction="sum"))
            count += len(rows)
    assert validation_loss(kept, Evaluation()) == pytest.approx(total / count, rel=1e-5)


def test_seeds_together_are_judged_by_their_mean(tmp_path):
    finish(tmp_path / "both", ["training.patience=1000", "training.rounds=8"], seeds=(1, 2))
    apart = []
    for seed in (1, 2):
        finish(tmp_path / str(seed), ["training.patience=1000", "training.rounds=8"], seeds=(seed,))
        apart.append(losses(runs.read_run(tmp_path / str(seed))))
    for round, loss in losses(runs.read_run(tmp_path / "both")).items():
        assert loss == pytest.approx((apart[0][round] + apart[1][round]) / 2, rel=1e-4)


def same_files(one, other):
    a, b = runs.read_checkpoint(one), runs.read_checkpoint(other)
    assert (a.round, a.best.round, a.best.loss) == (b.round, b.best.round, b.best.loss)
    assert torch.equal(a.best.row_losses, b.best.row_losses)
    for tensors, others in ((a.tensors, b.tensors), (a.best.tensors, b.best.tensors)):
        assert tensors.keys() == others.keys()
        assert all(tensors[name].equal(others[name]) for name in tensors)
    left, right = losses(runs.read_run(one)), losses(runs.read_run(other))
    return left == right and runs.read_run(one).summary.kept_round == runs.read_run(other).summary.kept_round


@pytest.mark.parametrize("method", ["fedavg", "pfedbayes"])
@pytest.mark.parametrize("after", [3, 8])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path, after, method):
    experiment = read_experiment(None, [*OTHER_METHOD, "training.rounds=14", f"method.name={method}"])
    list(execute(experiment, tmp_path / "whole", [1], "cpu"))
    for step in (interrupted := execute(experiment, tmp_path / "cut", [1], "cpu")):
        if step.round == after:
            interrupted.close()
            break
    list(execute(experiment, tmp_path / "cut", [1], "cpu", resume=True))
    assert same_files(tmp_path / "whole", tmp_path / "cut")


def test_a_resumed_run_lets_go_of_a_best_round_when_a_better_one_comes(tmp_path):
    experiment = read_experiment(None, [*OTHER_METHOD, "training.rounds=14", "method.name=fedavg"])
    for step in (interrupted := execute(experiment, tmp_path / "run", [1], "cpu")):
        if step.round == 3:
            interrupted.close()
            break
    for _ in execute(experiment, tmp_path / "run", [1], "cpu", resume=True):
        gc.collect()
        kept = [each.round for each in gc.get_objects() if type(each) is runs.Best]
        assert len(kept) == 1
    assert kept[0] > 3


def test_a_run_that_has_stopped_does_not_go_on(tmp_path):
    finish(tmp_path / "run")
    before = runs.read_run(tmp_path / "run")
    assert finish(tmp_path / "run", ["training.rounds=100"], resume=True) == []
    after = runs.read_run(tmp_path / "run")
    assert after.rounds == before.rounds
    assert after.summary.kept_round == before.summary.kept_round
    assert after.summary.rounds == before.summary.rounds


def test_clients_that_rest_in_a_file_come_back_as_they_were(tmp_path):
    few = ["method.name=pfedme", "training.participants=2", "training.train=chosen", "training.rounds=12"]
    for resting in ("device", "file"):
        experiment = read_experiment(None, [*OTHER_METHOD, *few, f"execution.resting={resting}"])
        list(execute(experiment, tmp_path / resting, [1], "cpu"))
    one, other = pfedbayes.load(tmp_path / "device"), pfedbayes.load(tmp_path / "file")
    assert one.round == other.round
    a, b = one.tensors(), other.tensors()
    assert all(a[name].equal(b[name]) for name in a)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_stop_early(tmp_path, name):
    short = ["training.rounds=4", "training.local_steps=2", "training.patience=2", "net.hidden=[6]"]
    list(
        execute(read_experiment(None, [*OTHER_METHOD, *short, f"method.name={name}"]), tmp_path / "run", [1, 2], "cpu")
    )
    run = runs.read_run(tmp_path / "run")
    assert pfedbayes.load(tmp_path / "run").round == run.summary.kept_round
    assert all(math.isfinite(loss) for loss in losses(run).values())


def all_of(loss, size=4):
    losses = torch.full((1, size), loss).double()
    return losses, losses


def considered(monkeypatch, *rounds):
    """The rounds that are the best one in turn, given the losses of rows in each round."""
    stopping, ours, kept = EarlyStopping(100, Evaluation()), federation(FedAvg()), []
    for losses in rounds:
        pair = (torch.tensor([losses]).double(),) * 2
        monkeypatch.setattr("pfedbayes.runs.early_stopping.row_losses", lambda *_, pair=pair: pair)
        before = stopping.best
        stopping.consider(ours)
        kept.append(stopping.best is not before)
    return kept


def test_a_round_within_the_noise_of_the_best_is_not_better(monkeypatch):
    # The second round gains 0.1 on average, with a standard error of 0.25; the third one as much without noise.
    first, noisy, steady = [1.0] * 4, [0.4, 1.4, 0.4, 1.4], [0.9] * 4
    assert considered(monkeypatch, first, noisy, steady) == [True, False, True]
    # Small steps add up.
    assert considered(monkeypatch, [1.0, 1.0], [0.9, 1.05], [0.8, 0.9]) == [True, False, True]


def test_luck_on_a_handful_of_rows_does_not_pay():
    """Six validation rows: an over-confident model that is right on all of them has the smaller NLL, and loses."""
    logits = {"modest": 2.5, "sure": 12.0}
    found = {}
    for name, gap in logits.items():
        outputs = torch.tensor([[gap, 0.0]] * 6).double()[None, None]
        own, other = _losses(Classification(), outputs, torch.zeros(1, 6, dtype=torch.int64))
        found[name] = (float(own.mean()), float(((6 * own + other) / 7).mean()))
    assert found["sure"][0] < 0.003 < found["modest"][0]
    assert found["sure"][1] > found["modest"][1]
    # With many rows the difference is that of the NLL.
    assert (600 * found["sure"][0] + 12) / 601 < (600 * found["modest"][0] + 2.5) / 601


def test_a_loss_that_is_no_number_is_never_the_best(monkeypatch):
    stopping = EarlyStopping(3, Evaluation())
    ours = federation(FedAvg())
    monkeypatch.setattr("pfedbayes.runs.early_stopping.row_losses", lambda *_: all_of(math.nan))
    assert math.isnan(stopping.consider(ours))
    assert stopping.best is None
    assert [stopping.is_over(round) for round in (2, 3)] == [False, True]
    monkeypatch.setattr("pfedbayes.runs.early_stopping.row_losses", lambda *_: all_of(1.0))
    stopping.consider(ours)
    monkeypatch.setattr("pfedbayes.runs.early_stopping.row_losses", lambda *_: all_of(math.nan))
    stopping.consider(ours)
    assert stopping.best.loss == 1.0


def test_what_it_needs_is_said():
    with pytest.raises(UserError, match=r"data\.validation is 0"):
        read_experiment(None, ["training.patience=5"])
    with pytest.raises(UserError, match="average_every"):
        read_experiment(None, ["training.patience=5", "data.validation=0.2", "evaluation.average_every=2"])
    with pytest.raises(UserError, match="patience must be at least 1"):
        read_experiment(None, ["training.patience=0", "data.validation=0.2"])
    with pytest.raises(UserError, match="no client has validation data"):
        validation_loss(federation(FedAvg()), Evaluation())
