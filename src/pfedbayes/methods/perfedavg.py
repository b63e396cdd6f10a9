"""Per-FedAvg (Fallah et al. 2020): a shared model that is good after one gradient step on a client's own data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.maths.optim import sgd
from pfedbayes.maths.trees import pick
from pfedbayes.methods.base import About, Adaptation, Local, Method, Needs, State, require
from pfedbayes.nets import Batch, Model


class Personal(NamedTuple):
    """A personal model made for prediction: theta, and the one made without a look at test data."""

    theta: Tensor
    honest: Tensor


@dataclass(frozen=True)
class PerFedAvg(Method):
    """alpha: rate of the step that adapts; eta_outer: rate of the steps on the model to be adapted, called beta in the
    paper.

    variant: the gradient through the adapting step carries I - alpha H. "first-order" drops the Hessian H, "exact"
    has its product with a vector by automatic differentiation, "hessian-free" by central differences of width delta.
    adapt_on: "train", one batch of the client's training data; "train-full", all of them; "pfedme-test" takes two
    steps (alpha, then eta_outer) on batches of the data to be predicted, as the comparison in pFedMe's code does. Its
    figures are flattered, so "honest" stands beside them: "train" on the same model.
    """

    eta_outer: float = 0.01
    alpha: float = 0.01
    variant: Literal["first-order", "exact", "hessian-free"] = "first-order"
    delta: float = 1e-3
    adapt_on: Literal["train", "train-full", "pfedme-test"] = "train"

    about = About(
        "Per-FedAvg",
        "Fallah et al., NeurIPS 2020",
        "a shared start from which one step on own data makes a client's model",
        personal=True,
        shared=False,
    )

    def __post_init__(self) -> None:
        require(self.eta_outer >= 0, f"eta_outer must not be negative, got {self.eta_outer}")
        require(self.alpha >= 0, f"alpha must not be negative, got {self.alpha}")
        require(self.delta > 0, f"delta must be positive, got {self.delta}")

    @property
    def needs(self) -> Needs:
        return Needs(batches_per_step=2 if self.variant == "first-order" else 3)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """w <- w - eta_outer (I - alpha H(w; B3)) grad CE(w - alpha grad CE(w; B1); B2)."""
        w = local.theta
        adapted = sgd(w, model.grad_loss(w, batches[0]), self.alpha)
        grad = model.grad_loss(adapted, batches[1])
        if self.variant != "first-order":
            grad = grad - self.alpha * self.hessian_product(model, batches[2], w, grad)
        return Local(sgd(w, grad, self.eta_outer))

    def hessian_product(self, model: Model, batch: Batch, w: Tensor, v: Tensor) -> Tensor:
        """H(w; B) v; without second derivatives [grad CE(w + delta v; B) - grad CE(w - delta v; B)] / (2 delta)."""
        gradient = partial(model.grad_loss, batch=batch)
        if self.variant == "exact":
            product: Tensor = torch.func.vjp(gradient, w)[1](v)[0]  # H is symmetric
            return product
        return (gradient(w + self.delta * v) - gradient(w - self.delta * v)) / (2 * self.delta)

    def prepare(self, data: Adaptation) -> tuple[Batch, ...]:
        """A batch of the training data, and then two of the data to be predicted where the method looks at them."""
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
    """So many batches in random order, since the examples may be sorted; they share some only where there are few."""
    size = len(examples.weight)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(data.seed)).to(examples.weight.device)
    width = min(data.batch_size, size)
    return [pick(examples, order.roll(-k * width)[:width]) for k in range(count)]
