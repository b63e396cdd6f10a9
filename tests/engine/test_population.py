"""Clients rest where the plan says, and come back to the last bit."""

import concurrent.futures
import dataclasses
import errno
import math
import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import pfedbayes
from federations import TRAINING, federation, make_model, make_shards, model_for, same_bits, trained
from pfedbayes import runs
from pfedbayes.data import load_shards
from pfedbayes.engine import tensor_files
from pfedbayes.engine.plan import Plan
from pfedbayes.engine.population import HOST, DevicePopulation, FilePopulation, HostPopulation, choose_resting
from pfedbayes.engine.population import choose as choose_module
from pfedbayes.engine.population import file as file_module
from pfedbayes.engine.population import host as host_module
from pfedbayes.errors import UserError
from pfedbayes.maths.trees import stack
from pfedbayes.methods import FedAvg, FedRep, PFedBayes
from pfedbayes.nets import mlp
from pfedbayes.runs.estimate import Cost, estimate
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment

SIZE = 12
RESTING = ["device", "host", "file"]
FEW = dataclasses.replace(TRAINING, participants=2, train="chosen", rounds=6)
WIDE = make_model(mlp([300, 50, 3], "tanh"))


class Kept(NamedTuple):
    """Leaves of several types and ranks."""

    q: Tensor
    steps: Tensor
    seen: Tensor


def state(number: int) -> Kept:
    return Kept(torch.full((2, 3), number + 0.5), torch.tensor(number), torch.tensor([number % 2 == 0]))


def states(numbers: list[int]) -> Kept:
    return stack([state(number) for number in numbers])


def fresh(clients: list[int]) -> Kept:
    return states([-client for client in clients])


def in_file(path: Path | None = None) -> FilePopulation:
    return FilePopulation(state(0), HOST, path)


def in_memory() -> DevicePopulation:
    return DevicePopulation(SIZE, HOST)


def on_host(template=state(0)) -> HostPopulation:  # noqa: B008, nothing changes it
    """The host itself stands for a GPU: it copies at once what a GPU would copy when it comes to that."""
    return HostPopulation(SIZE, template, HOST)


@pytest.fixture(params=[in_memory, on_host, in_file], ids=["memory", "host", "file"])
def population(request):
    return request.param()


def test_newcomers_are_fresh_and_others_come_back_in_any_order(population):
    population.put([4, 1], states([40, 10]))
    population.put([7, 4], states([70, 41]))
    assert population.enrolled == [4, 1, 7]
    assert same_bits(population.get([7, 2, 1, 4], fresh), states([70, -2, 10, 41]))
    assert same_bits(population.get([5, 6], fresh), states([-5, -6]))
    assert same_bits(population.get([1, 7], fresh), states([10, 70]))
    assert population.enrolled == [4, 1, 7]  # asking enrols nobody


def test_whoever_is_named_twice_is_one_client(population):
    population.put([5, 5], states([50, 50]))
    population.put([6], states([60]))
    assert same_bits(population.get([6, 5, 8, 6], fresh), states([60, 50, -8, 60]))
    assert population.enrolled == [5, 6]


def test_what_was_asked_for_does_not_change_when_others_are_put(population):
    population.put([3, 5], states([30, 50]))
    got = population.get([3, 5], fresh)
    population.put([5], states([51]))
    assert same_bits(got, states([30, 50]))


def test_clients_without_a_state_are_met_too():
    for population in (in_memory(), on_host(()), FilePopulation((), HOST)):
        population.put([3, 1], ())
        assert population.get([1, 2], lambda _: ()) == ()
        assert (population.enrolled, population.tensors()) == ([3, 1], {})


def test_nothing_is_copied_when_all_train_where_they_rest():
    population, all_of_them = in_memory(), states(list(range(SIZE)))
    population.put(range(SIZE), all_of_them)
    assert population.get(range(SIZE), fresh).q.data_ptr() == all_of_them.q.data_ptr()


@pytest.mark.parametrize(
    "make", [lambda _: in_memory(), on_host, lambda row: FilePopulation(row, HOST)], ids=["memory", "host", "file"]
)
def test_bfloat16_comes_back(make):
    values = torch.randn(4, 3).bfloat16()
    population = make(values[0])
    population.put([5, 2, 8, 3], values)
    population.put([2], values[:1])
    assert torch.equal(population.get([3, 5, 2], fresh), values[[3, 0, 0]])
    assert torch.equal(population.tensors()["clients"], values[[0, 0, 2, 3]])


def test_states_of_all_that_lie_otherwise_in_memory():
    values = torch.randn(3, SIZE).t()
    expected = values.clone()
    expected[[7, 2]] = 0
    for population in (in_memory(), on_host(torch.zeros(3))):
        population.put(range(SIZE), values.clone(memory_format=torch.preserve_format))
        population.put([7, 2], torch.zeros(2, 3))
        assert torch.equal(population.get([2, 7, 1], fresh), expected[[2, 7, 1]])


