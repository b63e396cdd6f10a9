"""Bounds on uploads. They know what they bound: counts, weights, rho, and the distance from the server's model."""

from __future__ import annotations

from torch import Tensor

from pfedbayes.flower.messages import LARGEST_COUNT, Refused
from pfedbayes.flower.settings import FederationConfig
from pfedbayes.maths.trees import named_leaves
from pfedbayes.methods.base import Limits, Method, State


def refuse_wild(method: Method, config: FederationConfig, server: State, upload: State, limits: Limits) -> None:
    """Refuse an upload that is not finite, too large or too far from the server, and impossible counts."""
    for name, tensor in named_leaves(upload, "upload"):
        if tensor.is_floating_point():
            if not bool(tensor.isfinite().all()):
                raise Refused(f"{name} is not finite")
            if not method.about.mean_only:
                _refuse_above(tensor, config.largest, f"{name} has an entry", "largest")
        elif not bool(((tensor >= 0) & (tensor <= LARGEST_COUNT)).all()):
            raise Refused(f"{name} has impossible counts: {int(tensor.min())} to {int(tensor.max())}")
    if method.about.averages:
        refuse_unusable(method, config, upload)
        _refuse_above(upload - server, config.largest_step, "its distance from the server has an entry", "largest_step")
    if method.about.mean_only and (reason := method.check_upload(server, upload, limits)):
        raise Refused(reason)


def refuse_unusable(method: Method, config: FederationConfig, model: Tensor) -> None:
    """Refuse a model of a method that averages if no client could train from it."""
    _refuse_above(model, config.largest, "it has an entry", "largest")
    if method.about.gaussian:  # standard deviations that are practically zero or infinite
        _refuse_above(model[1], config.largest_rho, "its rho has an entry", "largest_rho")


def _refuse_above(tensor: Tensor, bound: float, what: str, setting: str) -> None:
    if tensor.numel() and (found := float(tensor.abs().max())) > bound:
        raise Refused(f"{what} of magnitude {found:.3g}, more than federation.{setting} = {bound:g}")
