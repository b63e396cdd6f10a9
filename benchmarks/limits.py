"""The rates of the machine, and the least time that a round needs at these rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.work import Work


class Limits(NamedTuple):
    """Measured rates per second."""

    flops: float  # of float32 matrix products
    flops_tf32: float  # with TF32; the same on a CPU
    bytes: float  # of a copy; a byte that is read and written counts twice


def measure(device: str) -> Limits:
    """Return the best of several: a large square matrix product, and a copy of an array larger than any cache."""
    size, numbers = (8192, 2**28) if device == "cuda" else (2048, 2**26)
    a, b, product = (torch.rand(size, size, device=device) for _ in range(3))
    source, target = (torch.ones(numbers, device=device) for _ in range(2))

    def multiply() -> float:
        return 2 * size**3 / _least_seconds(lambda: torch.mm(a, b, out=product), device)

    flops = flops_tf32 = multiply()
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
        flops_tf32 = multiply()
        torch.set_float32_matmul_precision("highest")
    return Limits(flops, flops_tf32, 2 * source.nbytes / _least_seconds(lambda: target.copy_(source), device))


def best(measured: list[Limits]) -> Limits:
    """Return the highest rate of each kind: disturbances only lower a rate."""
    return Limits(*map(max, zip(*measured, strict=True)))


def _least_seconds(task: Callable[[], object], device: str, repeats: int = 3) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        task()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def step_flops(work: Work) -> int:
    """Return the floating-point operations of the products and convolutions of one client-step, as torch counts them.

    2 b T each for the forward pass and for the gradient of the weights, and 2 b T for the gradient of the inputs of
    every layer except the first.
    """
    module = work.module()
    x = torch.zeros(work.batch_size, *work.example_shape)
    with FlopCounterMode(display=False) as counter:
        loss = cross_entropy(module(x), torch.zeros(work.batch_size, dtype=torch.int64))
        torch.autograd.backward(loss)
    return int(counter.get_total_flops())


def step_bytes(work: Work) -> int:
    """Return the bytes that the element-wise part of one client-step reads and writes, in float32, each array once.

    pFedBayes: q and w, (2, T) each, and the two moments of both, read and written; the noise and the gradient of the
    weights, (T,) each, written and read. FedAvg: theta read and written, the gradient written and read.
    """
    num_params = sum(weight.numel() for weight in work.module().parameters())
    arrays = 2 * (2 + 2 + 4 + 4) + 2 * (1 + 1) if work.method == "pfedbayes" else 2 + 2
    return 4 * arrays * num_params


def floor(work: Work, limits: Limits, tf32: bool) -> float:
    """Return the seconds that a round needs at the measured rates if nothing overlaps."""
    rate = limits.flops_tf32 if tf32 else limits.flops
    return work.client_steps * (step_flops(work) / rate + step_bytes(work) / limits.bytes)