class TestBlocks:
    """Page-locked memory is taken as clients are met."""

    @pytest.fixture(autouse=True)
    def blocks_of_three(self, monkeypatch):
        monkeypatch.setattr(
            host_module, "MIN_BLOCK_BYTES", 200
        )  # a row has 24, 8 and 1 bytes, each made a multiple of 16
        monkeypatch.setattr(host_module, "MIN_BLOCK_ROWS", 1)

    def test_rows_of_several_blocks_come_back(self, tmp_path):
        population, numbers = on_host(), {}
        for start in (3, 0, 7, 5):
            clients = [(start + step) % SIZE for step in range(4)]
            population.put(clients, states([100 * start + client for client in clients]))
            numbers.update({client: 100 * start + client for client in clients})
        assert population.enrolled == list(numbers)
        assert same_bits(population.get(list(numbers), fresh), states(list(numbers.values())))
        expected = states(list(numbers.values()))
        assert all(
            torch.equal(population.tensors()[f"clients.{name}"], getattr(expected, name)) for name in Kept._fields
        )
        for name, rows in population.checkpoint(tmp_path).items():
            whole = getattr(expected, name.removeprefix("clients."))
            assert (rows.shape, rows.dtype) == (tuple(whole.shape), whole.dtype)
            assert torch.equal(rows.take(slice(2, 9)), whole[2:9])

    def test_no_more_than_are_needed(self, monkeypatch):
        taken, staging = [], host_module.staging
        monkeypatch.setattr(
            host_module, "staging", lambda *arguments: taken.append(arguments[0]) or staging(*arguments)
        )
        population = on_host()
        for clients, blocks in (([4, 1], 1), ([1, 4], 1), ([4, 2], 1), ([3], 2), (range(SIZE), 4)):
            population.put(list(clients), states(list(clients)))
            assert taken == [(3, 64)] * blocks

    def test_a_put_without_memory_keeps_nothing_of_it(self, monkeypatch):
        population = on_host()
        population.put([1, 2], states([10, 20]))

        def no_more(*arguments):
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(host_module, "staging", no_more)
        with pytest.raises(UserError, match=r"execution\.resting=file"):
            population.put([2, 3, 4], states([21, 30, 40]))
        assert same_bits(population.get([1, 2], fresh), states([10, 20]))
        assert population.enrolled == [1, 2]

    def test_other_errors_of_a_gpu_keep_their_words(self, monkeypatch):
        def broken(*arguments):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(host_module, "staging", broken)
        with pytest.raises(RuntimeError, match="illegal"):
            on_host().put([1], states([10]))

    def test_an_interrupt_enrols_nobody_without_a_state(self, monkeypatch):
        population, copy, copied = on_host(), Tensor.copy_, []
        population.put([1, 2], states([10, 20]))

        def interrupted(target, source, **options):
            copied.append(source)
            if len(copied) == 5:  # three leaves are laid out, and the first of the rows is on its way
                raise KeyboardInterrupt
            return copy(target, source, **options)

        monkeypatch.setattr(Tensor, "copy_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            population.put([3, 4], states([30, 40]))
        monkeypatch.setattr(Tensor, "copy_", copy)
        assert population.enrolled == [1, 2]
        population.put([4], states([41]))
        assert same_bits(population.get([1, 2, 3, 4], fresh), states([10, 20, -3, 41]))

    def test_states_of_another_shape_are_refused(self):
        with pytest.raises(ValueError, match="zip"):
            on_host().put([1], (torch.zeros(1, 2, 3), torch.zeros(1)))


@pytest.mark.parametrize("megabytes", [1, 3, 60, 90, 200, 300])
def test_blocks_are_nearly_full_when_torch_has_rounded_them_up(monkeypatch, megabytes):
    taken = []
    monkeypatch.setattr(host_module, "staging", lambda shape, *_: taken.append(math.prod(shape)) or torch.empty(0, 0))
    with pytest.raises(IndexError):  # there is no memory behind it
        HostPopulation(10_000, torch.zeros(megabytes, 250_000, device="meta"), torch.device("meta")).put(
            [0], torch.zeros(1)
        )
    (size,) = taken
    assert size > 7 / 8 * 2 ** math.ceil(math.log2(size))
    assert size >= 7 / 8 * 2**28


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestBesideAGpu:
    def test_states_come_back_though_nobody_waits(self):
        """The GPU is kept busy: what is read on the host before it is done would be of the round before."""
        gpu = torch.device("cuda")
        wide = HostPopulation(SIZE, torch.zeros(100_000), gpu)
        busy, values = torch.randn(4096, 4096, device=gpu), torch.zeros(SIZE, 100_000, device=gpu)
        for round in range(5):
            for _ in range(20):
                busy = torch.tanh(busy @ busy)
            clients = [(round + step) % SIZE for step in range(6)]
            before = wide.get(clients, lambda new: torch.zeros(len(new), 100_000, device=gpu))
            values[clients] += round
            wide.put(clients, before + round)
        met = wide.enrolled
        before = wide.get(met, fresh)
        for copies in (wide.tensors, lambda: wide.checkpoint(Path())["clients"].take(slice(None))):
            for _ in range(20):
                busy = torch.tanh(busy @ busy)
            before = before + 1 + 0 * busy[0, 0]
            wide.put(met, before)
            found = copies()
            assert torch.equal(found["clients"] if isinstance(found, dict) else found, before.cpu())
        assert torch.equal(wide.get(met, fresh), values[met] + 2)

    def test_a_federation_trains_to_the_same_bits(self):
        one, other = (
            trained(PFedBayes(), 5, training=FEW, plan=Plan(device="cuda", resting=resting))
            for resting in ("device", "host")
        )
        assert isinstance(other.population, HostPopulation)
        assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in one.tensors().items())
        back = federation(PFedBayes(), FEW, Plan(device="cuda", resting="host"))
        back.restore(other.tensors(), 5)
        assert all(torch.equal(tensor, back.tensors()[name]) for name, tensor in one.tensors().items())


