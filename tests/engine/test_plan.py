"""What a plan allows, and which one is chosen."""

import dataclasses
import time

import pytest
import torch
from torch import nn

from federations import (
    EXACT,
    TRAINING,
    federation,
    make_model,
    make_shards,
    randn,
    same_bits,
)
from pfedbayes.engine.backend.local_training import LocalTraining
from pfedbayes.engine.plan import Plan, choose_plan, has_compiler
from pfedbayes.errors import UserError
from pfedbayes.methods import METHODS, PFedBayes
from pfedbayes.nets import vgg


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

    @pytest.mark.parametrize("settings", [{"threads": 100_000}, {"threads": 2**31}, {"threads": 0}, {"chunk": 0}])
    def test_absurd_numbers_are_refused(self, settings):
        with pytest.raises(ValueError, match=f"{next(iter(settings))} must be"):
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
