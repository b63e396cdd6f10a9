"""A round is a function of the state: the old state stays as it was."""

import dataclasses

import pytest
import torch

from federations import (
    EXACT,
    SIZES,
    TRAINING,
    copy,
    difference,
    federation,
    make_shards,
    same_bits,
    train_alone,
    trained,
)
from pfedbayes.engine.backend.executor import Executor
from pfedbayes.engine.participation import choose
from pfedbayes.engine.plan import Plan
from pfedbayes.engine.population import HOST, DevicePopulation
from pfedbayes.engine.round import aggregate, download, train_round
from pfedbayes.engine.setup import Copy
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


class TestCopies:
    """Federations that train beside those of the seeds: without some rows, and every client alone."""

    # A batch of everything: which rows it has then does not depend on the number of a client.
    training = dataclasses.replace(TRAINING, batch_size=30, participants=None, server_optimizer="adam")

    def fold(self, shards):
        return Copy(tuple(rows[1:3] for rows in shards.train))

    def one(self, shards, i):
        lists = {name: getattr(shards, name)[i : i + 1] for name in ("train", "test", "validation", "names")}
        return dataclasses.replace(shards, **lists)

    @pytest.mark.parametrize("participants", [None, 3])
    def test_a_fold_is_a_federation_without_its_rows(self, participants):
        shards, training = make_shards(), dataclasses.replace(TRAINING, participants=participants)
        fewer = dataclasses.replace(shards, train=tuple(torch.cat([rows[:1], rows[3:]]) for rows in shards.train))
        result = trained(PFedBayes(), training=training, copies=[self.fold(shards)])
        other = trained(PFedBayes(), training=training, shards=fewer)
        assert difference(result.servers[1], other.servers[0]) < 1e-10
        assert difference(result.servers[0], other.servers[0]) > 1e-3
        assert difference(result.servers[0], trained(PFedBayes(), training=training).servers[0]) < 1e-10

    @pytest.mark.parametrize("optimizer", ["none", "adam"])
    def test_a_client_alone_is_a_federation_of_one(self, optimizer):
        shards, training = make_shards(), dataclasses.replace(self.training, server_optimizer=optimizer)
        copies = [self.fold(shards), Copy(alone=True), self.fold(shards)._replace(alone=True)]
        result = trained(FedAvg(), training=training, copies=copies)
        left = dataclasses.replace(shards, train=tuple(torch.cat([rows[:1], rows[3:]]) for rows in shards.train))
        for i in range(len(SIZES)):
            for index, data in ((2, shards), (3, left)):
                single = trained(FedAvg(), training=training, shards=self.one(data, i))
                assert difference(result.servers[index][i], single.servers[0]) < 1e-10
                assert same_bits(result.server_of(index, i), result.servers[index][i])
        assert same_bits(result.server_of(0, 3), result.servers[0])

    def test_who_does_not_take_part_keeps_its_own_server(self):
        everybody = dataclasses.replace(self.training, server_optimizer="none")
        training = dataclasses.replace(everybody, participants=2, train="all")
        start = federation(FedAvg(), training)
        result = federation(FedAvg(), training, copies=[Copy(alone=True)])
        chosen = choose(result.setup, 1)
        result.train_round()
        assert len(chosen.averaged[1]) == 2
        for i in range(len(SIZES)):
            single = trained(FedAvg(), 1, training=everybody, shards=self.one(make_shards(), i)).servers[0]
            expected = single if i in chosen.averaged[1] else start.servers[0]
            assert difference(result.servers[1][i], expected) < 1e-10

    def test_they_have_the_first_seed_and_are_not_reported(self):
        shards = make_shards()
        result = federation(FedAvg(), self.training, seeds=(4, 5), copies=[self.fold(shards), Copy(alone=True)])
        assert (result.seeds, [result.seed(s) for s in range(4)]) == ((4, 5), [4, 5, 4, 4])
        assert (result.setup.num_reported, result.setup.first_alone, result.setup.num_members) == (2, 3, 20)
        result.train_round()
        scores = result.evaluate(samples=1)["shared"]["mean"]["nll"]
        assert len(scores) == 2