@pytest.mark.parametrize("seed", range(8))
def test_a_file_remembers_what_a_dict_would_through_checkpoints_and_kills(tmp_path, seed):
    """Puts, checkpoints, checkpoints that were not finished, and kills in any order."""
    draw, path = random.Random(seed), tmp_path / "clients.bin"
    population, now = in_file(path), {}
    saved, checkpoint, changed, most = {}, population.checkpoint(path), set(), 0
    for number in range(120):
        if draw.random() < 0.6:
            clients = draw.sample(range(SIZE), draw.randint(1, 4))
            population.put(clients, states([100 * number + client for client in clients]))
            now.update({client: 100 * number + client for client in clients})
            changed.update(clients)
            most = max(most, len(now) + len(changed & saved.keys()))
            # Four more than are in use: a round's states are written before the rows they leave are free.
            assert population.rows <= most + 4
        elif (action := draw.random()) < 0.4:
            checkpoint, saved, changed = population.checkpoint(path), dict(now), set()
            population.saved()
        elif action < 0.6:
            population.checkpoint(path)  # and killed before it was written
        else:
            population.close()
            population, now, changed = in_file(path), dict(saved), set()
            population.restore(list(saved), checkpoint, path)
        assert population.enrolled == list(now)
        if now:
            assert same_bits(population.get(list(now), fresh), states(list(now.values())))
    assert path.stat().st_size <= population.rows * sum(leaf.nbytes for leaf in state(0))


def test_a_put_that_fails_half_way_keeps_nothing_of_it(tmp_path, monkeypatch):
    population = in_file(tmp_path / "clients.bin")
    population.put([1, 2, 3], states([10, 20, 30]))
    write, calls = os.pwritev, []

    def full_after_two_rows(*arguments):
        calls.append(arguments)
        if len(calls) > 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", full_after_two_rows)
    with pytest.raises(UserError, match=r"clients.bin \(No space left on device\).*--resume"):
        population.put([3, 2, 1], states([31, 21, 11]))
    assert len(calls) >= 7  # rows are written several at a time
    assert same_bits(population.get([1, 2, 3], fresh), states([10, 20, 30]))
    monkeypatch.setattr(os, "pwritev", write)
    population.put([2], states([22]))
    assert same_bits(population.get([1, 2, 3], fresh), states([10, 22, 30]))


