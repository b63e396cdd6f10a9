"""Populations in page-locked memory beside a GPU."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from population_states import SIZE, Kept, fresh, on_host, states
from torch import Tensor

from execution_plans import needs_gpu
from federations import FEW, federation, same_bits, trained
from pfedbayes.engine.plan import Plan
from pfedbayes.engine.population import HostPopulation
from pfedbayes.engine.population import host as host_module
from pfedbayes.errors import UserError
from pfedbayes.methods import PFedBayes


class TestBlocks:
    """Page-locked memory is taken as clients are met."""

    @pytest.fixture(autouse=True)
    def blocks_of_three(self, monkeypatch):
        # A row has 24, 8 and 1 bytes, each made a multiple of 16.
        monkeypatch.setattr(host_module, "MIN_BLOCK_BYTES", 200)
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


def test_copies_on_the_host_wait_for_the_gpu(monkeypatch, tmp_path):
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    population = on_host()
    population.put([1], states([10]))
    population.tensors()
    assert waited == []  # the host copies at once
    monkeypatch.setattr(population, "_device", torch.device("cuda"))
    population.tensors()
    population.checkpoint(tmp_path)
    assert waited == [1, 1]


@needs_gpu
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
