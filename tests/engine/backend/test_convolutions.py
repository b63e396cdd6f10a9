"""Convolutions as matrix products compute what torch's do."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from execution_plans import (
    ON_GPU,
    needs_gpu,
)
from federations import (
    EXACT,
    difference,
    make_model,
    make_shards,
    randn,
    trained,
)
from pfedbayes.engine.backend.replayed import FixedSizeBatches
from pfedbayes.engine.plan import Plan
from pfedbayes.methods import PFedBayes
from pfedbayes.nets import Batch, Net, vgg
from pfedbayes.nets.convolutions import replace_convolutions
from pfedbayes.nets.layers import describe


class TestConvolutions:
    MODULES = (
        vgg,
        lambda: vgg(norm="group"),
        lambda: nn.Sequential(
            nn.Conv2d(3, 5, (3, 2), stride=(2, 3), padding=(1, 0), dilation=(1, 2), bias=False),
            nn.ReLU(),
            nn.Flatten(),
            nn.LazyLinear(4),
        ),
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, padding="same"),
            nn.Conv2d(6, 6, 3, groups=2),
            nn.Flatten(),
            nn.LazyLinear(4),
        ),
        lambda: nn.Sequential(nn.Conv2d(3, 4, (5, 3)), nn.Conv2d(4, 3, (4, 2)), nn.Flatten(), nn.LazyLinear(4)),
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2), nn.Conv2d(4, 3, 2, stride=3), nn.Flatten(), nn.LazyLinear(4)
        ),
        # 30, 15 and 7 pixels, 5 and 2, and 1: with maxima of tiles that are even, odd, and not the convolution's.
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 5, 3, padding=1),
            nn.MaxPool2d((2, 2), stride=2),
            nn.Conv2d(5, 3, 3),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2, stride=1), nn.ReLU()),
            nn.Flatten(),
            nn.LazyLinear(4),
        ),
    )

    @pytest.mark.parametrize("make", MODULES)
    def test_matrix_products_are_the_same_function_with_the_same_gradient(self, make):
        module = make()
        x, y, weight = randn(2, 8, 3, 32, 32), torch.arange(16).view(2, 8) % 4, torch.ones(2, 8, dtype=torch.float64)
        module(x[0].float())
        native = make_model(module)
        ours = native._replace(net=native.net.fitted("matmul"))
        thetas = torch.stack([native.net.init(seed, "torch").double() for seed in (1, 2)])
        assert_close(ours.outputs(thetas[0], x[0]), native.outputs(thetas[0], x[0]))
        found, expected = (torch.func.vmap(m.grad_nll)(thetas, Batch(x, y, weight)) for m in (ours, native))
        assert_close(found, expected, rtol=1e-9, atol=1e-11)

    def test_of_equal_maxima_the_first_is_taken(self):
        native = make_model(
            nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4))
        )
        ours = native._replace(net=native.net.fitted("matmul"))
        x = (randn(5, 1, 8, 8, seed=1) > 0).double()  # few values, so that weights of +-1 often give the same
        theta = native.net.init(1, "torch").double()
        theta[:30] = theta[:30].sign()
        batch = Batch(x, torch.arange(5) % 4, torch.ones(5, dtype=torch.float64))
        assert_close(ours.grad_nll(theta, batch), native.grad_nll(theta, batch), rtol=1e-9, atol=1e-11)

    def test_layers_may_be_used_more_than_once_and_in_part(self):
        class Skips(nn.Module):
            def __init__(self):
                super().__init__()
                conv = nn.Conv2d(3, 3, 3, padding=1)
                self.row = nn.Sequential(conv, nn.ReLU(), nn.MaxPool2d(2), conv, nn.Tanh())
                self.last = nn.Linear(3, 4)

            def forward(self, x):
                h = self.row[:2](x)
                return self.last(h.mean((2, 3)) + self.row[2](h).mean((2, 3)) + self.row(x).mean((2, 3)))

        native = make_model(Skips())
        ours = native._replace(net=native.net.fitted("matmul"))
        batch = Batch(randn(5, 3, 8, 8), torch.arange(5) % 4, torch.ones(5, dtype=torch.float64))
        theta = native.net.init(1, "torch").double()
        assert_close(ours.grad_nll(theta, batch), native.grad_nll(theta, batch), rtol=1e-9, atol=1e-11)

    def test_whoever_looks_at_a_layer_sees_what_it_gives(self):
        seen = []
        layers = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        layers[0].register_forward_hook(lambda *arguments: seen.append(arguments[-1].shape))
        x = randn(2, 3, 4, 4, dtype=torch.float32)
        expected = layers(x)
        assert_close(replace_convolutions(layers, "matmul")(x), expected)
        assert seen == [(2, 2, 4, 4)] * 2

    def test_the_module_that_is_given_out_is_the_one_that_came_in(self):
        net = Net(vgg())
        theta = net.init(1, "torch")
        assert describe(net.fitted("matmul").module(theta)) == describe(net.module(theta)) is not None

    def test_what_is_too_small_for_maxima_is_refused(self):
        layers = nn.Sequential(nn.Conv2d(1, 1, 3), nn.MaxPool2d(2))
        for module in (layers, replace_convolutions(copy.deepcopy(layers), "matmul")):
            with pytest.raises(RuntimeError):
                module(torch.ones(1, 1, 3, 3))

    def test_what_is_not_a_number_stays_so(self):
        conv = nn.Conv2d(1, 2, 1)
        ours = replace_convolutions(nn.Sequential(conv, nn.MaxPool2d(2)), "matmul")
        for place in range(4):
            x = torch.ones(1, 1, 4, 4)
            x[0, 0, place // 2, place % 2] = torch.nan
            assert ours(x).isnan().sum() == 2

    def test_the_network_as_it_was_is_left_alone(self):
        net = Net(vgg())
        net.fitted("matmul")
        assert {type(part) for part in net._module.modules() if isinstance(part, nn.Conv2d)} == {nn.Conv2d}

    def test_groups_are_normalised_as_well_in_half_precision_as_torch_does(self):
        x = randn(3, 8, 4, 4, dtype=torch.float32) + 10
        native = nn.GroupNorm(2, 8)
        half = nn.GroupNorm(2, 8).bfloat16()
        ours = replace_convolutions(nn.Sequential(nn.GroupNorm(2, 8).bfloat16()), "matmul")
        errors = [(module(x.bfloat16()).float() - native(x)).abs().max() for module in (ours, half)]
        assert errors[0] <= 1.5 * errors[1]

    def test_parts_are_filled_up_and_put_together(self, monkeypatch):
        sizes = []
        monkeypatch.setattr("pfedbayes.engine.backend.replayed.Replayed", lambda program: program)
        monkeypatch.setattr("pfedbayes.engine.backend.replayed.Compiled", lambda network: network)
        parts = FixedSizeBatches(lambda theta, x: [sizes.append(len(x)), theta * x][1], rows=3)
        x = randn(8, 2)
        assert torch.equal(parts(torch.tensor(2.0, dtype=x.dtype), x), 2 * x)
        assert sizes == [3, 3, 3]

    @pytest.mark.parametrize("plan", [EXACT, pytest.param(ON_GPU, marks=needs_gpu, id="gpu")])
    def test_predictions_are_those_of_one_network_after_another(self, plan):
        shards = dataclasses.replace(make_shards(), x=randn(100, 3, 8, 8, seed=7))
        module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        fast = {"graph": True, "compile": True} if plan is ON_GPU else {}
        both, alone = (
            trained(PFedBayes(), plan=plan, shards=shards, model=make_model(module), seeds=seeds)
            for plan, seeds in ((dataclasses.replace(plan, convolutions="matmul", **fast), (1, 2)), (plan, (2,)))
        )
        assert isinstance(both.predictor.net._instead, FixedSizeBatches) == bool(fast)
        found, expected = both.evaluate(), alone.evaluate()
        for which in ("personal", "shared"):
            for estimator, scores in expected[which].items():
                assert_close(torch.tensor(found[which][estimator]["nll"][1]), torch.tensor(scores["nll"][0]))


class TestPrecision:
    def test_half_precision_is_close_and_comes_back_in_full(self):
        shards = dataclasses.replace(make_shards(), x=randn(100, 3, dtype=torch.float32))
        full = trained(PFedBayes(), plan=Plan(threads=1), shards=shards)
        half = trained(PFedBayes(), plan=Plan(threads=1, precision="bf16"), shards=shards)
        assert half.servers[0].dtype == torch.float32
        assert 0 < difference(half.servers, full.servers) < 0.05

    def test_every_way_to_predict_computes_in_it(self):
        full = make_model()
        half, theta, x = full._replace(half=True), full.net.init(1, "torch"), randn(5, 3, dtype=torch.float32)
        (stacked,) = half.stacked_outputs(theta[None], x)
        assert torch.equal(stacked, half.outputs(theta, x))
        assert not torch.equal(stacked, full.outputs(theta, x))
