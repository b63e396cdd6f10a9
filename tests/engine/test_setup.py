"""Parts of a federation that do not fit each other are refused."""

import dataclasses

import pytest

from federations import SIZES, TRAINING, federation, trained
from pfedbayes.errors import UserError
from pfedbayes.methods import FedAvg
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
