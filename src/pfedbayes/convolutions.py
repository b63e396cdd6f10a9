"""Convolutions of many networks at once, one for each client, which torch's own are slow at on a GPU."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

Convolutions = Literal["native", "matmul"]


def replace_convolutions(module: nn.Module, kind: Convolutions) -> nn.Module:
    """The module, changed, with its plain 2-d convolutions computed this way."""
    for part in module.modules() if kind == "matmul" else ():
        if type(part) is nn.Conv2d and part.groups == 1 and part.padding_mode == "zeros":
            part.__class__ = MatmulConv2d
        elif type(part) is nn.GroupNorm:
            part.__class__ = PlainGroupNorm
    return module


class _Product(torch.autograd.Function):
    """Patches (n, K) times weights (K, C), with a gradient of the weights that is fast for many patches.

    It sums over all patches, which a GPU would do one after another: they are cut into parts that are summed at once.
    """

    generate_vmap_rule = True
    PATCHES = 2048  # of one part, about

    @staticmethod
    def forward(patches: Tensor, weight: Tensor) -> Tensor:
        return patches @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        patches, weight = ctx.saved_tensors
        parts = math.gcd(len(patches), 2 ** int(math.log2(max(1, len(patches) // _Product.PATCHES))))
        left, right = (values.view(parts, -1, values.shape[1]) for values in (patches, grad.contiguous()))
        return grad @ weight.T, torch.bmm(left.transpose(1, 2), right).sum(0)


class MatmulConv2d(nn.Conv2d):
    """A convolution as one matrix product of the patches with the weights.

    Mapped over clients it is a batch of products, where a native convolution has to become a grouped one. Where there
    are many patches, one serves a tile of 2 x 2 outputs: with a kernel of 3 x 3 it has 16 pixels, where four patches
    have 36. More is multiplied, with zeros, but less is moved, and that is what takes the time.
    """

    def forward(self, x: Tensor) -> Tensor:
        (height, width), (apart_y, apart_x), (step_y, step_x) = self.kernel_size, self.dilation, self.stride
        x = nn.functional.pad(x.permute(0, 2, 3, 1), (0, 0, *self._reversed_padding_repeated_twice))
        weight = self.weight.permute(2, 3, 1, 0)
        rows = x.shape[1] - apart_y * (height - 1)
        columns = x.shape[2] - apart_x * (width - 1)
        # Few patches are moved quickly, and the weights of a tile are four times as many.
        plain = self.stride == self.dilation == (1, 1) and rows % 2 == columns % 2 == 0
        tile = 2 if plain and len(x) * rows * columns >= 16 * self.out_channels else 1
        if tile == 2:  # the weights of the four outputs, each where it meets its pixels in the larger patch
            shifts = [(j, 1 - j, i, 1 - i) for i in range(2) for j in range(2)]
            weight = torch.stack([nn.functional.pad(weight, (0, 0, 0, 0, *shift)) for shift in shifts], dim=3)
            height, width, step_y, step_x, rows, columns = height + 1, width + 1, 2, 2, rows - 1, columns - 1
        # First the columns of the kernel side by side, then its rows: the compiler makes one pass of few pieces.
        x = torch.cat([x[:, :, j * apart_x : j * apart_x + columns : step_x] for j in range(width)], dim=-1)
        patches = torch.cat([x[:, i * apart_y : i * apart_y + rows : step_y] for i in range(height)], dim=-1)
        weight = weight.reshape(patches.shape[-1], -1)
        products: Tensor = _Product.apply(patches.flatten(0, 2), weight)  # type: ignore[no-untyped-call]
        tiles = products.view(*patches.shape[:3], tile, tile, self.out_channels)
        outputs = tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.permute(0, 3, 1, 2)


class PlainGroupNorm(nn.GroupNorm):
    """Group normalisation in plain arithmetic: torch's own refuses, mapped over clients, what a product gives."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # the mean of many in half precision is none
        groups = torch.unflatten(wide, 1, (self.num_groups, -1))
        inside = tuple(range(2, groups.dim()))
        variance, mean = torch.var_mean(groups, inside, correction=0, keepdim=True)
        normal = ((groups - mean) * (variance + self.eps).rsqrt()).flatten(1, 2).to(x.dtype)
        if not self.affine:
            return normal
        shape = (-1, *[1] * (x.dim() - 2))
        return normal * self.weight.view(shape) + self.bias.view(shape)
