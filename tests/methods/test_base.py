import inspect

import pytest

from federations import randn
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.errors import UserError
from pfedbayes.methods import METHODS, BNFed, FedAvg, FedPer
from pfedbayes.methods.base import Method, Needs, weights_posterior


def test_no_more_steps_are_asked_for_than_the_method_takes():
    class Two(FedAvg):
        needs = Needs(max_steps=2)

        def step(self, model, local, batches, noise):
            return local

    steps = iter([(batches, randn(0)) for batches in [()] * 5])
    client_round(Two(), None, (), randn(3), None, steps)
    assert len(list(steps)) == 3


def test_an_author_meets_at_most_18_names():
    names = {name for name in (*vars(Method), *inspect.get_annotations(Method)) if not name.startswith("_")}
    assert len(names) <= 18


def test_a_method_adapts_if_it_overrides_adapt():
    assert not FedAvg().adapts
    assert FedPer().adapts


@pytest.mark.parametrize("name", METHODS)
def test_every_field_and_every_class_is_documented(name):
    method = METHODS[name]
    source = inspect.getsource(method)
    assert not method.__doc__.startswith(f"{method.__name__}(")  # what dataclasses write if there is none
    for field in inspect.get_annotations(method):
        assert f"\n    {field}: " in source
        _, _, after = source.partition(f"\n    {field}: ")
        assert after.splitlines()[1].lstrip().startswith('"""'), f"{name}.{field} has no docstring"


def test_a_model_that_is_more_than_its_weights_has_no_posterior():
    with pytest.raises(UserError, match="BNFed has no distribution over weights: use"):
        weights_posterior(BNFed(), None)
