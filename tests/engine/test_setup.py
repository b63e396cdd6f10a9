"""Parts of a federation that do not fit each other are refused."""

import dataclasses

import pytest
import torch
from torch import nn

from federations import SIZES, TRAINING, federation, make_model, make_shards, randn, trained
from pfedbayes.engine.setup import num_participants
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Classification, Regression
from pfedbayes.maths.random import Purpose, key
from pfedbayes.methods import METHODS, FedAvg
from pfedbayes.methods.base import Needs


@dataclasses.dataclass(frozen=True)
class Tied(FedAvg):
    @property
    def needs(self):
        return Needs(tied=True)


class TestTied:
    """A client's state may change only if the server uses its upload."""

    def test_training_all_clients_and_averaging_few_is_refused(self):
        with pytest.raises(UserError, match=r"set training\.train=chosen, or leave training\.participants out"):
            federation(Tied(), dataclasses.replace(TRAINING, train="all"))

    @pytest.mark.parametrize("settings", [{"train": "chosen"}, {"train": "all", "participants": None}])
    def test_who_trains_is_averaged(self, settings):
        ours = trained(Tied(), 1, training=dataclasses.replace(TRAINING, **settings))
        assert len(ours.population.enrolled) == (settings.get("participants", TRAINING.participants) or len(SIZES))

    def test_other_methods_may_train_all_clients_and_average_few(self):
        assert federation(FedAvg(), dataclasses.replace(TRAINING, train="all")).participants < len(SIZES)


def test_a_method_may_need_all_clients():
    bnfed = METHODS["bnfed"]()
    for participants in (None, 5):
        assert federation(bnfed, dataclasses.replace(TRAINING, participants=participants)).participants == 5
    with pytest.raises(UserError, match=r"BNFed needs all 5 clients: leave training\.participants out"):
        federation(bnfed, dataclasses.replace(TRAINING, participants=4))


def test_rows_of_members_whether_or_not_they_follow_each_other():
    setup = federation(FedAvg()).setup
    stacked = torch.arange(5)
    for members in ([0], [4], [1, 2, 3], [0, 2], [0, 1, 3], [0, 1, 2, 3, 4]):
        assert setup.of_members(stacked, members).tolist() == members
    assert setup.of_members(stacked, [1, 2]).data_ptr() == stacked[1:].data_ptr()  # a view


def test_numbers_of_members_and_the_weights_of_their_examples():
    setup = federation(FedAvg(), seeds=(1, 2)).setup
    assert (setup.num_clients, setup.num_members, setup.training_at_once) == (5, 10, 6)
    assert setup.shard.size.tolist() == [*SIZES, *SIZES]
    assert setup.weight.sum(1).tolist() == [min(size, TRAINING.batch_size) for size in SIZES] * 2
    assert setup.weight[1].tolist() == [1, 1, 1, 1, 0, 0]
    everybody = dataclasses.replace(TRAINING, train="all")
    assert federation(FedAvg(), everybody, seeds=(1, 2)).setup.training_at_once == 10


def test_images_of_one_pixel_height_may_be_shifted_sideways():
    shards = make_shards()
    line = dataclasses.replace(shards, x=randn(len(shards.x), 1, 1, 3))
    model = make_model(nn.Sequential(nn.Flatten(), nn.Linear(3, 3)))
    moved = dataclasses.replace(TRAINING, shift=2)
    assert federation(FedAvg(), moved, shards=line, model=model).setup.views.count == 25
    pairs = dataclasses.replace(line, x=line.x[..., :2])
    with pytest.raises(UserError, match=r"training.shift=2 moves images of 1 x 2 pixels out of sight"):
        federation(FedAvg(), moved, shards=pairs, model=make_model(nn.Sequential(nn.Flatten(), nn.Linear(2, 3))))
    low = dataclasses.replace(line, x=randn(len(shards.x), 1, 2, 3))
    with pytest.raises(UserError, match=r"training.shift=2 moves images of 2 x 3 pixels out of sight"):
        federation(FedAvg(), moved, shards=low, model=make_model(nn.Sequential(nn.Flatten(), nn.Linear(6, 3))))
    channels = dataclasses.replace(line, x=randn(len(shards.x), 2, 3, 3))
    net = make_model(nn.Sequential(nn.Flatten(), nn.Linear(18, 3)))
    assert federation(FedAvg(), moved, shards=channels, model=net).setup.views.count == 25
    for shift in (3, 4):
        with pytest.raises(UserError, match=f"training.shift={shift} moves images of 1 x 3 pixels out of sight"):
            federation(FedAvg(), dataclasses.replace(moved, shift=shift), shards=line, model=model)


def test_the_server_begins_with_the_init_that_is_asked_for():
    ours = federation(FedAvg(), init="normal")
    expected = ours.model.net.init(key(TRAINING.seed, Purpose.INIT), "normal").double()
    assert torch.equal(ours.servers[0], expected)
    assert not torch.equal(ours.servers[0], federation(FedAvg()).servers[0])


def test_a_method_that_needs_labels_does_not_predict_numbers():
    everybody = dataclasses.replace(TRAINING, participants=None)
    labels, numbers = (make_model(likelihood=each) for each in (Classification(), Regression(1.0)))
    assert num_participants(labels, METHODS["pfedgp"](), everybody, 5) == 5
    assert num_participants(numbers, FedAvg(), everybody, 5) == 5
    with pytest.raises(UserError, match="pFedGP classifies: give labels instead of numbers"):
        num_participants(numbers, METHODS["pfedgp"](), everybody, 5)
