"""Results do not depend on where clients' states rest."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

import pfedbayes
from federations import FEW, federation, make_model, make_shards, model_for, trained
from pfedbayes import runs
from pfedbayes.data import load_shards
from pfedbayes.engine.plan import Plan
from pfedbayes.engine.population import DevicePopulation
from pfedbayes.engine.population import choose as choose_module
from pfedbayes.errors import UserError
from pfedbayes.files import tensors as tensor_files
from pfedbayes.methods import FedAvg, FedRep, PFedBayes
from pfedbayes.nets import mlp
from pfedbayes.runs.estimate import Cost, estimate
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment

RESTING = ["device", "host", "file"]
WIDE = make_model(mlp([300, 50, 3], "tanh"))


class TestFederation:
    @pytest.mark.parametrize("method", [PFedBayes(), FedAvg()], ids=lambda method: method.about.title)
    @pytest.mark.parametrize("participants", [2, 4, None])
    def test_results_are_the_same_bits_wherever_clients_rest(self, method, participants):
        training = dataclasses.replace(FEW, participants=participants)
        results = [
            trained(method, 6, training=training, seeds=(3, 8), plan=Plan(threads=1, resting=resting))
            for resting in RESTING
        ]
        first, *others = (result.tensors() for result in results)
        for other in others:
            assert other.keys() == first.keys()
            assert all(torch.equal(first[name], other[name]) for name in first)
        scores = [repr(result.evaluate(samples=2)) for result in results]
        assert len(set(scores)) == 1

    @pytest.mark.parametrize("participants", [1, 3])
    def test_scores_are_the_same_bits_wherever_clients_rest(self, participants):
        """Of clients that are predicted together, by products that round otherwise if there are fewer of them."""
        shards = make_shards(sizes=(20,) * 7, test_sizes=(20,) * 7, features=300)
        training = dataclasses.replace(FEW, participants=participants)
        scores = {
            repr(trained(FedRep(), 2, shards=shards, model=WIDE, training=training, plan=plan).evaluate())
            for plan in (Plan(threads=1, resting=resting) for resting in RESTING)
        }
        assert len(scores) == 1

    def test_a_round_whose_states_are_refused_is_not_taken(self, monkeypatch):
        ours, whole = (trained(PFedBayes(), 2, plan=Plan(threads=1, resting="file")) for _ in range(2))

        def refused(clients, states):
            raise UserError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(ours.population, "put", refused)
            with pytest.raises(UserError, match="full"):
                ours.train_round()
        for each in (ours, whole):
            each.train_round()
        assert all(ours.tensors()[name].equal(tensor) for name, tensor in whole.tensors().items())

    @pytest.mark.parametrize("resting", RESTING)
    def test_an_evaluation_fetches_no_more_states_at_once_than_a_round(self, resting, monkeypatch):
        plan, training = Plan(threads=1, resting=resting), dataclasses.replace(FEW, participants=2)
        shards = make_shards(test_sizes=(4,) * 5)  # those with equally many examples are predicted together
        ours = trained(PFedBayes(), 2, shards=shards, training=training, seeds=(3, 8), plan=plan)
        fetched, get = [], ours.population.get
        monkeypatch.setattr(ours.population, "get", lambda ids, fresh: fetched.append(len(ids)) or get(ids, fresh))
        ours.evaluate()
        assert (max(fetched), sum(fetched)) == (4, 10)

    @pytest.mark.parametrize("source", RESTING)
    @pytest.mark.parametrize("target", RESTING)
    def test_tensors_of_one_go_on_in_another(self, source, target):
        plans = [Plan(threads=1, resting=resting) for resting in (source, target)]
        whole, first = (trained(PFedBayes(), rounds, training=FEW, plan=plans[0]) for rounds in (5, 3))
        second = trained(PFedBayes(), 4, training=FEW, plan=plans[1])  # its own past is to be forgotten
        second.restore(first.tensors(), 3)
        for _ in second.rounds(5):
            pass
        assert all(torch.equal(tensor, second.tensors()[name]) for name, tensor in whole.tensors().items())

    @pytest.mark.parametrize("resting", RESTING)
    def test_save_and_load_keep_the_bits(self, tmp_path, resting):
        method = PFedBayes()
        ours = trained(method, 2, training=FEW, plan=Plan(threads=1, resting=resting))
        pfedbayes.save(ours, tmp_path / "mine")
        assert (tmp_path / "mine" / runs.CLIENTS).exists() == (resting == "file")
        back = pfedbayes.load(tmp_path / "mine", make_shards(), model_for(method), device="cpu")
        assert back.plan.resting == resting
        for _ in range(2):
            ours.train_round()
            back.train_round()
        assert all(torch.equal(tensor, back.tensors()[name]) for name, tensor in ours.tensors().items())
        pfedbayes.save(back, tmp_path / "mine")
        again = pfedbayes.load(tmp_path / "mine", make_shards(), model_for(method), device="cpu")
        assert all(torch.equal(tensor, again.tensors()[name]) for name, tensor in ours.tensors().items())

    @pytest.mark.parametrize("resting", RESTING)
    def test_states_are_saved_and_restored_a_few_at_a_time(self, tmp_path, monkeypatch, resting):
        plan = Plan(threads=1, resting=resting)
        ours = trained(PFedBayes(), 3, training=FEW, plan=plan)
        assert len(ours.population.enrolled) == 4
        monkeypatch.setattr(tensor_files, "PIECE_BYTES", 2 * ours.client_bytes)
        put, sizes = DevicePopulation.put, []
        monkeypatch.setattr(DevicePopulation, "put", lambda *args: (sizes.append(len(args[1])), put(*args)))
        pfedbayes.save(ours, tmp_path / "mine")
        back = pfedbayes.load(tmp_path / "mine", make_shards(), model_for(PFedBayes()), device="cpu")
        assert sizes == ([] if resting == "file" else [2, 2])
        assert back.population.enrolled == ours.population.enrolled
        assert all(torch.equal(tensor, back.tensors()[name]) for name, tensor in ours.tensors().items())

    def test_early_stopping_leaves_room_for_the_best_states(self, monkeypatch):
        members = 5
        client = federation(PFedBayes(), FEW).client_bytes
        monkeypatch.setattr(choose_module, "host_memory", lambda: 4 * members * client)
        patient = dataclasses.replace(FEW, patience=2)
        plans = [federation(PFedBayes(), training, Plan(threads=1)).plan for training in (FEW, patient)]
        assert [plan.resting for plan in plans] == ["host", "file"]

    def test_a_table_of_rows_without_its_file_is_refused(self, tmp_path):
        plan = Plan(threads=1, resting="file")
        table = trained(PFedBayes(), 2, training=FEW, plan=plan).checkpoint(tmp_path / "clients.bin")
        with pytest.raises(UserError, match=r"pfedbayes\.load"):
            federation(PFedBayes(), FEW, plan).restore(table, 2)
        with pytest.raises(UserError, match=r"execution\.resting=file"):
            federation(PFedBayes(), FEW, Plan(threads=1, resting="host")).restore(table, 2, tmp_path / "clients.bin")

    def test_where_clients_rest_is_recorded_in_the_plan(self):
        assert federation(PFedBayes(), FEW, Plan(threads=1)).plan.resting == "device"


MANY = [
    "data.name=blobs", "data.clients=40", "data.examples=20", "net.hidden=[6]", "training.batch_size=8",
    "training.local_steps=2", "training.rounds=8", "training.evaluate_every=4", "training.participants=5",
    "training.train=chosen", "execution.resting=file",
]  # fmt: skip


class TestRuns:
    def test_a_run_keeps_its_clients_in_its_folder_and_checkpoints_the_table_alone(self, tmp_path):
        experiment = read_experiment(None, [*MANY, "execution.checkpoint_seconds=0"])
        list(execute(experiment, tmp_path / "run", [1]))
        checkpoint = runs.read_checkpoint(tmp_path / "run")
        assert not [name for name in checkpoint.tensors if name.startswith("clients")]
        enrolled = len(checkpoint.tensors["enrolled"])
        row_bytes = int(checkpoint.tensors["witness"][0])
        # Besides the enrolled: the five of the last round before this checkpoint, and the five while they are written.
        assert (tmp_path / "run" / runs.CLIENTS).stat().st_size <= (enrolled + 10) * row_bytes
        assert runs.read_info(tmp_path / "run").plan.resting == "file"
        in_memory = read_experiment(None, [*MANY, "execution.resting=device"])
        list(execute(in_memory, tmp_path / "other", [1]))
        one, other = (pfedbayes.load(tmp_path / name).tensors() for name in ("run", "other"))
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())

    def test_a_run_that_is_under_way_is_not_loaded_and_a_loaded_one_not_resumed(self, tmp_path):
        experiment = read_experiment(None, [*MANY, "execution.checkpoint_seconds=0"])
        steps = execute(experiment, tmp_path / "run", [1])
        next(steps), next(steps)
        with pytest.raises(UserError, match="in use"):
            pfedbayes.load(tmp_path / "run")
        steps.close()
        loaded = pfedbayes.load(tmp_path / "run")
        with pytest.raises(UserError, match="in use"):
            list(execute(experiment, tmp_path / "run", [1], resume=True))
        loaded.population.close()
        assert [step.round for step in execute(experiment, tmp_path / "run", [1], resume=True)][-1] == 8

    @pytest.mark.parametrize("more", [[], ["training.patience=5", "training.evaluate_every=1", "data.validation=0.2"]])
    def test_a_resumed_run_lets_go_of_the_checkpoint_that_it_began_with(self, tmp_path, more):
        """It is mapped, and would go on to take space on the disk when others have replaced it."""
        in_memory = read_experiment(None, [*MANY, "execution.resting=host", *more])
        steps = execute(in_memory, tmp_path / "run", [1])
        next(steps)
        steps.close()
        assert (runs.read_checkpoint(tmp_path / "run").best is not None) == bool(more)
        rest = execute(in_memory, tmp_path / "run", [1], resume=True)
        next(rest)
        assert str(tmp_path / "run" / runs.STATE) not in Path("/proc/self/maps").read_text()
        rest.close()

    @pytest.mark.parametrize("before", ["device", "host"])
    def test_a_resumed_run_may_let_its_clients_rest_elsewhere(self, tmp_path, before):
        """As it is told to when memory has run out."""
        settings = [*MANY, "execution.checkpoint_seconds=0"]
        list(execute(read_experiment(None, settings), tmp_path / "whole", [1]))
        steps = execute(read_experiment(None, [*settings, f"execution.resting={before}"]), tmp_path / "run", [1])
        next(steps), next(steps)
        steps.close()
        list(execute(read_experiment(None, settings), tmp_path / "run", [1], resume=True))
        assert runs.read_info(tmp_path / "run").plan.resting == "file"
        one, other = (pfedbayes.load(tmp_path / name).tensors() for name in ("run", "whole"))
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
        back = execute(
            read_experiment(None, [*MANY, "execution.resting=host", "training.rounds=9"]),
            tmp_path / "run",
            [1],
            resume=True,
        )
        with pytest.raises(UserError, match=r"rest in a file: set execution\.resting=file"):
            next(back)

    def test_another_runs_file_is_refused_on_resume(self, tmp_path):
        for seed in (1, 2):
            list(execute(read_experiment(None, MANY), tmp_path / f"run{seed}", [seed]))
        (tmp_path / "run2" / runs.CLIENTS).replace(tmp_path / "run1" / runs.CLIENTS)
        longer = read_experiment(None, [*MANY, "training.rounds=9"])
        with pytest.raises(UserError, match="does not belong"):
            list(execute(longer, tmp_path / "run1", [1], resume=True))

    def test_slow_checkpoints_take_a_tenth_of_the_time_at_most(self, tmp_path, monkeypatch):
        """A clock that only checkpoints and rounds move: 1 s a round, 3 s a checkpoint."""
        clock = [0.0]
        monkeypatch.setattr("pfedbayes.runs.folder.time.monotonic", lambda: clock[0])
        write, written = runs.Writer.checkpoint, []

        def slow(self, tensors, round, seconds, best):
            clock[0] += 3
            written.append(round)
            write(self, tensors, round, seconds, best)

        monkeypatch.setattr(runs.Writer, "checkpoint", slow)
        settings = ["training.rounds=70", "training.evaluate_every=100", "execution.checkpoint_seconds=5.5"]
        for _ in execute(read_experiment(None, [*MANY, *settings]), tmp_path / "run", [1]):
            clock[0] += 1
        assert written == [7, 38, 69, 70]


class TestEvaluationOfSome:
    def test_a_fixed_choice_is_scored_as_it_would_be_among_all(self):
        ours = trained(PFedBayes(), 2, training=FEW)
        everyone, some = ours.evaluate(), ours.evaluate(clients=2)
        drawn = [i for i, indices in enumerate(ours.evaluation_sets("test", 2)) if len(indices)]
        assert len(drawn) == 2
        for i in range(ours.num_clients):
            value, alone = everyone["personal"]["mean"]["nll"][0][i], some["personal"]["mean"]["nll"][0][i]
            assert alone == value if i in drawn else math.isnan(alone)
        ours.train_round()
        assert [i for i, indices in enumerate(ours.evaluation_sets("test", 2)) if len(indices)] == drawn

    def test_only_clients_with_data_are_drawn(self):
        shards = make_shards()
        test = (shards.validation[0], *shards.test[1:4], shards.validation[4])
        ours = federation(FedAvg(), shards=dataclasses.replace(shards, test=test))
        for count, expected in ((2, 2), (3, 3), (4, 3)):
            assert sum(len(indices) > 0 for indices in ours.evaluation_sets("test", count)) == expected

    def test_the_run_folder_speaks_of_those_that_are_scored(self, tmp_path):
        experiment = read_experiment(None, [*MANY, "evaluation.clients=7"])
        *_, last = execute(experiment, tmp_path / "run", [1, 2])
        info = runs.read_info(tmp_path / "run")
        assert info.num_clients == 40
        assert len(info.clients) == len(info.train_sizes) == len(info.test_sizes) == len(info.labels) == 7
        assert [len(values) for values in last.record.personal["mc10"]["nll"]] == [7, 7]
        everyone = pfedbayes.load(tmp_path / "run").evaluate()["personal"]["mc10"]["nll"][0]
        numbers = [int(name.split()[1]) for name in info.clients]
        assert last.record.personal["mc10"]["nll"][0] == [everyone[i] for i in numbers]


def test_the_estimate_counts_the_chosen_in_memory_and_the_rest_in_the_file():
    def cost(clients: int, resting: str) -> tuple[Cost, int]:
        experiment = read_experiment(None, [*MANY, f"data.clients={clients}", f"execution.resting={resting}"])
        shards = load_shards(experiment.data)
        return estimate(experiment, [1]), shards.x.nbytes + shards.y.nbytes

    (few, few_data), (many, many_data), (on_host, _) = cost(10, "file"), cost(100, "file"), cost(100, "host")
    assert many.bytes - many_data == few.bytes - few_data
    assert many.file_bytes == 4 * few.file_bytes > 0  # eight rounds of five clients meet forty at most
    assert on_host.bytes - many.bytes == many.file_bytes
    assert on_host.file_bytes == 0


def test_saved_tensors_are_contiguous():
    ours = federation(PFedBayes())
    ours.servers = [server.T.contiguous().T for server in ours.servers]
    assert not ours.servers[0].is_contiguous()
    assert all(tensor.is_contiguous() for tensor in ours.tensors().values())