def test_an_interrupt_leaves_nobody_writing(monkeypatch):
    population, write, written = in_file(), os.pwritev, []

    def slow(*arguments):
        time.sleep(0.02)
        written.append(arguments)
        return write(*arguments)

    def interrupted(tasks):
        monkeypatch.setattr("pfedbayes.engine.population.file.wait", concurrent.futures.wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwritev", slow)
    monkeypatch.setattr("pfedbayes.engine.population.file.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        population.put(list(range(SIZE)), states(list(range(SIZE))))
    before = len(written)
    time.sleep(0.2)
    assert len(written) == before < 3 * SIZE
    assert population.enrolled == []


def test_a_forked_process_has_threads_of_its_own():
    population = in_file()
    population.put([1], states([1]))
    child = multiprocessing.get_context("fork").Process(target=population.put, args=([2], states([2])))
    child.start()
    child.join(timeout=30)
    assert child.exitcode == 0


def test_states_are_put_where_they_rest_wherever_they_come_from():
    """A device without memory stands for a GPU."""
    population = DevicePopulation(SIZE, torch.device("meta"))
    population.put([0, 3], states([10, 30]))
    assert population.enrolled == [0, 3]


def test_reads_and_writes_that_do_less_than_asked_are_gone_on_with(monkeypatch):
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: read(file, [parts[0][:5]], offset))
    monkeypatch.setattr(os, "pwritev", lambda file, parts, offset: write(file, [parts[0][:3]], offset))
    population = in_file()
    population.put([1, 2], states([10, 20]))
    assert same_bits(population.get([2, 1], fresh), states([20, 10]))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_is_one_clear_line():
    with pytest.raises(UserError, match="No space left on device"):
        in_file(Path("/dev/full")).put([1], states([10]))


def test_an_unwritable_folder_is_one_clear_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        in_file(tmp_path / "file" / "clients.bin").put([1], states([10]))
    monkeypatch.setattr(file_module.tempfile, "TemporaryFile", lambda: (tmp_path / "file" / "x").open("wb"))
    with pytest.raises(UserError, match="TMPDIR"):
        in_file().put([1], states([10]))


class TestForeignFiles:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "clients.bin"

    @pytest.fixture
    def checkpoint(self, path):
        population = in_file(path)
        population.put([1, 2], states([10, 20]))
        checkpoint = population.checkpoint(path)
        population.close()
        return checkpoint

    def refused(self, path, checkpoint, own, match="does not belong"):
        population = in_file(path if own else None)
        with pytest.raises(UserError, match=match):
            population.restore([1, 2], checkpoint, path)
        assert population.enrolled == []

    @pytest.mark.parametrize("own", [True, False])
    def test_another_files_rows_are_refused(self, path, checkpoint, own):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        self.refused(path, checkpoint, own)
        path.write_bytes(content[:-1])
        self.refused(path, checkpoint, own)
        path.write_bytes(content)
        in_file(path if own else None).restore([1, 2], checkpoint, path)

    def test_rows_of_another_width_are_refused(self, path, checkpoint):
        population = FilePopulation(Kept(torch.zeros(2, 1), torch.tensor(0), torch.tensor([True])), HOST, path)
        with pytest.raises(UserError, match="does not belong"):
            population.restore([1, 2], checkpoint, path)

    def test_a_missing_file_is_named(self, path, checkpoint):
        path.unlink()
        self.refused(path, checkpoint, own=False, match=r"cannot read .*clients.bin \(No such file")
        self.refused(path, checkpoint, own=True)

    def test_one_writes_or_several_read(self, path, checkpoint):
        first, second = in_file(), in_file()
        first.restore([1, 2], checkpoint, path)
        second.restore([1, 2], checkpoint, path)
        self.refused(path, checkpoint, own=True, match="in use")
        first.close()
        second.close()
        writer = in_file(path)
        writer.restore([1, 2], checkpoint, path)
        self.refused(path, checkpoint, own=False, match="in use")

    def test_a_reader_trains_on_without_a_change_to_the_file(self, path, checkpoint):
        content, reader = path.read_bytes(), in_file()
        reader.restore([1, 2], checkpoint, path)
        reader.put([2, 3], states([21, 30]))
        reader.put([2], states([22]))
        assert same_bits(reader.get([1, 2, 3], fresh), states([10, 22, 30]))
        assert path.read_bytes() == content
        copy = reader.checkpoint(path)  # takes the place of the file it reads from
        again = in_file()
        again.restore(reader.enrolled, copy, path)
        assert same_bits(again.get([1, 2, 3], fresh), states([10, 22, 30]))


def test_memory_that_is_not_there_is_one_clear_line():
    population = DevicePopulation(2**50, HOST)
    with pytest.raises(UserError, match=r"execution\.resting=file"):
        population.put([1], states([10]))


def test_clients_rest_where_they_fit(monkeypatch):
    monkeypatch.setattr(choose_module, "host_memory", lambda: 16_000)
    assert choose_resting(100, 10, 1, 1, HOST) == "device"
    assert choose_resting(100, 49, 1, 1, HOST) == "host"
    assert choose_resting(100, 50, 1, 1, HOST) == "file"
    assert choose_resting(100, 49, 2, 1, HOST) == "file"  # a round needs memory too
    assert choose_resting(100, 16, 1, 3, HOST) == "host"
    assert choose_resting(100, 17, 1, 3, HOST) == "file"
    assert choose_resting(100, 1000, 1000, 1, HOST) == "device"  # all train each round anyway


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
        assert runs.read_run(tmp_path / "run").info.plan.resting == "file"
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
        assert runs.read_run(tmp_path / "run").info.plan.resting == "file"
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
        info = runs.read_run(tmp_path / "run").info
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
