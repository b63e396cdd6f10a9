"""What a GPU defers, driven on a CPU: rounds are checked later, and batches are laid out one round ahead."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import torch

from federations import SIZES, TRAINING, copy, federation, same_bits
from pfedbayes.engine.backend import batches as batches_module
from pfedbayes.engine.backend.batches import Prefetcher, advance, lay_out
from pfedbayes.engine.backend.finite import MAX_PENDING, DeferredChecks, require_finite
from pfedbayes.engine.participation import choose
from pfedbayes.errors import Diverged
from pfedbayes.evaluation.client_data import ClientData
from pfedbayes.methods import FedAvg, PFedBayes

MEMBERS = list(range(len(SIZES)))
FINITE = torch.ones(len(SIZES), dtype=torch.bool)


def one_bad(row):
    return torch.arange(len(SIZES)) != row


def next_round(state):
    """A state that differs from the one before in all that a round changes."""
    servers = tuple(server + 1 for server in state.servers)
    optimizers = tuple(type(each)(*(leaf + 1 for leaf in each)) for each in state.optimizers)
    return dataclasses.replace(
        state, round=state.round + 1, servers=servers, optimizers=optimizers, cursors=state.cursors + 7
    )


def play(checks, state, clients, flags):
    for finite in flags:
        clients, state = checks.keep_finite(MEMBERS, finite, (clients, state), (clients + 1, next_round(state)))
    return clients, state


class TestDeferredChecks:
    def ours(self):
        return federation(PFedBayes(), dataclasses.replace(TRAINING, server_optimizer="adam"))

    def test_finite_rounds_are_kept(self):
        ours = self.ours()
        checks = DeferredChecks(ours.setup)
        clients, state = play(checks, ours.state, torch.zeros(5), [FINITE] * 3)
        assert (state.round, clients.tolist()) == (3, [3.0] * 5)
        assert same_bits(state.servers, (ours.servers[0] + 3,))
        assert checks.first_failure(state) is None

    def test_the_state_before_the_first_bad_round_is_kept_and_named(self):
        ours = self.ours()
        checks, start = DeferredChecks(ours.setup), copy(ours.servers)
        good = play(DeferredChecks(ours.setup), ours.state, torch.zeros(5), [FINITE])[1]
        clients, state = play(checks, ours.state, torch.zeros(5), [FINITE, one_bad(3), one_bad(1), FINITE])
        assert clients.tolist() == [1.0] * 5
        before, error = checks.first_failure(state)
        assert str(error).startswith("round 2: site 3 has become non-finite")
        assert before.round == 1
        assert (before.cursors == good.cursors).all()
        assert same_bits((before.servers, before.optimizers), (good.servers, good.optimizers))
        assert same_bits(ours.servers, start)
        assert checks.first_failure(before) is None  # it is told once

    @pytest.mark.parametrize("row", [0, 4])
    def test_any_client_may_be_the_bad_one(self, row):
        ours = self.ours()
        checks = DeferredChecks(ours.setup)
        clients, state = play(checks, ours.state, torch.zeros(5), [one_bad(row), one_bad(2), FINITE])
        assert clients.tolist() == [0.0] * 5
        assert same_bits(state.servers, ours.servers)
        assert str(checks.first_failure(state)[1]).startswith(f"round 1: site {row} has become non-finite")

    def test_the_gpu_is_asked_before_too_many_rounds_are_pending(self):
        ours = self.ours()
        checks = DeferredChecks(ours.setup)
        _, state = play(checks, ours.state, torch.zeros(5), [FINITE] * (MAX_PENDING - 1))
        assert not checks.full
        play(checks, state, torch.zeros(5), [FINITE])
        assert checks.full


def test_what_was_restored_has_no_failures_of_before():
    ours = federation(PFedBayes())
    saved = ours.tensors()
    play(ours._executor.checks, ours.state, torch.zeros(5), [one_bad(3)])
    ours.restore(saved, 0)
    ours.confirm()
    assert ours.round == 0


def test_without_a_gpu_nothing_is_deferred():
    ours = federation(PFedBayes())
    ours.train_round()
    assert ours._executor.checks._pending == []


def test_without_a_gpu_a_bad_client_is_an_error_at_once():
    setup = federation(FedAvg(), seeds=(1, 2)).setup
    require_finite(setup, 4, MEMBERS, FINITE)
    with pytest.raises(Diverged, match=r"round 4: site 2 \(seed 2\)"):
        require_finite(setup, 4, [7, 8], torch.tensor([False, True]))


def test_batches_laid_out_ahead_are_those_of_their_round(monkeypatch):
    ours = federation(PFedBayes(), dataclasses.replace(TRAINING, train="chosen"))
    monkeypatch.setattr(ClientData, "device", torch.device("cuda"))
    prefetcher, cursors = Prefetcher(ours.setup), ours.state.cursors
    for round in (1, 2, 3, 7):  # the last one was not expected
        chosen = choose(ours.setup, round)
        found, expected = prefetcher.get(round, chosen, cursors), lay_out(ours.setup, round, chosen, cursors)
        assert all((one == other).all() for one, other in zip(found, expected, strict=True))
        cursors = advance(ours.setup, cursors, chosen.members)


@pytest.mark.parametrize(("device", "waited", "ahead"), [("cuda", [1, 7], [2, 3, 4, 8]), ("cpu", [1, 2, 3, 7], [])])
def test_a_gpu_waits_only_for_batches_of_rounds_that_were_not_expected(monkeypatch, device, waited, ahead):
    batches_module.BESIDE_A_GPU.submit(int).result()  # what other tests have given the thread is done
    ours = federation(PFedBayes())
    monkeypatch.setattr(ClientData, "device", torch.device(device))
    laid_out = {True: [], False: []}  # by whether the training waits for them

    def noted(setup, round, *arguments):
        laid_out[threading.current_thread() is threading.main_thread()].append(round)
        return lay_out(setup, round, *arguments)

    monkeypatch.setattr(batches_module, "lay_out", noted)
    prefetcher, cursors = Prefetcher(ours.setup), ours.state.cursors
    for round in (1, 2, 3, 7):
        chosen = choose(ours.setup, round)
        prefetcher.get(round, chosen, cursors)
        cursors = advance(ours.setup, cursors, chosen.members)
    batches_module.BESIDE_A_GPU.submit(int).result()  # the thread has done what it was given before
    assert laid_out == {True: waited, False: ahead}


@pytest.mark.parametrize("full", [True, False])
def test_a_gpu_is_asked_once_enough_rounds_are_pending(full):
    ours, asked = federation(PFedBayes()), []
    ours._executor.checks = SimpleNamespace(full=full, first_failure=lambda state: asked.append(state.round))
    ours.train_round()
    assert asked == [1] * full
