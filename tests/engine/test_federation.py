import dataclasses

import pytest
import torch
from torch import nn

from execution_plans import needs_gpu
from federations import (
    EXACT,
    FEW,
    SIZES,
    TEST_SIZES,
    TRAINING,
    client_states,
    difference,
    federation,
    make_model,
    make_shards,
    pooled,
    randn,
    same_bits,
    trained,
)
from pfedbayes.data import Shards
from pfedbayes.engine.backend.local_training import LocalTraining, client_round
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import Plan, choose_device, choose_plan
from pfedbayes.engine.training import Training
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Classification
from pfedbayes.maths.random import choose
from pfedbayes.methods import FedAvg, PFedBayes
from pfedbayes.methods.base import Needs
from pfedbayes.nets import Model, Net, mlp, vgg


@dataclasses.dataclass(frozen=True)
class ByLoop(FedAvg):
    @property
    def needs(self):
        return Needs(loop=True)


@dataclasses.dataclass(frozen=True)
class Pooled(FedAvg):
    @property
    def needs(self):
        return Needs(pooled_data=True)


@dataclasses.dataclass(frozen=True)
class FullBatch(FedAvg):
    @property
    def needs(self):
        return Needs(full_batch=True, at_once=5)


class TestTraining:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("rounds", 0),
            ("local_steps", 0),
            ("batch_size", 0),
            ("evaluate_every", 0),
            ("participants", 0),
            ("seed", -1),
            ("shift", -1),
            ("evaluate_window", (0, 5)),
            ("evaluate_window", (8, 5)),
            ("server_rate", -0.1),
            ("server_momentum", 1.0),
        ],
    )
    def test_values_without_sense_are_refused(self, field, value):
        with pytest.raises(ValueError, match=field):
            Training(**{field: value})

    def test_defaults(self):
        assert dataclasses.asdict(Training()) == {
            "rounds": 200,
            "local_steps": 20,
            "batch_size": 100,
            "participants": None,
            "train": None,
            "evaluate_every": 10,
            "evaluate_window": None,
            "seed": 1,
            "flip": False,
            "shift": 0,
            "server_optimizer": "none",
            "server_rate": 1.0,
            "server_momentum": 0.9,
            "patience": None,
        }

    def test_a_window_of_one_round_is_one(self):
        training = Training(rounds=9, evaluate_every=9, evaluate_window=(1, 1))
        assert [round for round in range(1, 10) if training.evaluates(round)] == [1, 9]

    def test_window_holds_both_ends(self):
        training = Training(rounds=1000, evaluate_every=600, evaluate_window=(700, 800))
        evaluated = [round for round in range(1, 1001) if training.evaluates(round)]
        assert evaluated == [600, *range(700, 801), 1000]

    def test_last_round_is_always_evaluated(self):
        assert [round for round in range(1, 8) if Training(rounds=7, evaluate_every=3).evaluates(round)] == [3, 6, 7]


