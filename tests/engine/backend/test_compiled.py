"""Compiled steps compute what eager steps do."""

import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from execution_plans import (
    BEYOND,
    COMPILED,
    PHILOX,
    agree,
    fixed_shapes,
    needs_compiler,
    needs_gpu,
    resumes,
)
from federations import (
    randn,
    same_bits,
    trained,
)
from pfedbayes.engine.backend.compiled import Compiled, _split_by_layer
from pfedbayes.methods import METHODS, FedAvg, PFedBayes


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
    with pytest.warns(UserWarning, match=r"continues without it \(no compiler\)$"):
        ours = trained(PFedBayes(), plan=COMPILED)
    assert not ours.plan.compile
    assert same_bits(ours.servers, trained(PFedBayes()).servers)
