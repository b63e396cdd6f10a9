"""What a plan allows, and which one is chosen."""

import dataclasses
from types import SimpleNamespace

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
from pfedbayes.engine import plan as plan_module
from pfedbayes.engine.backend.local_training import LocalTraining
from pfedbayes.engine.plan import (
    Plan,
    _chunk,
    choose_device,
    choose_plan,
    has_compiler,
    is_long,
    largest_batch,
    plan_for,
    run_size,
)
from pfedbayes.errors import UserError
from pfedbayes.methods import METHODS, FedAvg, PFedBayes
from pfedbayes.nets import vgg
from pfedbayes.nets.convolutions import MatmulConv2d


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


DENSE, IMAGES = make_model(), make_model(vgg())
LONG = 10**9
HERE = {"device": "cpu", "threads": torch.get_num_threads()}


class TestChosenPlan:
    """The whole plan, on machines with and without a GPU and a compiler."""

    def choose(self, monkeypatch, *arguments, gpu=True, compiler=True, **options):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(plan_module, "has_compiler", lambda device: compiler)
        return choose_plan(*arguments, **options)

    @pytest.mark.parametrize(
        ("model", "method", "options", "expected"),
        [
            (DENSE, "pfedbayes", {}, {"device": "cuda", "graph": True, "noise": "philox"}),
            (DENSE, "pfedbayes", {"gpu": False}, HERE),
            (DENSE, "pfedbayes", {"device": "cpu", "dtype": "float64"}, HERE | {"dtype": "float64"}),
            (DENSE, "pfedbayes", {"device": "cpu", "client_steps": LONG}, HERE | {"compile": True}),
            (DENSE, "pfedbayes", {"device": "cpu", "client_steps": LONG, "compiler": False}, HERE),
            (DENSE, "pfedbayes", {"device": "cpu", "client_steps": LONG, "over": "loop"}, HERE | {"over": "loop"}),
            (DENSE, "pfedbayes", {"over": "loop"}, {"device": "cuda", "over": "loop"}),
            (DENSE, "bnfed", {"client_steps": LONG}, {"device": "cuda", "noise": "philox"}),
            (IMAGES, "pfedbayes", {"device": "cpu", "client_steps": LONG}, HERE | {"over": "loop"}),
            (IMAGES, "pfedbayes", {"device": "cpu", "client_steps": LONG, "over": "vmap"}, HERE),
            (
                IMAGES,
                "pfedbayes",
                {"client_steps": LONG},
                {"device": "cuda", "compile": True, "graph": True, "noise": "philox", "precision": "tf32"}
                | {"convolutions": "matmul"},
            ),
            (
                IMAGES,
                "pfedbayes",
                {"dtype": "float64"},
                {"device": "cuda", "graph": True, "noise": "philox", "dtype": "float64", "convolutions": "matmul"},
            ),
            (
                IMAGES,
                "pfedgp",
                {},
                {
                    "device": "cuda",
                    "noise": "philox",
                    "convolutions": "matmul",
                    "graph": not METHODS["pfedgp"]().needs.eager,
                },
            ),
        ],
    )
    def test_by_model_method_and_machine(self, monkeypatch, model, method, options, expected):
        assert self.choose(monkeypatch, model, METHODS[method](), **options) == Plan(**expected)

    def test_a_run_is_long_from_three_billion_updates_on(self):
        model = SimpleNamespace(net=SimpleNamespace(num_params=10))
        assert not is_long(model, 3 * 10**8)
        assert is_long(model, 3 * 10**8 + 1)

    @pytest.mark.parametrize(
        ("count", "most", "chunk"), [(13, 13, None), (14, 13, 7), (15, 13, 13), (102, 12, 12), (36, 13, 12), (3, 1, 1)]
    )
    def test_chunks_are_equal_if_they_need_not_be_too_small(self, count, most, chunk):
        assert _chunk(count, most) == chunk

    def test_of_large_models_one_is_trained_at_a_time(self):
        large = SimpleNamespace(net=SimpleNamespace(num_params=2**20 + 1, convolutional=False, num_units=None))
        assert choose_plan(large, PFedBayes(), "cpu", at_once=5).chunk == 1

    @pytest.mark.parametrize(
        ("params", "units", "largest", "chunk"),
        [
            (2**18, None, 0, 4), (2**17, None, 100, None), (2**17 + 1, None, 0, 7), (2**10, None, 2**20, None),
            (2**10, 2**8, 2**10, 4), (2**10, 2**8, 2**9, None), (2**18, 2**8, 2**9, 4), (2**10, 2**8, 2**20, 1),
        ],
    )  # fmt: skip
    def test_what_a_cpu_trains_at_once_fits_its_caches(self, params, units, largest, chunk):
        """2**20 parameters, and as many hidden units of the examples."""
        model = SimpleNamespace(net=SimpleNamespace(num_params=params, convolutional=False, num_units=units))
        # Eight clients, or fourteen so that seven are half of them.
        count = 14 if chunk == 7 else 8
        assert choose_plan(model, PFedBayes(), "cpu", at_once=count, largest=largest).chunk == chunk

    def test_the_largest_mini_batch(self):
        shards = make_shards()  # the largest client has 23 examples
        sizes = [(FedAvg(), 6, 6), (FedAvg(), 50, 23), (METHODS["hierarchical"](), 6, 23)]
        for method, batch_size, expected in sizes:
            assert largest_batch(shards, method, dataclasses.replace(TRAINING, batch_size=batch_size)) == expected

    def test_the_size_of_a_run(self):
        training = dataclasses.replace(TRAINING, rounds=7, local_steps=4, participants=3)
        assert run_size(PFedBayes(), training, 5, 2) == (7 * 4 * 5 * 2, 10)  # pFedBayes trains all clients
        assert run_size(METHODS["fedavg"](), training, 5, 2) == (7 * 4 * 3 * 2, 6)
        everybody = dataclasses.replace(training, participants=None)
        assert run_size(METHODS["fedavg"](), everybody, 5, 2) == (7 * 4 * 5 * 2, 10)
        assert run_size(METHODS["pooled"](), training, 5, 2) == (7 * 4 * 1 * 2, 2)
        planned = plan_for(DENSE, PFedBayes(), training, 5, 2, "cpu", "float64", "loop")
        assert planned == Plan("cpu", "loop", threads=torch.get_num_threads(), dtype="float64")

    def test_devices(self, monkeypatch):
        for gpu, found in ((True, "cuda"), (False, "cpu")):
            monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
            assert (choose_device("auto"), choose_device("cpu")) == (found, "cpu")
        with pytest.raises(UserError, match="there is no device 'tpu'"):
            choose_device("tpu")

    def test_compilers(self, monkeypatch):
        for command, found in (("sh", True), ("no-such-compiler", False)):
            monkeypatch.setenv("CXX", command)
            assert has_compiler("cpu") is found
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "triton" else name)
        assert not has_compiler("cuda")

    def test_freed_memory_is_kept_where_a_cpu_trains_in_chunks(self, monkeypatch):
        calls = []
        monkeypatch.setattr(plan_module, "keep_freed_memory", lambda: calls.append(1))
        for plan in (Plan(), Plan("cuda", chunk=2)):
            plan.activate()
        assert calls == []
        Plan(chunk=2).activate()
        assert calls == [1]

    def test_what_is_shown_to_users(self):
        assert Plan().describe() == ["cpu", "vmap"]
        gpu = Plan("cuda", compile=True, graph=True, noise="philox", precision="bf16")
        assert gpu.describe() == ["cuda", "vmap", "compiled", "replayed", "bf16"]

    def test_the_network_is_computed_as_the_plan_says(self):
        for kind, found in (("matmul", True), ("native", False)):
            fitted = Plan(convolutions=kind).fit(IMAGES).net
            assert any(isinstance(layer, MatmulConv2d) for layer in fitted._module.modules()) is found
        for device, compiled in (("cuda", True), ("cuda", False), ("cpu", True), ("cpu", False)):
            plan = Plan(device, compile=compiled)
            assert plan.fit(DENSE).net._contiguous is (device == "cuda" and compiled)

    @pytest.mark.parametrize(
        ("precision", "tf32", "half"), [("full", False, False), ("tf32", True, False), ("bf16", False, True)]
    )
    def test_torchs_switches(self, precision, tf32, half):
        plan = Plan(precision=precision, threads=1)
        try:
            plan.activate()
            assert torch.backends.cudnn.deterministic
            assert torch.backends.cudnn.allow_tf32 is tf32
            assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
            assert torch.get_num_threads() == 1
            assert plan.fit(DENSE).half is half
        finally:
            Plan().activate()


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

    @pytest.mark.parametrize("faster", ["vmap", "loop"])
    def test_the_one_with_the_best_of_three_times_is_chosen(self, monkeypatch, faster):
        """Four clients take one step. Only the third call of the faster one is faster than the other one's calls."""
        seconds = {over: [9.0, 3.0, 1.0] if over == faster else [2.0, 2.0, 2.0] for over in ("vmap", "loop")}
        clock, asked = [0.0], []

        def train(self, clients, received, shard, work):
            asked.append((len(work.rows), work.rows.shape[2], len(work.weight), work.names.shape))
            clock[0] += seconds[self._plan.over].pop(0)

        monkeypatch.setattr(LocalTraining, "__call__", train)
        monkeypatch.setattr("pfedbayes.engine.backend.timing.time", SimpleNamespace(perf_counter=lambda: clock[0]))
        assert self.ask(plan=dataclasses.replace(EXACT, over="loop")).faster_over() == faster
        assert asked == [(1, 4, 4, (1, 4))] * 6
        assert seconds == {"vmap": [], "loop": []}

    def test_short_runs_and_dense_nets_are_not_asked(self):
        assert self.ask(training=TRAINING, plan=dataclasses.replace(EXACT, over="loop")).faster_over() is None
        assert federation(PFedBayes(), training=self.long).faster_over() is None
