"""SCAFFOLD (Karimireddy et al. 2020): FedAvg whose local steps are corrected by control variates.

A client's control c_i is its mean gradient, and the server's c is the mean of all c_i. A local step follows the own
gradient minus c_i plus c, so that clients with different data drift apart less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import NonNegative
from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Limits, Method, Needs, Shard
from pfedbayes.nets import Batch, Model, Net


class Server(NamedTuple):
    """The server's state, which every client receives."""

    theta: Tensor
    """The shared model x."""
    control: Tensor
    """The control variate c, which is (1/N) sum of c_i."""
    share: Tensor
    """1 / N."""


class Local(NamedTuple):
    """The state of a round."""

    theta: Tensor
    """The client's copy y of the shared model."""
    start: Tensor
    """The received model x."""
    control: Tensor
    """The server's control variate c."""
    own: Tensor
    """The client's control variate c_i."""
    gradients: Tensor
    """Sum of the gradients of this round."""
    steps: Tensor
    """Number of steps taken in this round."""


class Upload(NamedTuple):
    """What a client sends: differences, both zero for a client that has taken no step."""

    theta: Tensor
    """y - x."""
    control: Tensor
    """The change of c_i."""


@dataclass(frozen=True)
class Scaffold(Method):
    """Controls follow option II of the paper: c_i <- c_i - c + (x - y) / (R eta).

    This is the mean of the gradients of the round, which is how it is computed here: the difference x - y would lose
    digits. The server uses plain means, without the clients' numbers of examples. On Flower, robust rules shorten
    uploads, so c is close to the mean of the c_i and no longer equal to it.
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of the local SGD steps."""
    eta_global: NonNegative[float] = 1.0
    """Step of the server towards the mean of the clients' models."""

    about = About(
        "SCAFFOLD",
        "Karimireddy et al., ICML 2020",
        "one shared model, with control variates against the drift of clients",
        averages=False,
        mean_only=True,
    )

    @property
    def needs(self) -> Needs:
        return Needs(tied=True)

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Server:
        return Server(theta, torch.zeros_like(theta), theta.new_tensor(1 / num_clients))

    def aggregate(self, server: Server, uploads: Upload, sizes: Tensor, clients: Tensor) -> Server:
        """x <- x + eta_global mean (y_i - x) and c <- c + (S / N) mean (change of c_i), over S^t."""
        return server._replace(
            theta=server.theta + self.eta_global * uploads.theta.mean(0),
            control=server.control + len(clients) * server.share * uploads.control.mean(0),
        )

    def check_upload(self, server: Server, upload: Upload, limits: Limits) -> str | None:
        """Bound the distance from the shared model, and the change of a mean gradient."""
        bounds = {
            "its distance from the server": (upload.theta, limits.step),
            "its change of the control variate": (upload.control, 2 * limits.largest),
        }
        for what, (tensor, bound) in bounds.items():
            if (largest := float(tensor.abs().max())) > bound:
                return f"{what} has an entry of magnitude {largest:.3g}, more than {bound:g}"
        return None

    def enrol(self, received: Server) -> Tensor:
        return torch.zeros_like(received.control)

    def begin(self, client: Tensor, received: Server, shard: Shard) -> Local:
        return Local(
            theta=received.theta,
            start=received.theta,
            control=received.control,
            own=client,
            gradients=torch.zeros_like(client),
            steps=torch.zeros_like(received.share),
        )

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """y <- y - eta [grad CE(y; B) - c_i + c]."""
        (batch,) = batches
        grad = model.grad_loss(local.theta, batch)
        return local._replace(
            theta=sgd(local.theta, grad + (local.control - local.own), self.eta),
            gradients=local.gradients + grad,
            steps=local.steps + 1,
        )

    def end(self, local: Local) -> tuple[Tensor, Upload]:
        """Keep the new c_i, the mean gradient of the round, and upload both differences."""
        mean = local.gradients / local.steps.clamp_min(1)
        own = torch.where(local.steps > 0, mean, local.own)
        return own, Upload(local.theta - local.start, own - local.own)
