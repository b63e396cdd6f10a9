"""FedRoD (Chen and Chao 2022): one body under two last layers, a generic and a personal one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import NonNegative
from pfedbayes.maths.optim import sgd
from pfedbayes.methods.base import About, Method, Needs, Shard, State
from pfedbayes.nets import Batch, Model

FEWEST = 1e-30  # the share of a class that a client lacks: it takes no part in the client's softmax


class TwoHeads(NamedTuple):
    """The state of a round."""

    theta: Tensor
    """Body and generic head."""
    head: Tensor
    """The personal head (T,), which is 0 in the body."""
    log_shares: Tensor
    """Logarithms of the client's class counts, up to a constant (C,)."""


@dataclass(frozen=True)
class FedRoD(Method):
    """The shared model learns by a balanced softmax, and the personal head adds what is special about the client.

    Both heads are linear, so their sum is one head: the personal model is theta + head. It has the server's body and
    generic head, and the client's personal head. The paper's fresh head or hyper-network rests on memory; here the
    personal head starts at zero.
    """

    eta: NonNegative[float] = 0.01
    """Learning rate of the body and the generic head."""
    eta_personal: NonNegative[float] = 0.01
    """Learning rate of the personal head."""
    start: Literal["zero", "copy"] = "zero"
    """First personal head: zero, or a copy of the generic head, as in PFLlib."""

    about = About(
        "FedRoD",
        "Chen and Chao, ICLR 2022",
        "one shared model that favours no label, and a last layer per client that is added to its own",
        personal=True,
    )

    @property
    def needs(self) -> Needs:
        return Needs(labels=True)

    def enrol(self, received: Tensor) -> Tensor:
        """Return the whole model to copy from with start="copy": `step` knows which part is the head."""
        return received if self.start == "copy" else torch.zeros_like(received)

    def begin(self, client: Tensor, received: Tensor, shard: Shard) -> TwoHeads:
        counts = shard.labels.to(received.dtype)
        return TwoHeads(received, client, (counts / counts.amax()).clamp_min(FEWEST).log())

    def step(self, model: Model, local: TwoHeads, batches: tuple[Batch, ...], noise: Tensor) -> TwoHeads:
        """theta <- theta - eta grad CE(f + log counts; B), and the personal head takes a step on CE(f + f_p; B).

        f_p sees the features and logits before the step on theta, and sends no gradient into them.
        """
        (batch,) = batches
        theta, log_shares = local.theta, local.log_shares
        head = self._head(model, local.head)

        def balanced_nll(theta: Tensor) -> Tensor:
            logits = model.outputs(theta, batch.x) + log_shares
            return (batch.weight * model.likelihood.nll(logits, batch.y)).sum()

        moved = sgd(head, model.grad_loss(theta + head, batch), self.eta_personal)
        theta = sgd(theta, torch.func.grad(balanced_nll)(theta) / batch.size, self.eta)
        return TwoHeads(theta, self._head(model, moved), log_shares)

    def end(self, local: TwoHeads) -> tuple[Tensor, Tensor]:
        """Keep the personal head, and upload the body with the generic head."""
        return local.head, local.theta

    def adapt(self, model: Model, client: Tensor, received: Tensor, prepared: State) -> Tensor:
        """theta_i = w + head."""
        return received + self._head(model, client)

    def _head(self, model: Model, theta: Tensor) -> Tensor:
        """Return theta with a body of 0."""
        return model.net.join(torch.zeros_like(theta), theta)
