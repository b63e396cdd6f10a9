"""Rounds on a GPU are those of a CPU."""

import dataclasses

import pytest
import torch

from execution_plans import (
    BEYOND,
    ON_GPU,
    PHILOX,
    agree,
    fixed_shapes,
    needs_gpu,
    resumes,
)
from federations import (
    TRAINING,
    federation,
    trained,
)
from pfedbayes.errors import Diverged
from pfedbayes.methods import METHODS, FedAvg, PFedBayes


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
