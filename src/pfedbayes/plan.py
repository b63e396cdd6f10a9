"""How a run is executed: device, precision, clients together or in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from pfedbayes.errors import UserError
from pfedbayes.methods.base import Method
from pfedbayes.nets import Model


@dataclass(frozen=True)
class Plan:
    """How a run is executed. Results agree to rounding across plans and to the last bit within one.

    over: clients trained together ("vmap") or one after another ("loop"); chunk: at most so many together.
    resting: where the states of clients lie between rounds; the federation decides if it is None.
    """

    device: str = "cpu"
    over: Literal["vmap", "loop"] = "vmap"
    chunk: int | None = None
    threads: int | None = None
    dtype: Literal["float32", "float64"] = "float32"
    resting: Literal["device", "host", "file"] | None = None

    def activate(self) -> None:
        """Set torch's global switches: threads, and on a GPU the deterministic full-precision kernels."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.allow_tf32 = False


def choose_device(device: str) -> str:
    """Turn "auto" into what there is; refuse what is no device, and a GPU that is not there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise UserError(f"there is no device {device!r}: use --device auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("a GPU was asked for (--device cuda) but torch sees none: use --device cpu or --device auto")
    return device


def choose_plan(
    model: Model, method: Method, device: str = "auto", dtype: Literal["float32", "float64"] = "float32"
) -> Plan:
    """vmap where the method allows it, but for convolutions on a CPU: grouped ones take twice the time of a loop."""
    device = choose_device(device)
    slow = model.net.convolutional and device == "cpu"
    over: Literal["vmap", "loop"] = "loop" if slow or not method.batched else "vmap"
    return Plan(device=device, over=over, threads=torch.get_num_threads() if device == "cpu" else None, dtype=dtype)
