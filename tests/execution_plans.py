"""Plans to compare, and what it means that two federations agree."""

import dataclasses

import pytest
import torch

from federations import (
    EXACT,
    client_states,
    difference,
    federation,
    same_bits,
)
from pfedbayes.engine.plan import has_compiler
from pfedbayes.methods import METHODS, PFedBayes

COMPILED = dataclasses.replace(EXACT, compile=True)
PHILOX = dataclasses.replace(EXACT, noise="philox")
ON_GPU = dataclasses.replace(PHILOX, device="cuda", threads=None)
ROUNDING = 1e-10
BEYOND = {"eta_data": 0.1, "sigma_by_size": 1.0}  # of pFedBayes, beyond the paper
needs_gpu = pytest.mark.gpu  # skipped without one, in conftest.py
needs_compiler = pytest.mark.skipif(not has_compiler("cpu"), reason="needs a C++ compiler")


def agree(left, right):
    """Whether servers and clients of two federations are the same but for rounding."""
    ours, theirs = client_states(left), client_states(right)
    assert list(ours) == list(theirs)
    pairs = [(left.servers, right.servers), *((ours[i], theirs[i]) for i in ours)]
    return all(difference(_home(a), _home(b)) < ROUNDING for a, b in pairs)


def _home(tree):
    return tuple(_home(part) for part in tree) if not isinstance(tree, torch.Tensor) else tree.cpu()


def resumes(plan):
    """Whether a run that was saved after its first round goes on to the same bits."""
    whole, first, second = (federation(PFedBayes(), plan=plan) for _ in range(3))
    for _ in range(3):
        whole.train_round()
    first.train_round()
    second.restore(first.tensors(), 1)
    for _ in range(2):
        second.train_round()
    return same_bits(tuple(whole.tensors().values()), tuple(second.tensors().values()))


def fixed_shapes(names):
    return [name for name in names if not METHODS[name]().needs.loop and not METHODS[name]().needs.eager]
