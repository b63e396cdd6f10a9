import torch
from torch.testing import assert_close

from federations import randn
from pfedbayes.maths.stacked import broadcast, call_stacked, weighted_mean


class SumsOfPositives:
    """A function of stacked clients that vmap could not map: sizes follow from values."""

    def __init__(self):
        self.calls = 0

    def __call__(self, values, weights):
        self.calls += 1
        picked = [(own[own > 0] * weight).sum() for own, weight in zip(values, weights, strict=True)]
        return torch.stack(picked), (values > 0).sum(1)


class TestCallStacked:
    values, weights = randn(4, 6), randn(4, seed=1)

    def test_inside_vmap_it_is_called_once_for_all_clients(self):
        function = SumsOfPositives()
        mapped = torch.func.vmap(lambda *given: call_stacked(function, *given))(self.values, self.weights)
        assert function.calls == 1
        for one, expected in zip(mapped, function(self.values, self.weights), strict=True):
            assert one.equal(expected)

    def test_one_client_is_a_stack_of_one(self):
        sums, counts = SumsOfPositives()(self.values, self.weights)
        for k in range(4):
            total, count = call_stacked(SumsOfPositives(), self.values[k], self.weights[k])
            assert total.equal(sums[k])
            assert count.equal(counts[k])

    def test_the_result_has_no_gradient(self):
        sums, _ = call_stacked(SumsOfPositives(), self.values[0].clone().requires_grad_(), self.weights[0])
        assert not sums.requires_grad

    def test_what_clients_share_and_axes_elsewhere_are_stacked_too(self):
        function = SumsOfPositives()
        mapped, _ = torch.func.vmap(lambda *given: call_stacked(function, *given), in_dims=(1, None))(
            self.values.T, self.weights[0]
        )
        assert mapped.equal(function(self.values, self.weights[:1].expand(4))[0])


def test_broadcast_repeats_every_leaf_without_copies():
    tree = (randn(3), (randn(2, 2),))
    stacked = broadcast(tree, 5)
    for leaf, row in zip((tree[0], tree[1][0]), (stacked[0], stacked[1][0]), strict=True):
        assert row.equal(torch.stack([leaf] * 5))
        assert row.data_ptr() == leaf.data_ptr()


def test_weighted_mean_normalises_its_weights():
    stacked, weights = randn(3, 4), torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    assert_close(weighted_mean(stacked, weights), (stacked[0] + 2 * stacked[1] + 5 * stacked[2]) / 8)
