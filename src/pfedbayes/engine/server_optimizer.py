"""FedOpt (Reddi et al. 2021): the server treats its step to the average of the uploads as a negative gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from pfedbayes.engine.training import Training
from pfedbayes.maths.optim import Adam, Momentum, adam, adam_init, momentum, momentum_init
from pfedbayes.methods.base import Method, State

ServerOptimizer = Adam[Tensor] | Momentum


def first_optimizer(training: Training, method: Method, server: State) -> ServerOptimizer | None:
    """Return the server optimiser's state before the first round; None if there is no optimiser."""
    if training.server_optimizer == "none":
        return None
    optimized = server[0] if method.about.gaussian else server
    return adam_init(optimized) if training.server_optimizer == "adam" else momentum_init(optimized)


def server_step(
    training: Training, method: Method, server: Tensor, average: Tensor, optimizer: ServerOptimizer
) -> tuple[Tensor, ServerOptimizer]:
    """Return the server's next state and that of its optimiser, from the average of the uploads.

    Of Gaussians only the means take the step: widths with momentum can overshoot, and clients learn nothing under a
    prior that is too wide.
    """
    if method.about.gaussian:
        means, optimizer = _step(training, server[0], average[0], optimizer)
        return torch.stack([means, average[1]]), optimizer
    return _step(training, server, average, optimizer)


def _step(
    training: Training, server: Tensor, average: Tensor, optimizer: ServerOptimizer
) -> tuple[Tensor, ServerOptimizer]:
    rate, decay = training.server_rate, training.server_momentum
    if isinstance(optimizer, Adam):
        return adam(server, server - average, optimizer, rate, decay, beta2=0.99, eps=1e-3)
    return momentum(server, server - average, optimizer, rate, decay)
