"""A round is a function of the state: the old state stays as it was."""

import dataclasses

import pytest

from federations import EXACT, SIZES, TRAINING, copy, difference, federation, same_bits, train_alone, trained
from pfedbayes.engine.backend.executor import Executor
from pfedbayes.engine.participation import choose
from pfedbayes.engine.plan import Plan
from pfedbayes.engine.population import HOST, DevicePopulation
from pfedbayes.engine.round import aggregate, download, train_round
from pfedbayes.errors import Diverged
from pfedbayes.maths.trees import pick
from pfedbayes.methods import FedAvg, PFedBayes


@pytest.mark.parametrize("method", [FedAvg(), PFedBayes()], ids=lambda method: method.about.title)
def test_a_round_leaves_the_old_state_alone_and_can_be_repeated(method):
    ours = federation(method)
    executor = Executor(ours.setup, ours.plan, ours.model)
    before, servers, cursors = ours.state, copy(ours.servers), ours.state.cursors.copy()
    first, second = (train_round(ours.setup, before, DevicePopulation(len(SIZES), HOST), executor) for _ in range(2))
    assert (first.round, before.round) == (1, 0)
    assert same_bits(before.servers, servers)
    assert (before.cursors == cursors).all()
    assert same_bits(first.servers, second.servers)
    assert same_bits(first.servers, trained(method, 1).servers)


def test_the_state_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        federation(FedAvg()).state.round = 1


def test_the_server_averages_the_chosen_among_those_that_train():
    ours = federation(PFedBayes(), dataclasses.replace(TRAINING, train="all"), EXACT)
    chosen = choose(ours.setup, 1)
    assert chosen.members == list(range(len(SIZES)))
    assert len(chosen.averaged[0]) == TRAINING.participants
    uploads = download(ours.setup, ours.servers, chosen) + 1.0
    few = pick(uploads, chosen.averaged[0])
    sizes = pick(ours.setup.shard.size, chosen.averaged[0])
    servers, optimizers = aggregate(ours.setup, ours.state, chosen, uploads)
    expected = ours.method.aggregate(ours.servers[0], few, sizes, None)
    assert same_bits(servers, (expected,))
    assert optimizers == ()


@pytest.mark.parametrize("method", [FedAvg(), PFedBayes()], ids=lambda method: method.about.title)
def test_the_engine_trains_as_one_client_after_another_does(method):
    assert difference(trained(method, 2).servers[0], train_alone(method, 2).server) < 1e-9


def test_a_plan_in_half_precision_predicts_in_it():
    for precision, half in (("bf16", True), ("full", False)):
        assert federation(FedAvg(), plan=Plan(precision=precision)).predictor.half is half


@pytest.mark.parametrize("participants", [None, 3])
def test_seeds_that_are_trained_together_end_as_each_alone(participants):
    training = dataclasses.replace(TRAINING, participants=participants)
    together = trained(FedAvg(), 2, training=training, seeds=(1, 2))
    for s, seed in enumerate((1, 2)):
        alone = trained(FedAvg(), 2, training=training, seeds=(seed,))
        assert difference(together.servers[s], alone.servers[0]) < 1e-12


def test_a_round_in_which_a_client_diverges_is_not_taken():
    ours = federation(FedAvg(eta=1e308))
    before = copy(ours.servers)
    with pytest.raises(Diverged, match=r"round 1: site . has become non-finite"):
        for _ in ours.rounds(3):
            pass
    assert (ours.round, ours.population.enrolled) == (0, [])
    assert same_bits(ours.servers, before)
