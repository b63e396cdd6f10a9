"""The cases of the court: data sets from models whose posterior is known. NumPy alone, so that samplers read them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Name = Literal["A", "B", "C", "D", "E"]
D, CORRELATION, NOISE, HELD_OUT = 5, 0.6, 0.5, 200
SIZES = (5, 10, 20, 40)
TAU2 = 0.3  # variance of the clients' weights around their mean, case B
WIDE = 2.0  # standard deviation of the mean weights in B and D, and of the weights in C
NETWORK = (2, 8, 1)  # layers of the network in E
JUDGED, TUNED = 20, 5
"""Data sets that judge, and further ones that choose learning rates."""


class Data(NamedTuple):
    """One federation of a case."""

    x: list[Array]
    """Inputs of each client (n_i, d)."""
    y: list[Array]
    """Targets (n_i,): numbers, or 0 and 1."""
    theta: Array
    """True weights of each client (N, d); in E, those of the network."""
    tau2: float
    """Variance of the clients' weights around their mean; 0 if all clients have the same weights."""
    held_out: Array
    """Inputs to predict (HELD_OUT, d)."""


class Case(NamedTuple):
    """What a case is."""

    title: str
    model: str
    personal: bool
    """Clients have weights of their own."""
    binary: bool
    clients: int


CASES: dict[Name, Case] = {
    "A": Case("pooled linear", "θ ~ N(0, 1), y = x'θ + N(0, 0.5²)", personal=False, binary=False, clients=8),
    "B": Case(
        "hierarchical linear", "w ~ N(0, 4), θᵢ ~ N(w, 0.3), y = x'θᵢ + N(0, 0.5²)",
        personal=True, binary=False, clients=8,
    ),
    "C": Case("pooled logistic", "θ ~ N(0, 4), logit p = x'θ", personal=False, binary=True, clients=8),
    "D": Case(
        "hierarchical logistic", "w ~ N(0, 4), τ ~ |N(0, 1)|, θᵢ ~ N(w, τ²)", personal=True, binary=True, clients=8
    ),
    "E": Case(
        "tiny network", "2-8-1 tanh network, weights N(0, 1), noise N(0, 0.5²)",
        personal=False, binary=False, clients=4,
    ),
}  # fmt: skip


def simulate(name: Name, number: int, clients: int | None = None) -> Data:
    """Draw a data set of a case from its prior."""
    case = CASES[name]
    rng = np.random.default_rng([ord(name), number, clients or 0])
    clients = clients or case.clients
    dims = NETWORK[0] if name == "E" else D
    mix = np.linalg.cholesky(np.full((dims, dims), CORRELATION) + (1 - CORRELATION) * np.eye(dims))
    sizes = [SIZES[i % len(SIZES)] for i in range(clients)]
    x = [rng.standard_normal((size, dims)) @ mix.T for size in sizes]
    held_out = rng.standard_normal((HELD_OUT, dims)) @ mix.T
    tau2 = {"B": TAU2, "D": float(rng.standard_normal() ** 2)}.get(name, 0.0)
    if name == "E":
        theta = rng.standard_normal((1, num_weights()))
        means = [network(theta[0], rows) for rows in x]
    else:
        scale = 1.0 if name == "A" else WIDE
        mean = scale * rng.standard_normal(dims)
        theta = mean + np.sqrt(tau2) * rng.standard_normal((clients, dims)) if tau2 else np.tile(mean, (clients, 1))
        means = [rows @ own for rows, own in zip(x, theta, strict=True)]
    if case.binary:
        y = [(rng.random(len(each)) < 1 / (1 + np.exp(-each))).astype(float) for each in means]
    else:
        y = [each + NOISE * rng.standard_normal(len(each)) for each in means]
    return Data(x, y, theta, tau2, held_out)


def num_weights() -> int:
    """Return the number of weights of the network in E."""
    inputs, hidden, outputs = NETWORK
    return hidden * inputs + hidden + outputs * hidden + outputs


def network(theta: Array, x: Array) -> Array:
    """Return the outputs (n,) of the network in E; theta holds the weights in the order of torch.nn.Sequential."""
    inputs, hidden, _ = NETWORK
    first, bias, second, last = np.split(theta, np.cumsum([hidden * inputs, hidden, hidden]))
    outputs: Array = np.tanh(x @ first.reshape(hidden, inputs).T + bias) @ second + last
    return outputs
