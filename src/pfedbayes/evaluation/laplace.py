"""Last-layer Laplace (Daxberger et al. 2021): a Gaussian over the last layer of a model that has been trained.

The personal model takes the curvature of the client's own training data. The shared model takes the sum over all
clients, which each of them could send as one more upload.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pfedbayes.errors import UserError
from pfedbayes.evaluation.posthoc import PostHoc
from pfedbayes.maths.gaussian import MeanField
from pfedbayes.maths.laplace import (
    Spectrum,
    Structure,
    curvature,
    deviations,
    log_evidence,
    output_variances,
    precisions,
    probit,
    spectrum,
)
from pfedbayes.maths.likelihoods import Classification, Gaussian, Likelihood, Regression
from pfedbayes.maths.trees import Tree, tree_map
from pfedbayes.methods.base import About, Adaptation, State, adapts
from pfedbayes.nets import Batch, Model, Net

Choice = Literal["evidence", "validation"]


class HeadPosterior(NamedTuple):
    """A model whose last layer is Gaussian."""

    theta: Tensor
    """The trained weights (T,), the mean."""
    spectrum: Spectrum
    """Of the curvature."""
    precision: Tensor
    """The prior precision tau."""


class Prepared(NamedTuple):
    """What a client's model is made from."""

    inner: State
    train: Batch
    validation: Batch


@dataclass(frozen=True)
class Laplace(PostHoc):
    """A method whose models get a Gaussian over their last layer when they predict."""

    structure: Structure = "kronecker"
    """Structure of the covariance."""
    choice: Choice = "evidence"
    """The prior precision has the highest marginal likelihood, or the least NLL of validation rows."""

    @property
    def about(self) -> About:  # type: ignore[override]
        inner = self.method.about
        return inner._replace(title=f"{inner.title}, Laplace", stochastic=True)

    def prepare(self, data: Adaptation) -> Prepared:
        return Prepared(self.method.prepare(data), data.train, data.validation)

    def adapt(self, model: Model, client: State, received: State, prepared: Prepared) -> HeadPosterior:
        """Return the personal model, with the curvature of the client's training set."""
        inner = client
        if adapts(self.method):
            inner = self.method.adapt(model, client, received, prepared.inner)
        theta = self.weights_of(inner)
        return self.fit(model, theta, self.curvature(model, theta, prepared.train), [prepared.validation])

    def shared(self, model: Model, server: State, train: Iterable[Batch], validation: Iterable[Batch]) -> HeadPosterior:
        """Return the shared model, with the curvature of all these batches."""
        theta = self.weights_of(server)
        parts = (self.curvature(model, theta, batch) for batch in train)
        summed = reduce(lambda one, other: tree_map(torch.add, one, other), parts)
        return self.fit(model, theta, summed, validation)

    def curvature(self, model: Model, theta: Tensor, batch: Batch) -> Tree:
        """Return the curvature of the loss of a batch in the last layer, as tensors that add up over batches."""
        require_gaussian(model.likelihood)
        phi, outputs = _features(model, theta, batch.x)
        start = model.net.head_start
        return curvature(self.structure, phi, _hessian(model.likelihood, outputs)[:, start:, start:])

    def fit(self, model: Model, theta: Tensor, summed: Tree, validation: Iterable[Batch]) -> HeadPosterior:
        """Return the posterior for a summed curvature, with the best prior precision."""
        head = head_weights(model.net, theta)
        found = spectrum(self.structure, summed, len(head))
        losses = []
        if self.choice == "validation":
            losses = [_predictive_nll(model, theta, found, batch) for batch in validation if len(batch.weight)]
        # Where there are no validation rows, the evidence chooses.
        score = -torch.stack(losses).sum(0) if losses else log_evidence(found.values, head)
        return HeadPosterior(theta, found, precisions(head)[score.argmax()])

    def posterior(self, state: State) -> MeanField | None:
        """Return None for a model with a Gaussian last layer, whose weights are not independent."""
        return None if isinstance(state, HeadPosterior) else self.method.posterior(state)

    def drawn(self, net: Net) -> int:
        return net.head_size

    def predict(self, model: Model, state: HeadPosterior, x: Tensor, noise: Tensor | None) -> Tensor:
        """Return outputs (K, n, ...): of the trained network, or with K draws of its last layer (noise (K, H))."""
        if noise is None:
            return model.outputs(state.theta, x)[None]
        phi, outputs = _features(model, state.theta, x)
        return outputs + _of_all_outputs(phi @ deviations(state.spectrum, state.precision, noise).mT, model, outputs)


def require_gaussian(likelihood: Likelihood) -> None:
    """Refuse a likelihood whose Hessian is not known here."""
    if type(likelihood) not in (Classification, Regression, Gaussian):
        raise UserError(
            "evaluation.posterior=laplace knows classes, and numbers with Gaussian noise: set "
            "net.likelihood=gaussian for numbers, or evaluation.posterior=ensemble"
        )


def head_weights(net: Net, theta: Tensor) -> Tensor:
    """Return the weights (C, D) of the last layer; the last column is the bias, if it has one."""
    outputs, head = net.shapes[-1][0], theta[-net.head_size :]
    if not _has_bias(net):
        return head.view(outputs, -1)
    return torch.cat([head[:-outputs].view(outputs, -1), head[-outputs:, None]], dim=1)


def _has_bias(net: Net) -> bool:
    """Return whether the last layer has a bias, which comes last in theta."""
    return len(net.shapes[-1]) == 1


def _features(model: Model, theta: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs (n, D) of the last layer, with a 1 for its bias, and the outputs (n, ...) of the network."""
    phi = model.net.features(theta, model.inputs(x, theta.dtype))
    return functional.pad(phi, (0, 1), value=1.0) if _has_bias(model.net) else phi, model.outputs(theta, x)


def _of_all_outputs(values: Tensor, model: Model, outputs: Tensor) -> Tensor:
    """Return values (..., C) of the outputs of the last layer with zeros for the outputs that it does not make."""
    before, width = model.net.head_start, outputs.shape[-1]
    return functional.pad(values, (before, width - before - values.shape[-1]))


def _hessian(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """Return the Hessians (n, C, C) of the negative log-likelihood in the outputs of the last layer."""
    if isinstance(likelihood, Regression):
        mean, noise = likelihood.mean_and_noise(outputs)
        return torch.diag_embed(noise.square().reciprocal().expand_as(mean))
    p = outputs.softmax(-1)
    return torch.diag_embed(p) - p[..., None] * p[..., None, :]


def _predictive_nll(model: Model, theta: Tensor, found: Spectrum, batch: Batch) -> Tensor:
    """Return the summed NLL of a batch for each of the `precisions` (P,), with Gaussian outputs in closed form."""
    phi, outputs = _features(model, theta, batch.x)
    losses = []
    for tau in precisions(theta):
        variances = _of_all_outputs(output_variances(found, tau, phi), model, outputs)
        if isinstance(model.likelihood, Regression):
            mean, noise = model.likelihood.mean_and_noise(outputs)
            variance = (noise.square() + variances[..., : mean.shape[-1]]).expand_as(mean)
            losses.append(functional.gaussian_nll_loss(mean, batch.y, variance, reduction="sum"))
        else:
            losses.append(model.likelihood.nll(probit(outputs, variances), batch.y).sum())
    return torch.stack(losses)
