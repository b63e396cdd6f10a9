"""Convolutions of many networks at once, one for each client, which torch's own are slow at on a GPU."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pfedbayes.trees import in_memory

Convolutions = Literal["native", "matmul"]


def replace_convolutions(module: nn.Module, kind: Convolutions) -> nn.Module:
    """The module, changed, with its plain 2-d convolutions computed this way."""
    if kind == "native":
        return module
    for part in module.modules():
        if type(part) is nn.Conv2d and part.groups == 1 and part.padding_mode == "zeros" and part.dilation == (1, 1):
            part.__class__ = MatmulConv2d
        elif type(part) is nn.GroupNorm:
            part.__class__ = PlainGroupNorm
    for part in module.modules():
        if type(part) is nn.Sequential:
            _pool_early(part)
    return module


def _pool_early(layers: nn.Sequential) -> None:
    """Maxima are taken before ReLUs, which gives the same and leaves these a quarter of the work; and where they are
    those of a convolution, it takes them itself."""
    for k, (first, second) in enumerate(pairwise(layers)):
        if type(first) is nn.ReLU and type(second) is nn.MaxPool2d and not second.return_indices:
            layers[k], layers[k + 1] = second, first
    for k, (first, second) in enumerate(pairwise(layers)):
        if type(first) is MatmulConv2d and type(second) is nn.MaxPool2d and _halves(second):
            first.pools = True
            layers[k + 1] = nn.Identity()


def _halves(pool: nn.MaxPool2d) -> bool:
    """Whether it takes the maxima of tiles of 2 x 2."""
    plain = not (pool.padding or pool.ceil_mode or pool.return_indices) and pool.dilation == 1
    return plain and pool.kernel_size in (2, (2, 2)) and pool.stride in (2, (2, 2))


class _Patches(torch.autograd.Function):
    """The patches (n, rows, columns, height, width, C) of images (n, H, W, C), with a gradient in one pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, size: tuple[int, int], step: tuple[int, int]) -> Tensor:
        return x.unfold(1, size[0], step[0]).unfold(2, size[1], step[1]).permute(0, 1, 2, 4, 5, 3)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[int, int], tuple[int, int]], output: Tensor) -> None:
        x, ctx.patch_size, ctx.step = inputs
        ctx.image_size = x.shape[1:3]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """What lies over a pixel is added. Steps cut an image into cells and a patch into as many parts as cells it
        lies over, so that what lies over a cell are whole parts of its neighbours' patches."""
        (height, width), (step_y, step_x) = ctx.patch_size, ctx.step
        down, across = -(-height // step_y), -(-width // step_x)
        grad = pad(grad, (0, 0, 0, across * step_x - width, 0, down * step_y - height))
        parts = torch.unflatten(torch.unflatten(grad, 4, (across, step_x)), 3, (down, step_y))
        over = [
            pad(parts[:, :, :, i, :, j], (0, 0, 0, 0, 0, 0, j, across - 1 - j, i, down - 1 - i))
            for i in range(down)
            for j in range(across)
        ]
        cells = sum(over[1:], over[0])
        pixels = cells.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        missing_y, missing_x = (size - now for size, now in zip(ctx.image_size, pixels.shape[1:3], strict=True))
        return pad(pixels, (0, 0, 0, missing_x, 0, missing_y)), None, None


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


class _Maximum(torch.autograd.Function):
    """The maxima (..., C) of tiles (..., 4, C), and which they were: of equals the first, as in torch's pooling."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tiles: Tensor) -> tuple[Tensor, Tensor]:
        largest, *others = tiles.unbind(-2)
        which = torch.zeros_like(largest, dtype=torch.int8)
        for k, other in enumerate(others, start=1):
            better = (other > largest) | other.isnan()
            largest, which = torch.where(better, other, largest), torch.where(better, k, which)
        return in_memory(largest), in_memory(which)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        (which,) = ctx.saved_tensors
        each = torch.arange(4, dtype=torch.int8, device=grad.device)[:, None]
        return torch.where(which[..., None, :] == each, grad[..., None, :], 0)


class MatmulConv2d(nn.Conv2d):
    """A convolution as one matrix product of the patches with the weights.

    Mapped over clients it is a batch of products, where a native convolution has to become a grouped one. Where there
    are many patches, one serves a tile of 2 x 2 outputs: with a kernel of 3 x 3 it has 16 pixels, where four patches
    have 36. More is multiplied, with zeros, but less is moved, and that is what takes the time. For the same reason it
    takes the maxima of tiles itself, if they are what is wanted: those of a product lie side by side.
    """

    pools = False

    def forward(self, x: Tensor) -> Tensor:
        (height, width), (step_y, step_x) = self.kernel_size, self.stride
        x = pad(x.permute(0, 2, 3, 1), (0, 0, *self._reversed_padding_repeated_twice))
        weight = self.weight.permute(2, 3, 1, 0)
        rows, columns = x.shape[1] - height + 1, x.shape[2] - width + 1
        # Few patches are moved quickly, and the weights of a tile are four times as many.
        plain = self.stride == (1, 1) and rows % 2 == columns % 2 == 0
        tile = 2 if plain and len(x) * rows * columns >= 16 * self.out_channels else 1
        if tile == 2:  # the weights of the four outputs, each where it meets its pixels in the larger patch
            shifts = [(j, 1 - j, i, 1 - i) for i in range(2) for j in range(2)]
            weight = torch.stack([pad(weight, (0, 0, 0, 0, *shift)) for shift in shifts], dim=3)
            height, width, step_y, step_x = height + 1, width + 1, 2, 2
        patches = _Patches.apply(x, (height, width), (step_y, step_x))  # type: ignore[no-untyped-call]
        weight = weight.reshape(height * width * self.in_channels, -1)
        products: Tensor = _Product.apply(patches.flatten(0, 2).flatten(1), weight)  # type: ignore[no-untyped-call]
        tiles = products.view(*patches.shape[:3], tile, tile, self.out_channels)
        outputs = self._maxima(tiles) if self.pools else tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.permute(0, 3, 1, 2)

    def _maxima(self, tiles: Tensor) -> Tensor:
        """Of 2 x 2 outputs each, from tiles of as many or of one; as in torch's pooling a last odd one is left out."""
        if tiles.shape[3] == 1:
            outputs = tiles.flatten(2, 4)
            outputs = outputs[:, : outputs.shape[1] // 2 * 2, : outputs.shape[2] // 2 * 2]
            tiles = torch.unflatten(torch.unflatten(outputs, 2, (-1, 2)), 1, (-1, 2)).transpose(2, 3)
        maxima: Tensor = _Maximum.apply(tiles.flatten(3, 4))[0]  # type: ignore[no-untyped-call]
        return maxima


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