class TestPlan:
    def test_convolutions_are_looped_on_a_cpu_and_the_rest_is_mapped(self):
        assert choose_plan(make_model(), FedAvg(), "cpu").over == "vmap"
        assert choose_plan(make_model(vgg()), FedAvg(), "cpu").over == "loop"

    def test_a_method_that_cannot_be_mapped_is_looped_and_mapping_it_refused(self):
        assert choose_plan(make_model(), ByLoop(), "cpu").over == "loop"
        looped = trained(ByLoop(), plan=dataclasses.replace(EXACT, over="loop"))
        assert difference(looped.servers, trained(FedAvg()).servers) < 1e-12
        with pytest.raises(UserError, match="loop"):
            federation(ByLoop(), plan=EXACT)

    def test_a_looped_client_may_branch_on_values(self):
        @dataclasses.dataclass(frozen=True)
        class Branching(ByLoop):
            def step(self, model, local, batches, noise):
                return super().step(model, local, batches, noise) if float(local.theta.sum()) < 1e9 else local

        looped = trained(Branching(), plan=dataclasses.replace(EXACT, over="loop"))
        assert difference(looped.servers, trained(FedAvg()).servers) < 1e-12

    def test_a_cpu_takes_few_whole_training_sets_at_a_time(self):
        assert choose_plan(make_model(), FullBatch(), "cpu", at_once=10).chunk == 5
        assert choose_plan(make_model(), FedAvg(), "cpu", at_once=10).chunk is None

    def test_a_gpu_that_is_not_there_is_refused(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert choose_device("auto") == "cpu"
        with pytest.raises(UserError, match="GPU"):
            choose_device("cuda")

    def test_threads_are_set(self):
        Plan(threads=2).activate()
        assert torch.get_num_threads() == 2


class TestRounds:
    def test_counts_from_one_to_the_configured_number(self):
        running = federation(FedAvg())
        assert list(running.rounds()) == [1, 2, 3]
        assert list(running.rounds()) == []
        assert list(running.rounds(5)) == [4, 5]

    def test_until_zero_trains_nothing(self):
        assert list(federation(FedAvg()).rounds(0)) == []

    def test_more_participants_than_clients_are_refused(self):
        with pytest.raises(UserError, match=r"6.*5 clients"):
            federation(FedAvg(), training=Training(participants=6))

    def test_default_of_the_method_decides_who_trains(self):
        assert federation(FedAvg()).train == "chosen"
        assert federation(PFedBayes()).train == "all"

    def test_the_round_can_be_followed_by_hand(self):
        """client_round of one client, with batches and noise of one's own, needs no federation."""
        model, method = make_model(), FedAvg(eta=0.0)
        theta = model.net.init(1, "torch")
        assert same_bits(client_round(method, model, (), theta, None, [])[1], theta)


class TestMethodsHabits:
    def test_a_full_batch_is_the_whole_shard(self):
        large = dataclasses.replace(TRAINING, batch_size=1000)
        assert same_bits(trained(FullBatch()).servers, trained(FedAvg(), training=large).servers)

    def test_pooled_training_is_one_client_that_has_everything(self):
        shards, everybody = make_shards(), dataclasses.replace(TRAINING, participants=None)
        together = trained(Pooled())
        assert same_bits(together.servers, trained(FedAvg(), training=everybody, shards=pooled(shards)).servers)
        assert len(together.evaluate()["shared"]["mean"]["accuracy"][0]) == len(SIZES)


class TestServerOptimizer:
    """The server follows the average of the uploads; the way it would have gone at once is minus its gradient."""

    rounds = 3

    def follow(self, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The same federation with torch's optimiser at the server."""
        plain = federation(FedAvg(0.3))
        for _ in range(self.rounds):
            plain.servers = [parameter.detach().clone()]
            plain.train_round()
            parameter.grad = parameter.detach() - plain.servers[0]
            optimizer.step()
        return parameter.detach()

    @pytest.mark.parametrize(
        ("name", "make"),
        [
            ("momentum", lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.8)),
            ("adam", lambda parameters: torch.optim.Adam(parameters, lr=0.7, betas=(0.8, 0.99), eps=1e-3)),
        ],
    )
    def test_server_follows_like_torchs_optimiser(self, name, make):
        training = dataclasses.replace(TRAINING, server_optimizer=name, server_rate=0.7, server_momentum=0.8)
        parameter = nn.Parameter(federation(FedAvg()).servers[0].clone())
        expected = self.follow(make([parameter]), parameter)
        assert difference(trained(FedAvg(0.3), self.rounds, training=training).servers[0], expected) < 1e-12

    @pytest.mark.parametrize("name", ["momentum", "adam"])
    @pytest.mark.parametrize("method", [FedAvg(), PFedBayes()])
    def test_its_state_is_saved(self, name, method):
        training = dataclasses.replace(TRAINING, server_optimizer=name, server_rate=0.1)
        whole, first = trained(method, 3, training=training), trained(method, 1, training=training)
        second = federation(method, training)
        second.restore(first.tensors(), 1)
        assert list(second.rounds(3)) == [2, 3]
        assert same_bits(whole.servers, second.servers)

    def test_momentum_zero_and_rate_one_is_no_optimiser(self):
        training = dataclasses.replace(TRAINING, server_optimizer="momentum", server_rate=1.0, server_momentum=0.0)
        assert difference(trained(FedAvg(), training=training).servers, trained(FedAvg()).servers) < 1e-12

    @pytest.mark.parametrize("name", ["momentum", "adam"])
    def test_of_gaussians_it_moves_the_means_alone(self, name):
        training = dataclasses.replace(TRAINING, server_optimizer=name, server_rate=0.5, server_momentum=0.8)
        plain, ours = federation(PFedBayes()), federation(PFedBayes(), training)
        velocity = 0
        for _ in range(self.rounds):
            (before,) = ours.servers
            plain.restore(ours.tensors(), ours.round)
            plain.train_round()
            ours.train_round()
            (average,), (after,) = plain.servers, ours.servers
            assert torch.equal(after[1], average[1])
            assert difference(after[0], average[0]) > 1e-6
            velocity = 0.8 * velocity + before[0] - average[0]
            if name == "momentum":
                assert difference(after[0], before[0] - 0.5 * velocity) < 1e-12


class TestParticipation:
    @pytest.mark.parametrize("method", [FedAvg(), PFedBayes()], ids=lambda method: method.about.title)
    def test_a_clients_training_does_not_depend_on_who_else_takes_part(self, method):
        # beta = 0 and eta = 0 keep the server where it was, so that only the company differs.
        still = dataclasses.replace(method, beta=0.0) if isinstance(method, PFedBayes) else method
        few, all_train = (
            trained(still, 1, training=dataclasses.replace(TRAINING, train=who, participants=2))
            for who in ("chosen", "all")
        )
        assert difference(few.servers, all_train.servers) < 1e-12
        everybody = client_states(all_train)
        for i, state in client_states(few).items():
            assert difference(state, everybody[i]) < 1e-12

    def test_cursors_move_only_for_those_who_train(self):
        training = dataclasses.replace(TRAINING, participants=2, train="chosen")
        running, expected = federation(FedAvg(), training=training), [0] * len(SIZES)
        for round in running.rounds():
            for i in choose(training.seed, round, len(SIZES), 2):
                expected[i] += training.local_steps * min(training.batch_size, SIZES[i])
            assert running.tensors()["cursors"].tolist() == expected

    def test_a_client_met_late_starts_from_the_server_of_that_round(self):
        training = dataclasses.replace(TRAINING, participants=2, train="chosen")
        method = PFedBayes(eta_personal=0.0)
        running = federation(method, training=training)
        first_seen = {}
        while len(first_seen) < len(SIZES):
            server = running.servers[0].clone()
            running.train_round()
            for i in client_states(running):
                first_seen.setdefault(i, server)
        for i, (q, *_) in client_states(running).items():
            assert same_bits(q, first_seen[i])


class TestMemory:
    """A GPU that is too small is played by an engine that refuses to train many clients at once."""

    @staticmethod
    def shrink(monkeypatch, most):
        real = LocalTraining.__call__

        def limited(self, clients, received, shard, work):
            if len(work.weight) > most:
                raise torch.OutOfMemoryError("too small")
            return real(self, clients, received, shard, work)

        monkeypatch.setattr(LocalTraining, "__call__", limited)

    @pytest.mark.parametrize("most", [1, 2, 3])
    def test_fewer_clients_at_once_give_the_same_result(self, monkeypatch, most):
        expected = trained(PFedBayes())
        self.shrink(monkeypatch, most)
        emptied = []
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
        small = trained(PFedBayes())
        assert small.plan.chunk == most
        assert len(emptied) == {1: 3, 2: 2, 3: 1}[most]  # chunks of five clients are halved
        assert difference(small.servers, expected.servers) < 1e-12

    def test_not_even_one_client_is_one_clear_line(self, monkeypatch):
        self.shrink(monkeypatch, most=0)
        with pytest.raises(UserError, match="even one client"):
            federation(PFedBayes()).train_round()


class TestState:
    def test_state_of_another_experiment_is_refused(self):
        state = trained(PFedBayes(), 1).tensors()
        with pytest.raises(UserError, match="does not fit"):
            federation(PFedBayes(), model=make_model(mlp([3, 5, 3]))).restore(state, 1)
        with pytest.raises(UserError, match="does not fit"):
            federation(FedAvg()).restore(state, 1)

    def test_clients_that_enrolled_later_are_forgotten(self):
        early, late = (trained(FedAvg(), rounds, training=FEW) for rounds in (1, 6))
        assert len(late.population.enrolled) > 2
        late.restore(early.tensors(), 1)
        assert late.population.enrolled == early.population.enrolled

    def test_a_state_without_clients_needs_its_server(self):
        ours = federation(FedAvg())
        saved = ours.tensors()
        ours.restore(saved, 0)
        del saved["server.0"]
        with pytest.raises(UserError, match=r"server\.0 differs"):
            ours.restore(saved, 0)

    def test_early_stopping_keeps_three_copies(self, monkeypatch):
        asked, state_bytes = [], federation(PFedBayes()).client_bytes

        def noted(state_bytes, clients, training, copies, device):
            asked.append((state_bytes, clients, training, copies))
            return "device"

        monkeypatch.setattr("pfedbayes.engine.federation.choose_resting", noted)
        for patience in (None, 5):
            federation(PFedBayes(), dataclasses.replace(FEW, patience=patience), seeds=(1, 2))
        assert asked == [(state_bytes, 10, 4, 1), (state_bytes, 10, 4, 3)]

    def test_state_of_another_number_of_clients_is_refused(self):
        state = trained(PFedBayes(), 1).tensors()
        fewer = make_shards(SIZES[:4], TEST_SIZES[:4])
        with pytest.raises(UserError, match="does not fit"):
            federation(PFedBayes(), shards=fewer).restore(state, 1)

    def test_state_from_a_file_is_copied(self):
        first, second = trained(PFedBayes(), 1), federation(PFedBayes())
        state = {name: tensor.clone() for name, tensor in first.tensors().items()}
        kept = {name: tensor.clone() for name, tensor in state.items()}
        second.restore(state, 1)
        second.train_round()
        assert all(torch.equal(state[name], kept[name]) for name in kept)


class TestData:
    @pytest.mark.parametrize("kind", ["images", "features"])
    def test_images_and_features_train_in_the_dtype_of_the_plan(self, kind):
        shards = make_shards()
        if kind == "images":
            shards = dataclasses.replace(shards, x=(shards.x.clamp(-2, 2) * 60 + 128).to(torch.uint8))
        ours = trained(FedAvg(), 1, shards=shards, plan=Plan(dtype="float32", threads=1))
        assert ours.x.dtype == (torch.uint8 if kind == "images" else torch.float32)
        assert ours.servers[0].dtype == torch.float32

    def test_own_arrays_need_ten_lines(self):
        data = [(randn(n, 3, seed=n).numpy(), (torch.arange(n) % 2).numpy()) for n in (9, 30)]
        shards = Shards.from_arrays(data, data)
        ours = Federation(shards, Model(Net(mlp([3, 2])), Classification()), PFedBayes(), Training(rounds=2))
        assert list(ours.rounds()) == [1, 2]
        assert ours.evaluate()["personal"]["mc10"]["accuracy"][0]


def test_estimates_are_those_of_the_first_seed_unless_told_otherwise():
    ours = trained(PFedBayes(), 1, seeds=(1, 2))
    rows = ours.shards.test[0]
    plain, first, second = (
        ours.estimates("shared", 0, rows, 2, **asked) for asked in ({}, {"seed_index": 0}, {"seed_index": 1})
    )
    assert all(torch.equal(plain[name], first[name]) and not torch.equal(plain[name], second[name]) for name in plain)


@needs_gpu
@pytest.mark.parametrize("module", [mlp([3072, 20, 3], "tanh"), vgg(outputs=3)], ids=["mlp", "vgg"])
@pytest.mark.parametrize("over", ["vmap", "loop"])
def test_gpu_and_cpu_agree_without_noise(module, over):
    # Generators of the two devices draw different noise, so it is switched off.
    method = PFedBayes(noise_std=0.0)
    shards = dataclasses.replace(make_shards(), x=randn(sum(SIZES + TEST_SIZES), 3, 32, 32, seed=7))
    cpu, gpu = (
        trained(method, 2, shards=shards, model=make_model(module), plan=dataclasses.replace(EXACT, **where))
        for where in ({"over": "loop"}, {"device": "cuda", "over": over, "threads": None})
    )
    assert difference(gpu.servers[0].cpu(), cpu.servers[0]) < 1e-9
