"""Train a method on many data sets of a case at once: the method's own functions, in float64, with full batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.court.cases import CASES, NETWORK, NOISE, WIDE, D, Data, Name
from benchmarks.court.exact import Gaussian, prior_variance
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.maths.likelihoods import Classification, Regression
from pfedbayes.maths.trees import pick, stack, tree_map
from pfedbayes.methods import (
    FOLA,
    PVI,
    FedBE,
    FedEP,
    FedIvon,
    FedPA,
    FedPop,
    FedSEP,
    Hierarchical,
    Method,
    PFedBayes,
    PFedVEM,
)
from pfedbayes.methods.base import Shard, State
from pfedbayes.methods.hierarchical import with_schedule
from pfedbayes.nets import Batch, Model, Net, mlp

ROUNDS, STEPS, DRAWS = 30, 30, 4
# Learning rates among which tuning data choose, for SGD on the mean loss and for Adam in PVI.
SGD_RATES: dict[Name, tuple[float, ...]] = {"A": (0.01, 0.03), "C": (0.1, 0.3), "E": (0.01, 0.05)}
ADAM_RATES: dict[Name, tuple[float, ...]] = {"A": (0.01, 0.03, 0.1), "C": (0.01, 0.03, 0.1), "E": (0.01, 0.03)}
LAST = 0.25  # share of the rounds at the end in which rates are a tenth
EXAMPLES = 150  # of all clients: 2 * (5 + 10 + 20 + 40)


class Logits(nn.Module):
    """A linear model of the logit of the second of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits 0 and x'theta."""
        logit = self.linear(x)
        return torch.cat([torch.zeros_like(logit), logit], -1)


class ClosedForm(Model):
    """A model with weights theta (d,), linear or logistic, whose gradient needs no automatic differentiation."""

    def grad_nll(self, theta: Tensor, batch: Batch) -> Tensor:
        """Return the gradient of `nll` in theta."""
        output = batch.x @ theta
        if isinstance(self.likelihood, Classification):
            error = torch.sigmoid(output) - batch.y
        else:
            error = (output - batch.y[:, 0]) / NOISE**2
        return batch.x.T @ (batch.weight * error)


def model_of(name: Name) -> Model:
    """Return the network and likelihood of a case."""
    if name == "E":
        return Model(Net(mlp([*NETWORK], "tanh")), Regression(NOISE))
    if CASES[name].binary:
        return ClosedForm(Net(Logits()), Classification())
    return ClosedForm(Net(nn.Linear(D, 1, bias=False)), Regression(NOISE))


