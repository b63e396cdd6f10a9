"""States come back from every population, to the last bit."""

import os
from types import SimpleNamespace

import pytest
import torch
from population_states import SIZE, fresh, in_file, in_memory, on_host, states

from federations import same_bits
from pfedbayes.engine.population import HOST, DevicePopulation, FilePopulation, HostPopulation
from pfedbayes.engine.population.base import memory_errors, staging, to_host
from pfedbayes.errors import UserError


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


@pytest.mark.parametrize("make", [in_memory, on_host], ids=["memory", "host"])
def test_a_checkpoint_takes_any_part_of_the_states_in_order(make, tmp_path):
    population = make()
    assert population.checkpoint(tmp_path / "clients.bin") == {}
    population.put([4, 1, 7], states([40, 10, 70]))
    rows = population.checkpoint(tmp_path / "clients.bin")
    for part, numbers in ((slice(0, 3), [40, 10, 70]), (slice(1, 3), [10, 70])):
        taken = tuple(each.take(part) for each in rows.values())
        assert same_bits(taken, tuple(states(numbers)))
    assert [(each.number, tuple(each.like.shape)) for each in rows.values()] == [(3, (2, 3)), (3, ()), (3, (1,))]


def test_a_cleared_population_is_empty_and_can_be_used_again(population, monkeypatch):
    given_back = []  # page-locked memory, which needs a GPU
    monkeypatch.setattr("pfedbayes.engine.population.host.give_back_locked_memory", lambda: given_back.append(1))
    population.put([4, 1], states([40, 10]))
    descriptors = list(getattr(population, "_descriptors", []))
    population.clear()
    assert population.enrolled == []
    assert given_back == [1] * isinstance(population, HostPopulation)
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    population.put([1], states([11]))
    assert same_bits(population.get([1, 4], fresh), states([11, -4]))
    population.close()
    assert population.enrolled == [] or not isinstance(population, HostPopulation)  # which gives its memory back


def test_the_memory_that_is_missing_is_named():
    huge = torch.zeros(1).expand(2, 500_000_000)
    with pytest.raises(UserError, match=r"the states of 3 clients take 6\.0 GB"), memory_errors(3, (huge,)):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


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


def test_states_are_put_where_they_rest_wherever_they_come_from():
    """A device without memory stands for a GPU."""
    population = DevicePopulation(SIZE, torch.device("meta"))
    population.put([0, 3], states([10, 30]))
    assert population.enrolled == [0, 3]


def test_transfers_beside_a_gpu_go_through_page_locked_memory(monkeypatch):
    locked = []
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **others: locked.append(pin_memory))
    for device in ("cuda", "cpu"):
        staging((2, 3), torch.float32, torch.device(device))
    assert locked == [True, False]


def test_copies_from_a_gpu_have_arrived_when_they_are_returned(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    to_host((torch.zeros(2), torch.zeros(2)))
    assert waited == []
    to_host((torch.zeros(2).as_subclass(OnGpu), torch.zeros(3).as_subclass(OnGpu)))
    assert waited == [1]


def test_states_on_the_host_are_not_copied_to_it():
    here = states([1, 2])
    assert all(one is other for one, other in zip(to_host(here), here, strict=True))


def test_memory_that_is_not_there_is_one_clear_line():
    population = DevicePopulation(2**50, HOST)
    with pytest.raises(UserError, match=r"execution\.resting=file"):
        population.put([1], states([10]))
