import torch

from federations import randn
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.methods import FedAvg
from pfedbayes.methods.base import Needs, together


class SumsOfPositives:
    """A function of stacked clients that vmap could not map: sizes follow from values."""

    def __init__(self):
        self.calls = 0

    def __call__(self, values, weights):
        self.calls += 1
        picked = [(own[own > 0] * weight).sum() for own, weight in zip(values, weights, strict=True)]
        return torch.stack(picked), (values > 0).sum(1)


class TestTogether:
    values, weights = randn(4, 6), randn(4, seed=1)

    def test_inside_vmap_it_is_called_once_for_all_clients(self):
        function = SumsOfPositives()
        mapped = torch.func.vmap(lambda *given: together(function, *given))(self.values, self.weights)
        assert function.calls == 1
        for one, expected in zip(mapped, function(self.values, self.weights), strict=True):
            assert one.equal(expected)

    def test_one_client_is_a_stack_of_one(self):
        sums, counts = SumsOfPositives()(self.values, self.weights)
        for k in range(4):
            total, count = together(SumsOfPositives(), self.values[k], self.weights[k])
            assert total.equal(sums[k])
            assert count.equal(counts[k])

    def test_what_clients_share_and_axes_elsewhere_are_stacked_too(self):
        function = SumsOfPositives()
        mapped, _ = torch.func.vmap(lambda *given: together(function, *given), in_dims=(1, None))(
            self.values.T, self.weights[0]
        )
        assert mapped.equal(function(self.values, self.weights[:1].expand(4))[0])


def test_no_more_steps_are_asked_for_than_the_method_takes():
    class Two(FedAvg):
        needs = Needs(max_steps=2)

        def step(self, model, local, batches, noise):
            return local

    steps = iter([(batches, randn(0)) for batches in [()] * 5])
    client_round(Two(), None, (), randn(3), None, steps)
    assert len(list(steps)) == 3
