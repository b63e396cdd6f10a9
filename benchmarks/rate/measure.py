"""Train pFedBayes on noisy values of random functions and measure the error of its posteriors."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import torch

from benchmarks.rate.functions import draw_functions
from benchmarks.rate.units import Unit
from pfedbayes.data import Shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import has_compiler, plan_for
from pfedbayes.engine.training import Training
from pfedbayes.maths.gaussian import kl, mean_field
from pfedbayes.maths.likelihoods import Regression
from pfedbayes.methods import PFedBayes
from pfedbayes.nets import Model, Net, mlp
from pfedbayes.paper.rate import DIFFERENCE, DRAWS, SIGMA_EPS
from pfedbayes.paper.theory import hellinger_squared

CLIENTS = 10
BATCH = 400
POINTS = 2000  # test points per function


def measure_all(unit: Unit, replicates: list[int], device: str) -> list[dict[str, Any]]:
    """Measure all replicates of a unit in one process, which compiles only once."""
    return [measure(unit, replicate, device) for replicate in replicates]


def measure(unit: Unit, replicate: int, device: str) -> dict[str, Any]:
    """Train one federation on its own functions and data, and return the errors of every client's posterior.

    hellinger: d^2 averaged over the posterior. Its mean over clients is Eq. (17), which Theorem 1 bounds.
    l2: squared error averaged over the posterior.
    l2_of_mean: squared error of the mean prediction.
    log_ratio: l_n of Eq. (15), averaged over the posterior.
    kl: KL(q || w). The client's objective, Eq. (14), is log_ratio + zeta kl.
    """
    start = time.monotonic()
    generator = np.random.default_rng([replicate, round(10 * unit.smoothness), unit.dimension])
    f = draw_functions(generator, unit.smoothness, unit.dimension, CLIENTS, DIFFERENCE)
    x = generator.uniform(-1, 1, (CLIENTS, unit.size, unit.dimension))
    truth = np.stack([f(i, x[i]) for i in range(CLIENTS)])
    y = truth + (0 if unit.exact else SIGMA_EPS) * generator.standard_normal(truth.shape)
    federation = _train(unit, x, y, replicate, device)

    points = generator.uniform(-1, 1, (POINTS, unit.dimension))
    clients = []
    for i in range(CLIENTS):
        drawn = _outputs(federation, i, points)
        target = torch.from_numpy(f(i, points))
        fitted = _outputs(federation, i, x[i])
        own = torch.from_numpy(y[i])
        residual = (own - fitted).square() - (own - torch.from_numpy(truth[i])).square()
        q, w = (mean_field(v.double()) for v in (federation.personal_state(i).q, federation.servers[0]))
        found = {
            "hellinger": hellinger_squared(drawn, target, SIGMA_EPS).mean(),
            "l2": (drawn - target).square().mean(),
            "l2_of_mean": (drawn.mean(0) - target).square().mean(),
            "log_ratio": residual.sum(1).mean() / (2 * SIGMA_EPS**2),
            "kl": kl(q, w),
            "sigma": q.sigma.median(),
        }
        clients.append({name: float(f"{float(value):.6g}") for name, value in found.items()})
    return {
        **dataclasses.asdict(unit),
        "width": unit.setting.width,
        "replicate": replicate,
        "clients": clients,
        "seconds": round(time.monotonic() - start, 1),
    }


def _train(unit: Unit, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], seed: int, device: str) -> Federation:
    shards = Shards.from_arrays([(x[i].astype(np.float32), y[i].astype(np.float32)) for i in range(CLIENTS)])
    model = Model(Net(mlp([unit.dimension, unit.setting.width, 1])), Regression(SIGMA_EPS))
    method = PFedBayes(zeta=unit.zeta, eta_personal=unit.eta, eta_global=unit.eta, noise_std=unit.weight_noise)
    training = Training(rounds=unit.rounds, batch_size=BATCH, seed=seed)
    plan = plan_for(model, method, training, CLIENTS, 1, device)
    # The nets are tiny, so a step is mostly overhead: compiling removes it, threads do not.
    plan = dataclasses.replace(plan, compile=has_compiler(plan.device), threads=None if plan.device == "cuda" else 1)
    federation = Federation(shards, model, method, training, [seed], "torch", plan)
    for _ in federation.rounds():
        pass
    return federation


def _outputs(federation: Federation, client: int, x: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the outputs (DRAWS, n) at x of networks drawn from a client's posterior."""
    outputs = federation.predict("personal", client, torch.from_numpy(x.astype(np.float32)), samples=DRAWS)
    return outputs[..., 0].double().cpu()
