"""Compiled steps, replayed rounds, other noise and other convolutions: the same results, to rounding."""

import copy
import dataclasses
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.testing import assert_close

from federations import (
    EXACT,
    TRAINING,
    client_states,
    difference,
    federation,
    make_model,
    make_shards,
    randn,
    same_bits,
    trained,
)
from pfedbayes.engine.backend.batches import lay_out
from pfedbayes.engine.backend.compiled import Compiled, _split_by_layer
from pfedbayes.engine.backend.local_training import LocalTraining, Views
from pfedbayes.engine.backend.replayed import FixedSizeBatches
from pfedbayes.engine.participation import choose
from pfedbayes.engine.plan import Plan, choose_plan, has_compiler
from pfedbayes.errors import Diverged, UserError
from pfedbayes.methods import METHODS, FedAvg, PFedBayes
from pfedbayes.nets import Batch, Net, mlp, vgg
from pfedbayes.nets.convolutions import replace_convolutions
from pfedbayes.nets.layers import describe

COMPILED = dataclasses.replace(EXACT, compile=True)
PHILOX = dataclasses.replace(EXACT, noise="philox")
ON_GPU = dataclasses.replace(PHILOX, device="cuda", threads=None)
ROUNDING = 1e-10
BEYOND = {"eta_data": 0.1, "sigma_by_size": 1.0}  # of pFedBayes, beyond the paper

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_compiler = pytest.mark.skipif(not has_compiler("cpu"), reason="needs a C++ compiler")


def agree(left, right):
    """Whether servers and clients of two federations are the same but for rounding."""
    ours, theirs = client_states(left), client_states(right)
    assert list(ours) == list(theirs)
    pairs = [(left.servers, right.servers), *((ours[i], theirs[i]) for i in ours)]
    return all(difference(_home(a), _home(b)) < ROUNDING for a, b in pairs)


def _home(tree):
    return tuple(_home(part) for part in tree) if not isinstance(tree, torch.Tensor) else tree.cpu()


def resumes(plan):
    """Whether a run that was saved after its first round goes on to the same bits."""
    whole, first, second = (federation(PFedBayes(), plan=plan) for _ in range(3))
    for _ in range(3):
        whole.train_round()
    first.train_round()
    second.restore(first.tensors(), 1)
    for _ in range(2):
        second.train_round()
    return same_bits(tuple(whole.tensors().values()), tuple(second.tensors().values()))


def fixed_shapes(names):
    return [name for name in names if not METHODS[name]().needs.loop and not METHODS[name]().needs.eager]


@needs_compiler
class TestCompiled:
    @pytest.mark.parametrize("method", [PFedBayes(samples=2, **BEYOND), FedAvg(), METHODS["heurfedamp"]()])
    def test_results_are_those_without_a_compiler(self, method):
        assert agree(trained(method, plan=COMPILED), trained(method))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", fixed_shapes(METHODS))
    def test_results_are_those_without_a_compiler_for_every_method(self, name):
        assert agree(trained(METHODS[name](), plan=COMPILED), trained(METHODS[name]()))

    @pytest.mark.slow
    def test_a_whole_population_of_seeds_and_chunks_agrees(self):
        plan, seeds = dataclasses.replace(COMPILED, chunk=3, noise="philox"), (1, 2)
        assert agree(trained(PFedBayes(), plan=plan, seeds=seeds), trained(PFedBayes(), plan=PHILOX, seeds=seeds))

    def test_a_resumed_run_has_the_same_bits(self):
        assert resumes(COMPILED)

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
    def test_a_tensor_given_twice_is_two_arguments(self, device):
        minus = Compiled(lambda a, b: a - b)
        x, y = randn(4).to(device), randn(4, seed=1).to(device)
        before = counters["stats"]["unique_graphs"]
        assert_close(minus(x, x), torch.zeros_like(x))
        assert_close(minus(x, y), x - y)
        assert counters["stats"]["unique_graphs"] == before + (device == "cuda")  # and one program does both

    def test_every_set_of_shapes_has_its_own_program(self):
        double = Compiled(lambda pair: (2 * pair[0], pair[1] + pair[0].sum()))
        for size in (3, 5):
            x, y = randn(size), randn(2)
            assert_close(double((x, y)), (2 * x, y + x.sum()))


