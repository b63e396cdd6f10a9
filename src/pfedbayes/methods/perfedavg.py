"""Per-FedAvg (Fallah et al. 2020): a shared model that fits a client after one gradient step on its data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import NonNegative, Positive
from pfedbayes.maths.optim import sgd
from pfedbayes.maths.trees import pick
from pfedbayes.methods.base import About, Adaptation, LocalModel, Method, Needs, State
from pfedbayes.nets import Batch, Model


class Personal(NamedTuple):
    """A personal model at prediction time."""

    theta: Tensor
    honest: Tensor
    """The model adapted on training data only."""


@dataclass(frozen=True)
class PerFedAvg(Method):
    """Train the shared model so that one adaptation step makes it a good personal model."""

    eta_outer: NonNegative[float] = 0.01
    """Learning rate of the shared model; beta in the paper."""
    alpha: NonNegative[float] = 0.01
    """Learning rate of the adaptation step."""
    variant: Literal["first-order", "exact", "hessian-free"] = "first-order"
    """Treatment of the Hessian H in the gradient's factor I - alpha H. "first-order" drops it. "exact" computes its
    product with a vector by automatic differentiation, "hessian-free" by central differences."""
    delta: Positive[float] = 1e-3
    """Width of the central differences."""
    adapt_on: Literal["train", "train-full", "pfedme-test"] = "train"
    """Data of the adaptation step: one batch of the client's training set, or all of it. "pfedme-test" takes two steps
    (alpha, then eta_outer) on batches of the data to be predicted, as the comparison in pFedMe's code does. Its scores
    are too good; the view "honest" adapts the same model on "train"."""

    about = About(
        "Per-FedAvg",
        "Fallah et al., NeurIPS 2020",
        "a shared start from which one step on a client's data makes its model",
        personal=True,
        shared=False,
    )

    @property
    def needs(self) -> Needs:
        return Needs(batches_per_step=2 if self.variant == "first-order" else 3)

    def step(self, model: Model, local: LocalModel, batches: tuple[Batch, ...], noise: Tensor) -> LocalModel:
        """w <- w - eta_outer (I - alpha H(w; B3)) grad CE(w - alpha grad CE(w; B1); B2)."""
        w = local.theta
        adapted = sgd(w, model.grad_loss(w, batches[0]), self.alpha)
        grad = model.grad_loss(adapted, batches[1])
        if self.variant != "first-order":
            grad = grad - self.alpha * self.hessian_product(model, batches[2], w, grad)
        return LocalModel(sgd(w, grad, self.eta_outer))

    def hessian_product(self, model: Model, batch: Batch, w: Tensor, v: Tensor) -> Tensor:
        """Return H(w; B) v.

        "hessian-free" approximates it by [grad CE(w + delta v; B) - grad CE(w - delta v; B)] / (2 delta).
        """
        gradient = partial(model.grad_loss, batch=batch)
        if self.variant == "exact":
            product: Tensor = torch.func.vjp(gradient, w)[1](v)[0]  # H is symmetric
            return product
        return (gradient(w + self.delta * v) - gradient(w - self.delta * v)) / (2 * self.delta)

    def prepare(self, data: Adaptation) -> tuple[Batch, ...]:
        """Return a batch of the training set and, for "pfedme-test", two batches of the data to be predicted."""
        own = [data.train] if self.adapt_on == "train-full" else _draw(data.train, 1, data)
        if self.adapt_on == "pfedme-test" and data.test is not None:
            own += _draw(data.test, 2, data)
        return tuple(own)

    def adapt(self, model: Model, client: State, received: Tensor, prepared: tuple[Batch, ...]) -> Personal:
        """theta_i = w - alpha grad CE(w; B), with a batch B of the client's training data."""
        batch, *leaked = prepared
        honest = sgd(received, model.grad_loss(received, batch), self.alpha)
        if not leaked:
            return Personal(honest, honest)
        first, second = leaked
        theta = sgd(received, model.grad_loss(received, first), self.alpha)
        return Personal(sgd(theta, model.grad_loss(theta, second), self.eta_outer), honest)

    def views(self, client: Personal, received: Tensor) -> dict[str, Personal]:
        return {"honest": client._replace(theta=client.honest)} if self.adapt_on == "pfedme-test" else {}


def _draw(examples: Batch, count: int, data: Adaptation) -> list[Batch]:
    """Return `count` shuffled batches; they overlap only if there are too few examples."""
    size = len(examples.weight)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(data.seed)).to(examples.weight.device)
    width = min(data.batch_size, size)
    return [pick(examples, order.roll(-k * width)[:width]) for k in range(count)]