def methods_of(name: Name) -> dict[str, list[Method]]:
    """Return the methods that the case judges, each with the settings among which tuning data choose.

    Each has the case's own prior where it has a prior.
    """
    sigma, binary = prior_variance(name) ** 0.5, CASES[name].binary
    prior = {"prior_sigma": sigma}
    if not CASES[name].personal:
        delta = sigma**-2 / EXAMPLES
        # The mean curvature of an example's loss: E[x^2] / sigma^2, or about p (1 - p).
        curvature, fast = (0.1, 10) if binary else (NOISE**-2, 1)
        known = {"projection": "identity", "curvature": curvature}
        tilts: list[dict[str, object]] = [
            {"eta": 0.003 * fast}, {"eta": 0.003 * fast, **known}, {"eta": 0.01 * fast, **known},
        ]  # fmt: skip
        first = {"samples": DRAWS, "beta2": 0.99, "hessian": 0.1 if binary else 1.0, "delta": delta}
        sample = {"burn_in": STEPS // 2, "samples": 5, "sample_steps": STEPS // 10}
        rates, adam = SGD_RATES[name], ADAM_RATES[name]
        return {
            "PVI": [PVI(eta=eta, samples=DRAWS, rho0=-1.0, **prior) for eta in adam],
            "FedEP": [FedEP(**each, **prior) for each in tilts],  # type: ignore[arg-type]
            "FedSEP": [FedSEP(**each, **prior) for each in tilts],  # type: ignore[arg-type]
            "FedIvon": [FedIvon(eta=eta, **first) for eta in (0.1, 0.3)],
            "FOLA": [FOLA(eta=eta, **prior) for eta in rates],
            "FedBE": [FedBE(eta=eta) for eta in rates],
            "FedPA (mode only)": [FedPA(eta=eta, **sample) for eta in rates],
        }

    def ours(**fields: object) -> list[Method]:
        return [
            PFedBayes(eta_personal=eta, eta_global=eta, samples=DRAWS, rho0=0.0, **fields)  # type: ignore[arg-type]
            for eta in (0.03, 0.1)
        ]

    return {
        "pFedBayes, ζ = 10": ours(),
        "pFedBayes, ζ = 1": ours(zeta=1.0),
        "pFedBayes, Lemma A.2": ours(zeta=1.0, server="barycentre"),
        "pFedBayes, hyper-prior": ours(zeta=1.0, server="hyper-prior"),
        "Hierarchical": [Hierarchical(eta_mean=eta, eta_rho=eta) for eta in (0.02, 0.05)],
        "FedIvon, personal": [
            FedIvon(
                eta=eta,
                samples=DRAWS,
                beta2=0.99,
                hessian=0.1 if binary else 1.0,
                delta=WIDE**-2 / EXAMPLES,
                personal_prior=True,
            )
            for eta in (0.1, 0.3)
        ],
        "pFedVEM": [PFedVEM(eta_head=eta, samples=DRAWS) for eta in ((0.03, 0.1) if binary else (0.01, 0.03))],
        "FedPop": [
            FedPop(eta_head=eta, samples=STEPS, burn_in=0, sigma0=0.7)
            for eta in ((0.1, 0.3) if binary else (0.03, 0.05))
        ],
    }


class Federations:
    """One federation of a method for each data set, trained together."""

    def __init__(
        self, method: Method, name: Name, datasets: Sequence[Data], rounds: int = ROUNDS, steps: int = STEPS
    ) -> None:
        self.method, self.model, self.steps, self.rounds = (
            with_schedule(method, rounds * steps),
            model_of(name),
            steps,
            rounds,
        )
        self.clients_each = len(datasets[0].x)
        width = max(len(y) for data in datasets for y in data.y)
        batches = [self._batch(x, y, width, name) for data in datasets for x, y in zip(data.x, data.y, strict=True)]
        self.batch: Batch = stack(batches)
        self.sizes = self.batch.weight.sum(1)
        self.width, self._noise = width, torch.Generator().manual_seed(1)
        theta = 0.1 * torch.randn(
            self.model.net.num_params, generator=torch.Generator().manual_seed(2), dtype=torch.float64
        )
        self.servers = stack([self.method.init(theta, self.clients_each, self.model.net) for _ in datasets])
        self.clients: State = torch.func.vmap(self.method.enrol)(self._download())

    def _batch(self, x: object, y: object, width: int, name: Name) -> Batch:
        rows, targets = torch.from_numpy(np.asarray(x)), torch.from_numpy(np.asarray(y))
        missing = width - len(targets)
        targets = nn.functional.pad(targets, [0, missing])
        weight = nn.functional.pad(torch.ones(len(rows)).double(), [0, missing])
        y_shape = targets.long() if CASES[name].binary else targets[:, None]
        return Batch(nn.functional.pad(rows, [0, 0, 0, missing]), y_shape, weight)

    def _download(self) -> State:
        everyone = torch.arange(self.clients_each)
        received = torch.func.vmap(lambda server: self.method.download(server, everyone))(self.servers)
        return tree_map(lambda leaf: leaf.flatten(0, 1), received)

    def train(self) -> Iterator[int]:
        """Train all rounds, and yield after each."""
        first, everyone = self.method, torch.arange(self.clients_each)
        for round in range(1, self.rounds + 1):
            if round > (1 - LAST) * self.rounds and not isinstance(
                first, Hierarchical | FedPop
            ):  # one anneals by itself, one samples
                rates = [each.name for each in dataclasses.fields(first) if each.name.startswith("eta")]
                self.method = dataclasses.replace(first, **{each: getattr(first, each) / 10 for each in rates})
            shard = Shard(self.sizes, torch.empty(len(self.sizes), 0))
            steps = (((self.batch,), self._draw()) for _ in range(self.steps))
            self.clients, uploads = client_round(
                self.method, self.model, self.clients, self._download(), shard, steps, over=torch.func.vmap
            )
            together = tree_map(lambda leaf: leaf.unflatten(0, (-1, self.clients_each)), uploads)
            sizes = self.sizes.view(-1, self.clients_each)

            def aggregate(server: State, uploads: State, sizes: Tensor) -> State:
                return self.method.aggregate(server, uploads, sizes, everyone)

            self.servers = torch.func.vmap(aggregate)(self.servers, together, sizes)
            yield round

    def _draw(self) -> Tensor:
        shape = self.method.noise_shape(self.model, self.width)
        return torch.randn(len(self.sizes), *shape, generator=self._noise, dtype=torch.float64)

    def claims(self, personal: bool) -> list[Gaussian]:
        """Return the Gaussian that the method claims, for each data set."""
        found = []
        for k in range(len(self.sizes) // self.clients_each):
            if personal:
                own = [pick(self.clients, k * self.clients_each + i) for i in range(self.clients_each)]
            else:
                own = [pick(self.servers, k)]
            each = [self._claim(state) for state in own]
            found.append(Gaussian(torch.stack([q.mean for q in each]), torch.stack([q.covariance for q in each])))
        return found

    def _claim(self, state: State) -> Gaussian:
        if isinstance(self.method, FedPop):
            return Gaussian(state.samples.mean(0), torch.cov(state.samples.T))
        q = self.method.posterior(state)
        assert q is not None
        return Gaussian(q.mu, torch.diag_embed(q.sigma.square() + torch.zeros_like(q.mu)))

    def outputs(self, k: int, x: Tensor, count: int) -> Tensor:
        """Return outputs (count, n) of the shared network of a data set, one for each draw of its weights."""
        noise = torch.randn(count, self.model.net.num_params, generator=self._noise, dtype=torch.float64)
        return self.method.predict(self.model, pick(self.servers, k), x, noise)[..., 0]
