"""The engine, one client alone, and Algorithm 1 as plain loops with torch.distributions and torch.optim.Adam."""

import dataclasses
import importlib.util
import itertools
import re
import runpy
from pathlib import Path

import pytest
import torch

from federations import EXACT, client_steps, difference, federation, first_server, make_model, make_shards, train_alone
from pfedbayes.engine.training import Training
from pfedbayes.maths.random import choose
from pfedbayes.methods import PFedBayes
from pfedbayes.nets import mlp

NAIVE = Path(__file__).parents[2] / "examples" / "naive_pfedbayes.py"
ROUNDS = 2
TRAINING = Training(local_steps=20, batch_size=6, participants=3, seed=5)


@pytest.fixture(scope="module")
def naive():
    spec = importlib.util.spec_from_file_location("naive_pfedbayes", NAIVE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_naive(naive, method, rounds):
    """Shared and personal models after so many rounds, from the batches and the noise that the engine takes."""
    shards, model = make_shards(), make_model()
    sizes = [len(rows) for rows in shards.train]

    def draw(i, t, r):
        consumed = (t - 1) * TRAINING.local_steps * min(TRAINING.batch_size, sizes[i])
        ((batch,), noise) = client_steps(shards, model, method, TRAINING, i, t, consumed)[r]
        return batch.x, batch.y, noise[0]

    result = naive.algorithm_1(
        mlp([3, 4, 3], "tanh"),
        first_server(method, model, TRAINING.seed),
        sizes,
        draw,
        lambda t: choose(TRAINING.seed, t, len(sizes), TRAINING.participants).tolist(),
        R=TRAINING.local_steps,
        zeta=method.zeta,
        eta_1=method.eta_personal,
        eta_2=method.eta_global,
        beta=method.beta,
    )
    return next(itertools.islice(result, rounds - 1, None))


@pytest.mark.parametrize("zeta", [1.0, 10.0])
@pytest.mark.parametrize("samples", [1, 3])
def test_engine_and_one_client_alone_agree_with_algorithm_1(naive, zeta, samples):
    method = PFedBayes(zeta=zeta, samples=samples, beta=0.7, eta_personal=0.002, eta_global=0.003)
    shared, personal = run_naive(naive, method, ROUNDS)
    start = first_server(method, make_model(), TRAINING.seed)
    assert difference(shared, start) > 1e-3  # it has moved
    for over in ("vmap", "loop"):
        ours = federation(method, training=TRAINING, plan=dataclasses.replace(EXACT, over=over))
        for _ in ours.rounds(ROUNDS):
            pass
        assert difference(ours.servers[0], shared) < 1e-9
        assert difference(ours.tensors()["clients.q"], torch.stack(personal)) < 1e-9
    alone = train_alone(method, ROUNDS, TRAINING)
    assert difference(alone.server, shared) < 1e-9
    assert difference(torch.stack([alone.clients[i].q for i in range(5)]), torch.stack(personal)) < 1e-9


def test_example_runs_and_learns(capsys):
    state = torch.get_rng_state()
    runpy.run_path(str(NAIVE), run_name="__main__")
    torch.set_rng_state(state)
    lines = capsys.readouterr().out.splitlines()
    personal, shared = (float(number) for number in re.findall(r"([\d.]+) %", lines[-1]))
    assert len(lines) == 10
    # Three classes each, which overlap a little; the shared model has to guess between two look-alikes.
    assert personal > 95
    assert personal > shared > 100 / 6


def test_example_is_independent_of_the_package():
    assert not re.search(r"^\s*(import|from) pfedbayes", NAIVE.read_text(), flags=re.MULTILINE)
