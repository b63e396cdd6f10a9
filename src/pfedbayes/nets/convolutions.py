"""Fast convolutions of many networks at once, one per client. torch's convolutions are slow at this on a GPU."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pfedbayes.memory import in_memory

Convolutions = Literal["native", "matmul"]
Layer = TypeVar("Layer", bound=nn.Module)


def replace_convolutions(module: nn.Module, kind: Convolutions) -> nn.Module:
    """Change the module in place so that it computes its plain 2-d convolutions this way, and return it."""
    if kind == "native":
        return module
    for part in module.modules():
        if type(part) is nn.Sequential:
            part.__class__ = PoolingEarly
        elif type(part) is nn.Conv2d and part.groups == 1 and part.padding_mode == "zeros" and part.dilation == (1, 1):
            part.__class__ = MatmulConv2d
        elif type(part) is nn.GroupNorm:
            part.__class__ = PlainGroupNorm
    return module


class PoolingEarly(nn.Sequential):
    """A sequence of layers that pools before ReLU: the result is the same, and ReLU has a quarter of the work.

    If the layer before is a convolution, the convolution itself pools.
    """

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        while layers:
            first = layers.pop(0)
            after = 1 if layers and _is(layers[0], nn.ReLU) else 0
            if _is(first, MatmulConv2d) and layers[after:] and _halves(layers[after]):
                x = first.pooled(x)
                del layers[after]
            elif _is(first, nn.ReLU) and layers and _is(layers[0], nn.MaxPool2d) and not layers[0].return_indices:
                x = first(layers.pop(0)(x))
            else:
                x = first(x)
        return x


def _is(layer: nn.Module, kind: type[Layer]) -> TypeGuard[Layer]:
    """Return whether a layer has exactly this type and no hooks."""
    return type(layer) is kind and not (layer._forward_hooks or layer._forward_pre_hooks)


def _halves(layer: nn.Module) -> bool:
    """Return whether a layer is 2 x 2 max pooling with stride 2."""
    if not _is(layer, nn.MaxPool2d):
        return False
    plain = not (layer.padding or layer.ceil_mode or layer.return_indices) and layer.dilation == 1
    return plain and layer.kernel_size in (2, (2, 2)) and layer.stride in (2, (2, 2))


class _Patches(torch.autograd.Function):
    """Extract patches (n, rows, columns, height, width, C) of images (n, H, W, C), with a gradient in one pass."""

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
        """Sum the gradients of all patches that cover a pixel.

        The stride cuts the image into cells, and a patch into one part for each cell that it covers. The gradient of a
        cell is therefore a sum of whole parts of neighbouring patches.
        """
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
    """Multiply patches (n, K) and weights (K, C), with a weight gradient that is fast for many patches.

    The gradient sums over all patches, which a GPU would do sequentially. Cutting the patches into parts sums them in
    parallel.
    """

    generate_vmap_rule = True
    PATCHES = 2048  # approximate number in one part

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
    """Return the maxima (..., C) of tiles (..., 4, C) and their indices: the first of equals, as in torch's pooling."""

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
    """A convolution as one matrix product of patches and weights.

    vmap over clients makes it a batch of products; a native convolution would become a grouped one. If there are many
    patches, one patch serves a tile of 2 x 2 outputs: for a 3 x 3 kernel it has 16 pixels instead of the 36 of four
    patches. This multiplies more (zeros), but moves less memory, which is the bottleneck.
    """

    def forward(self, x: Tensor) -> Tensor:
        return self._with_bias(self._tiles(x).transpose(2, 3).flatten(3, 4).flatten(1, 2))

    def pooled(self, x: Tensor) -> Tensor:
        """Return the maxima of 2 x 2 outputs, as torch's pooling does; a last odd row or column is dropped.

        The outputs of a tile are adjacent in the product, so pooling them first moves less memory.
        """
        tiles = self._tiles(x)
        if tiles.shape[3] == 1:
            outputs = tiles.flatten(2, 4)
            rows, columns = (size // 2 for size in outputs.shape[1:3])
            if not rows or not columns:
                raise RuntimeError(
                    f"cannot pool 2 x 2 outputs of an image of size {tuple(outputs.shape[1:3])}: use larger images"
                )
            outputs = outputs[:, : 2 * rows, : 2 * columns]
            tiles = torch.unflatten(torch.unflatten(outputs, 2, (-1, 2)), 1, (-1, 2)).transpose(2, 3)
        maxima: Tensor = _Maximum.apply(tiles.flatten(3, 4))[0]  # type: ignore[no-untyped-call]
        return self._with_bias(maxima)

    def _with_bias(self, outputs: Tensor) -> Tensor:
        """Add the bias to outputs (n, rows, columns, C) and move the channels first."""
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.permute(0, 3, 1, 2)

    def _tiles(self, x: Tensor) -> Tensor:
        """Return outputs without bias in tiles of 2 x 2 or 1 x 1: (n, rows, columns, tile, tile, C)."""
        (height, width), (step_y, step_x) = self.kernel_size, self.stride
        x = pad(x.permute(0, 2, 3, 1), (0, 0, *self._reversed_padding_repeated_twice))
        weight = self.weight.permute(2, 3, 1, 0)
        rows, columns = x.shape[1] - height + 1, x.shape[2] - width + 1
        # Not worth it for few patches: a tile has four times as many weights.
        plain = self.stride == (1, 1) and rows % 2 == columns % 2 == 0
        tile = 2 if plain and len(x) * rows * columns >= 16 * self.out_channels else 1
        if tile == 2:  # the weights of the four outputs, each shifted to its pixels in the larger patch
            shifts = [(j, 1 - j, i, 1 - i) for i in range(2) for j in range(2)]
            weight = torch.stack([pad(weight, (0, 0, 0, 0, *shift)) for shift in shifts], dim=3)
            height, width, step_y, step_x = height + 1, width + 1, 2, 2
        patches = _Patches.apply(x, (height, width), (step_y, step_x))  # type: ignore[no-untyped-call]
        weight = weight.reshape(height * width * self.in_channels, -1)
        products: Tensor = _Product.apply(patches.flatten(0, 2).flatten(1), weight)  # type: ignore[no-untyped-call]
        return products.view(*patches.shape[:3], tile, tile, self.out_channels)


class PlainGroupNorm(nn.GroupNorm):
    """Group normalisation in plain arithmetic: under vmap, torch's version rejects the layout of a product."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # half precision is too coarse for means
        groups = torch.unflatten(wide, 1, (self.num_groups, -1))
        inside = tuple(range(2, groups.dim()))
        variance, mean = torch.var_mean(groups, inside, correction=0, keepdim=True)
        normal = ((groups - mean) * (variance + self.eps).rsqrt()).flatten(1, 2).to(x.dtype)
        if not self.affine:
            return normal
        shape = (-1, *[1] * (x.dim() - 2))
        return normal * self.weight.view(shape) + self.bias.view(shape)
