"""Bounds on uploads. They know what they bound: counts, weights, rho, and the distance from the server's model."""

from __future__ import annotations

from torch import Tensor

from pfedbayes.flower.messages import LARGEST_COUNT, Refused
from pfedbayes.flower.settings import FederationConfig
from pfedbayes.maths.trees import named_leaves
from pfedbayes.methods.base import Method, State


def refuse_wild(method: Method, config: FederationConfig, server: State, upload: State) -> None:
    """Refuse an upload that is not finite, too large or too far from the server, and impossible counts."""
    for name, tensor in named_leaves(upload, "upload"):
        if not tensor.is_floating_point():
            if not bool(((tensor >= 0) & (tensor <= LARGEST_COUNT)).all()):
                raise Refused(f"{name} has impossible counts: {int(tensor.min())} to {int(tensor.max())}")
        elif not bool(tensor.isfinite().all()):
            raise Refused(f"{name} is not finite")
        else:
            _refuse_above(tensor, config.largest, f"{name} has an entry of magnitude", "largest")
    if method.about.gaussian:
        refuse_extreme_rho(config, upload)
    if method.about.averages:
        _refuse_above(upload - server, config.largest_step, "an entry differs from the server's by", "largest_step")


def refuse_extreme_rho(config: FederationConfig, gaussian: Tensor) -> None:
    """Refuse a Gaussian (2, T) whose standard deviations are practically zero or infinite."""
    _refuse_above(gaussian[1], config.largest_rho, "rho has an entry of magnitude", "largest_rho")


def _refuse_above(tensor: Tensor, bound: float, what: str, setting: str) -> None:
    if tensor.numel() and (found := float(tensor.abs().max())) > bound:
        raise Refused(f"{what} {found:.3g}, more than federation.{setting} = {bound:g}")