class TestByLayers:
    """Arithmetic goes through a concatenation, where that does not change what comes out."""

    @staticmethod
    def traced(function, *arguments):
        before = make_fx(function)(*arguments)
        after = make_fx(function)(*arguments)
        _split_by_layer(after.graph)
        after.recompile()
        after.graph.lint()
        assert_close(after(*arguments), before(*arguments), rtol=0, atol=0)
        return [node.target for node in after.graph.nodes if node.op == "call_function"]

    def test_a_step_of_a_gradient_is_put_together_last(self):
        def step(theta, w, size, a, b):
            return theta - 0.1 * (torch.cat([a, b], dim=1) / size + 2 * (theta - w))

        theta, w = randn(3, 7), randn(3, 7, seed=1)
        targets = self.traced(step, theta, w, randn(3, 1, seed=2), randn(3, 5, seed=3), randn(3, 2, seed=4))
        assert targets[-1] is torch.ops.aten.cat.default
        assert targets.count(torch.ops.aten.cat.default) == 1

    @pytest.mark.parametrize(
        "function",
        [
            lambda a, b: torch.cat([a, b], dim=0) * 2,  # along another axis
            lambda a, b: (
                torch.cat([a, b], dim=1).square() * (joined := torch.cat([a, b], dim=1)) + joined
            ),  # used twice
            lambda a, b: torch.cat([a, b], dim=1) + a.sum().expand(2, 3, 8),  # of another shape
            lambda a, b: torch.cat([a, b.float()], dim=1) * 2,  # of another type
            lambda a, b: torch.cat([a, b], dim=1).float() * torch.cat([a, b.float()], dim=1)[:1],  # both
            lambda a, b: torch.cat([a, b], dim=1).exp(),  # no arithmetic
        ],
    )
    def test_what_it_does_not_know_stays(self, function):
        arguments = randn(3, 4), randn(3, 4, seed=1)
        expected = [node.target for node in make_fx(function)(*arguments).graph.nodes if node.op == "call_function"]
        assert self.traced(function, *arguments) == expected

    def test_numbers_on_either_side_and_both_being_vectors(self):
        def function(a, b, row):
            first, second = torch.cat([a, b], dim=-1), torch.cat([b, a], dim=-1)
            return 1 - first * row, second / 3, torch.cat([a, a], dim=1) - torch.cat([b, b], dim=1)

        a, b = randn(3, 4), randn(3, 4, seed=1)
        self.traced(function, a, b, randn(8, seed=2))

    def test_layers_that_are_written_to_afterwards(self):
        def function(a, b):
            a = a + 0
            vector = torch.cat([a, b], dim=1)
            a.zero_()
            return vector * 2

        self.traced(function, randn(3, 4), randn(3, 4, seed=1))


def test_where_compiling_fails_the_run_goes_on_without_it(monkeypatch):
    def fails(*_, **__):
        def never(*_):
            raise RuntimeError("no compiler\nand many lines more")

        return never

    monkeypatch.setattr("torch._inductor.compile", fails)
    with pytest.warns(UserWarning, match=r"goes on without it \(no compiler\)$"):
        ours = trained(PFedBayes(), plan=COMPILED)
    assert not ours.plan.compile
    assert same_bits(ours.servers, trained(PFedBayes()).servers)


class TestPhilox:
    def test_a_clients_noise_does_not_depend_on_how_clients_are_trained(self):
        by_loop = trained(PFedBayes(), plan=dataclasses.replace(PHILOX, over="loop"))
        assert agree(trained(PFedBayes(), plan=PHILOX), by_loop)

    def test_it_is_other_noise_than_torchs(self):
        assert difference(trained(PFedBayes(), 1, plan=PHILOX).servers, trained(PFedBayes(), 1).servers) > 1e-4

    def test_methods_without_noise_do_not_care(self):
        assert agree(trained(FedAvg(), plan=PHILOX), trained(FedAvg()))


