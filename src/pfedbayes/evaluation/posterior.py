"""One model of a federation as a function from inputs to outputs, with draws that are the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pfedbayes.evaluation.estimators import Which
from pfedbayes.evaluation.models import FederatedModels, personal_state
from pfedbayes.evaluation.predict import predict
from pfedbayes.maths.random import Purpose, key, normal
from pfedbayes.nets import Model

Answer = Callable[[Tensor], Tensor]  # from inputs (n, ...) to outputs (K, n, ...), one for each draw
ROWS_AT_ONCE = 5000


@dataclass(frozen=True, eq=False)
class Weights:
    """A model whose weights are independent Gaussians with these means and standard deviations (T,), or one network if
    there are no deviations. seed names the draws, which are made on the CPU."""

    model: Model
    mean: Tensor
    deviation: Tensor | None
    seed: int

    def drawn(self, samples: int) -> Answer:
        """The model with so many draws."""
        thetas = self.mean[None]
        if self.deviation is not None:
            noise = normal((samples, len(self.mean)), self.seed, self.mean.dtype, torch.device("cpu"))
            thetas = self.mean + self.deviation * noise.to(self.mean.device)
        return partial(self._outputs, thetas)

    def _outputs(self, thetas: Tensor, x: Tensor) -> Tensor:
        rows = ROWS_AT_ONCE // 20 if self.model.net.convolutional else ROWS_AT_ONCE
        x = x.to(thetas.device, thetas.dtype if x.is_floating_point() else None)
        with torch.no_grad():
            return torch.cat([self.model.stacked_outputs(thetas, part) for part in torch.split(x, rows)], dim=1)


def weights_of(federation: FederatedModels, which: Which, client: int, s: int = 0) -> Weights | None:
    """A client's own model, or the shared one; None where it is more than the weights of the network."""
    method, seed = federation.method, federation.seeds[s]
    own = which == "personal"
    state = personal_state(federation, client, s) if own else federation.servers[s]
    q = method.posterior(state)
    if q is None:
        return None
    if method.about.gaussian:
        purpose = Purpose.PERSONAL_PREDICTION if own else Purpose.SHARED_PREDICTION
        return Weights(federation.model, q.mu, q.sigma, key(seed, purpose, federation.round, *[client] * own))
    return Weights(federation.model, q.mu, None, 0)


def answering(federation: FederatedModels, which: Which, client: int, samples: int, s: int = 0) -> Answer:
    """A client's own model, or the shared one, with so many draws if it draws."""
    weights = weights_of(federation, which, client, s)
    return (
        weights.drawn(samples) if weights else partial(predict, federation, which, client, samples=None, seed_index=s)
    )