def batches(ours):
    """The mini-batches of round 1, from where the clients have read to."""
    return lay_out(ours.setup, 1, choose(ours.setup, 1), ours.state.cursors)


class TestViews:
    FLIPPED = dataclasses.replace(TRAINING, flip=True)
    MOVED = dataclasses.replace(TRAINING, flip=True, shift=1)

    def federation_of_images(self, method, symmetric=False, **others):
        """Clients whose examples are images of 3 x 4 pixels, each its own mirror image if asked for."""
        shards = make_shards(features=12)
        x = shards.x.view(-1, 1, 3, 4)
        shards = dataclasses.replace(shards, x=(x + x.flip(-1)) / 2 if symmetric else x)
        model = make_model(mlp([12, 4, 3], "tanh"))
        return trained(method, shards=shards, model=model, **{"training": self.FLIPPED} | others)

    def test_the_odd_view_of_two_is_the_mirror_image(self):
        x, y = randn(5, 2, 3, 4), torch.arange(5)
        local = LocalTraining(FedAvg(), make_model(), x, y, EXACT, Views(flip=True))
        batch = local._gather(x, y, torch.tensor([[6, 7, 1]]), torch.ones(1, 3))
        assert batch.x[0].equal(torch.stack([x[3], x[3].flip(-1), x[0].flip(-1)]))
        assert batch.y.tolist() == [[3, 3, 0]]

    @pytest.mark.parametrize("flip", [False, True])
    def test_every_view_is_an_image_moved_over_a_canvas_that_repeats_its_edge(self, flip):
        x = randn(2, 2, 4, 5)
        views = Views(flip, shift=2)
        seen, rows = views.apply(x, torch.arange(2 * views.count))
        assert rows.tolist() == [0] * views.count + [1] * views.count
        canvas = functional.pad(x, (2, 2, 2, 2), mode="replicate")
        moved = [canvas[:, :, up : up + 4, left : left + 5] for up in range(5) for left in range(5)]
        expected = torch.stack([side for one in moved for side in ([one, one.flip(-1)] if flip else [one])], 1)
        assert len({image.numpy().tobytes() for image in seen}) == len(seen)
        assert {image.numpy().tobytes() for image in seen} == {
            image.numpy().tobytes() for image in expected.flatten(0, 1)
        }
        assert seen[rows == 0].flatten(1).unique(dim=0).equal(expected[0].flatten(1).unique(dim=0))

    def test_half_of_the_images_are_mirrored_and_every_draw_has_its_name(self):
        one = self.federation_of_images(FedAvg(), seeds=(1, 2))
        rows = batches(one).rows
        assert 0.35 < (rows % 2).mean() < 0.65
        plain = self.federation_of_images(FedAvg(), seeds=(1, 2), training=TRAINING)
        assert (rows // 2 == batches(plain).rows).all()
        alone = batches(self.federation_of_images(FedAvg(), seeds=(2,)))
        assert (alone.rows == rows[:, :, rows.shape[2] // 2 :]).all()  # the second seed's half
        steps = (rows % 2).reshape(len(rows), -1)
        assert len({step.tobytes() for step in steps}) == len(steps)

    def test_all_views_come_about_equally_often(self):
        rows = batches(self.federation_of_images(FedAvg(), seeds=tuple(range(40)), training=self.MOVED)).rows
        counts = np.bincount((rows % 18).ravel(), minlength=18) / rows.size
        assert abs(counts - 1 / 18).max() < 5 * (1 / 18 / rows.size) ** 0.5

    @pytest.mark.parametrize("method", [PFedBayes(), FedAvg(), METHODS["perfedavg"]()])
    @pytest.mark.parametrize("training", [FLIPPED, MOVED])
    def test_results_do_not_depend_on_how_clients_are_trained(self, method, training):
        run = partial(self.federation_of_images, method, training=training)
        together = run()
        assert agree(together, run(plan=dataclasses.replace(EXACT, over="loop")))
        assert agree(together, run(plan=dataclasses.replace(EXACT, chunk=2)))
        assert difference(together.servers, self.federation_of_images(method, training=TRAINING).servers) > 1e-4

    @needs_compiler
    def test_results_are_those_without_a_compiler(self):
        run = partial(self.federation_of_images, PFedBayes(), training=self.MOVED)
        assert agree(run(), run(plan=COMPILED))

    def test_images_that_are_their_own_mirror_images_train_as_without(self):
        with_flips, without = (
            self.federation_of_images(PFedBayes(), symmetric=True, training=training)
            for training in (self.FLIPPED, TRAINING)
        )
        assert same_bits(with_flips.servers, without.servers)

    def test_what_is_no_image_is_refused(self):
        with pytest.raises(UserError, match=r"training\.flip and \.shift are for images"):
            federation(FedAvg(), training=self.MOVED)

    def test_images_do_not_leave_the_picture(self):
        self.federation_of_images(FedAvg(), training=dataclasses.replace(self.MOVED, shift=2))
        with pytest.raises(UserError, match=r"training\.shift=3 moves images of 3 x 4 pixels out of sight"):
            self.federation_of_images(FedAvg(), training=dataclasses.replace(self.MOVED, shift=3))

    @needs_gpu
    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_gpu_replays_them(self, compiled):
        plan = dataclasses.replace(ON_GPU, graph=True, compile=compiled)
        run = partial(self.federation_of_images, PFedBayes(), training=self.MOVED)
        assert agree(run(plan=plan), run(plan=PHILOX))


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


class TestPlan:
    @pytest.mark.parametrize(
        "settings",
        [
            {"graph": True},
            {"graph": True, "device": "cuda"},
            {"graph": True, "device": "cuda", "noise": "philox", "over": "loop"},
            {"compile": True, "over": "loop"},
        ],
    )
    def test_what_does_not_go_together_is_refused(self, settings):
        with pytest.raises(UserError, match=r"execution\.(graph|compile)"):
            Plan(**settings)

    def test_on_another_device_it_has_nothing_that_only_its_own_has(self):
        gpu = Plan("cuda", noise="philox", graph=True, precision="tf32", convolutions="matmul", resting="host")
        assert gpu.on("cuda") == gpu
        assert gpu.on("cpu") == Plan("cpu", threads=torch.get_num_threads(), noise="philox", resting="host")

    @pytest.mark.parametrize("settings", [{"compile": True}, {"device": "cuda", "graph": True, "noise": "philox"}])
    def test_models_that_change_size_are_neither_compiled_nor_replayed(self, settings):
        with pytest.raises(UserError, match="BNFed can be neither compiled"):
            federation(METHODS["bnfed"](), plan=Plan(**settings))

    def test_convolutions_on_a_gpu_are_rounded_unless_the_method_does_not_bear_it(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        model = make_model(vgg())
        assert choose_plan(model, PFedBayes(), "cuda").precision == "tf32"
        assert choose_plan(model, METHODS["pfedgp"](), "cuda").precision == "full"

    def test_long_runs_are_compiled_and_short_ones_are_not(self):
        model = make_model()
        assert not choose_plan(model, PFedBayes(), "cpu", client_steps=100).compile
        assert choose_plan(model, PFedBayes(), "cpu", client_steps=10**9).compile == has_compiler("cpu")
        assert not choose_plan(model, METHODS["bnfed"](), "cpu", client_steps=10**9).compile

    @pytest.mark.parametrize(("at_once", "chunk"), [(13, None), (100, 10), (101, 13), (26, 13)])
    def test_a_cpu_trains_as_many_clients_at_a_time_as_its_caches_hold(self, at_once, chunk):
        model = make_model(nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)))
        assert choose_plan(model, PFedBayes(), "cpu", at_once=at_once).chunk == chunk


class TestFasterOver:
    """Convolutions on a CPU go by loop or by vmap, whichever was seen to be faster."""

    long = dataclasses.replace(TRAINING, rounds=10**6)
    shards = dataclasses.replace(make_shards(), x=randn(100, 3, 32, 32, seed=7))

    def ask(self, training=long, **others):
        return federation(PFedBayes(), training=training, shards=self.shards, model=make_model(vgg(3)), **others)

    def test_it_is_measured_and_nothing_is_trained(self):
        ours = self.ask(plan=dataclasses.replace(EXACT, over="loop"))
        before = ours.tensors()
        assert ours.faster_over() in ("vmap", "loop")
        assert same_bits(tuple(before.values()), tuple(ours.tensors().values()))

    @pytest.mark.parametrize("slow", ["vmap", "loop"])
    def test_the_faster_one_is_chosen(self, monkeypatch, slow):
        train = LocalTraining.__call__

        def slowed(self, *arguments):
            time.sleep(0.5 * (self._plan.over == slow))
            return train(self, *arguments)

        monkeypatch.setattr(LocalTraining, "__call__", slowed)
        assert self.ask(plan=dataclasses.replace(EXACT, over="loop")).faster_over() != slow

    def test_short_runs_and_dense_nets_are_not_asked(self):
        assert self.ask(training=TRAINING, plan=dataclasses.replace(EXACT, over="loop")).faster_over() is None
        assert federation(PFedBayes(), training=self.long).faster_over() is None


@needs_gpu
class TestGPU:
    GRAPH = dataclasses.replace(ON_GPU, graph=True)

    @pytest.mark.parametrize("name", fixed_shapes(METHODS))
    def test_replayed_rounds_are_those_of_a_cpu(self, name):
        assert agree(trained(METHODS[name](), plan=self.GRAPH), trained(METHODS[name](), plan=PHILOX))

    @pytest.mark.parametrize("method", [PFedBayes(samples=2), PFedBayes(**BEYOND), FedAvg(), METHODS["pfedme"]()])
    def test_compiled_and_replayed_rounds_are_those_of_a_cpu(self, method):
        plan = dataclasses.replace(self.GRAPH, compile=True)
        assert agree(trained(method, plan=plan), trained(method, plan=PHILOX))

    def test_chunks_and_seeds_agree_too(self):
        plan = dataclasses.replace(self.GRAPH, chunk=3)
        seeds = (1, 2)
        assert agree(trained(PFedBayes(), plan=plan, seeds=seeds), trained(PFedBayes(), plan=PHILOX, seeds=seeds))

    def test_clients_that_rest_on_the_host_or_in_a_file_agree(self):
        training = dataclasses.replace(TRAINING, train="chosen")
        expected = trained(PFedBayes(), plan=PHILOX, training=training)
        for resting in ("device", "host", "file"):
            plan = dataclasses.replace(self.GRAPH, resting=resting)
            assert agree(trained(PFedBayes(), plan=plan, training=training), expected)

    def test_a_resumed_run_has_the_same_bits(self):
        assert resumes(self.GRAPH)

    def test_divergence_is_found_later_and_leaves_the_state_of_the_round_before(self):
        ours, good = (federation(PFedBayes(), plan=self.GRAPH) for _ in range(2))
        for _ in range(2):
            ours.train_round()
            good.train_round()
        ours.confirm()
        broken = ours.population.get(list(range(5)), ours._fresh_clients)
        broken.q[3, 0, 0] = torch.nan
        ours.population.put(list(range(5)), broken)
        before = {name: value.clone() for name, value in ours.tensors().items()}
        for _ in range(4):
            ours.train_round()
        with pytest.raises(Diverged, match="round 3: site 3"):
            ours.confirm()
        assert ours.round == 2
        after = ours.tensors()
        assert all(torch.equal(after[name], value) or value.isnan().any() for name, value in before.items())
