"""The network for tables: a linear part, piecewise-linear columns, and a small hidden layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Hidden(NamedTuple):
    """Hidden units for sampled inputs of theirs, each (n, units)."""

    units: Tensor
    squares: Tensor
    """Of the units."""
    inner: Tensor
    """The sampled inputs."""
    deviation: Tensor
    """Standard deviations of the inputs."""


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return W x + b for inputs (..., n, F), weights (..., U, F) and biases (..., U)."""
    return x @ weight.mT + bias.unsqueeze(-2)


class TableNet(nn.Module):
    """f(x, z) = b + W x + Z z + U silu(V x + c) for plain inputs x and piecewise-linear inputs z.

    W, Z, U and b start at zero, so the untrained network predicts the same for every input.
    """

    def __init__(
        self, plain: int, pieces: int, hidden: int, outputs: int, constants: int = 0, reference: bool = False
    ) -> None:
        """Build the network.

        plain, pieces: numbers of inputs x and z, which are the first and the last columns. hidden: width of the hidden
        layer, or 0 for none, which makes the network linear in its weights. outputs: outputs that depend on the input.
        constants: further outputs that are the same for every input. reference: prepend an output that is always 0,
        the logit of the first of two classes.
        """
        super().__init__()
        self.plain, self.pieces, self.outputs, self.reference = plain, pieces, outputs, reference
        self.hidden = nn.Linear(plain, hidden) if hidden else None
        self.constants = nn.Parameter(torch.zeros(constants)) if constants else None
        self.head = nn.Linear(plain + pieces + hidden, outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw V from N(0, 1 / plain); set everything else to zero."""
        for part in self.parameters():
            nn.init.zeros_(part)
        if self.hidden is not None:
            nn.init.normal_(self.hidden.weight, std=1 / math.sqrt(self.plain))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (n, O) at inputs (n, plain + pieces)."""
        if self.hidden is not None:
            x = torch.cat([x, functional.silu(self.hidden(x[..., : self.plain]))], dim=-1)
        outputs: Tensor = self.head(x)
        if not self.reference and self.constants is None:
            return outputs
        return self._completed(outputs, self.constants)

    def _completed(self, outputs: Tensor, constants: Tensor | None) -> Tensor:
        """Return the outputs with the reference before and the constants behind them."""
        parts = [outputs.new_zeros(*outputs.shape[:-1], 1)] * self.reference + [outputs]
        if constants is not None:
            parts.append(constants.unsqueeze(-2).expand(*outputs.shape[:-1], -1))
        return torch.cat(parts, dim=-1)

    @property
    def num_units(self) -> int:
        """The number of hidden units, whose inputs are sampled."""
        return 0 if self.hidden is None else self.hidden.out_features

    @property
    def num_outputs(self) -> int:
        """The number of all outputs."""
        return self.reference + self.outputs + (0 if self.constants is None else len(self.constants))

    def blocks(self, names: Sequence[str]) -> list[Tensor]:
        """Return for each named parameter which block of weights its entries belong to, counted from 0.

        The head has one block each for W, Z and U, and the outputs of a regression, which mean different things, have
        blocks of their own.
        """
        columns = torch.cat(
            [torch.full((size,), k) for k, size in enumerate((self.plain, self.pieces, self.num_units))]
        )
        apart = torch.arange(self.outputs) * (self.constants is not None)
        found = {
            "hidden.weight": torch.zeros(self.num_units, self.plain, dtype=torch.int64),
            "hidden.bias": torch.zeros(self.num_units, dtype=torch.int64),
            "head.weight": apart[:, None] * 3 + columns,
            "head.bias": apart,
        }
        if self.constants is not None:
            found["constants"] = torch.arange(len(self.constants))
        return [found[name] for name in names]

    def moments(
        self, means: dict[str, Tensor], variances: dict[str, Tensor], x: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return means and variances (n, O) of the outputs for independent Gaussian parameters of these moments.

        They are exact given the hidden units, whose inputs are sampled: local reparametrisation (Kingma et al. 2015)
        with standard normal noise (n, units). Without hidden units they are exact.
        """
        squares = x.square()
        hidden = self._hidden(means, variances, x, squares, noise)
        return self._head(means, variances, x, squares, hidden)

    def gradients(
        self,
        means: dict[str, Tensor],
        variances: dict[str, Tensor],
        x: Tensor,
        noise: Tensor,
        of_outputs: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the gradients of a loss in the means and variances of the parameters: the chain rule for `moments`.

        It is faster than automatic differentiation, which takes longer to follow a small network than to compute it.

        of_outputs: returns the gradients (n, O) of the loss in the moments of the outputs, at these moments.
        """
        squares = x.square()
        hidden = self._hidden(means, variances, x, squares, noise)
        moments = self._head(means, variances, x, squares, hidden)
        in_mean, in_variance = of_outputs(*moments)
        first, last = int(self.reference), self.reference + self.outputs
        found: list[dict[str, Tensor]] = [{}, {}]
        if self.constants is not None:
            for each, grad in zip(found, (in_mean, in_variance), strict=True):
                each["constants"] = grad[..., last:].sum(-2)
        in_mean, in_variance = in_mean[..., first:last], in_variance[..., first:last]
        of_means, of_variances = found
        of_means["head.bias"], of_variances["head.bias"] = in_mean.sum(-2), in_variance.sum(-2)
        of_means["head.weight"], of_variances["head.weight"] = in_mean.mT @ x, in_variance.mT @ squares
        if hidden is None:
            return of_means, of_variances
        width = self.plain + self.pieces
        of_means["head.weight"] = torch.cat([of_means["head.weight"], in_mean.mT @ hidden.units], -1)
        of_variances["head.weight"] = torch.cat([of_variances["head.weight"], in_variance.mT @ hidden.squares], -1)
        doubled = 2 * variances["head.weight"][..., width:]
        in_units = torch.addcmul(in_mean @ means["head.weight"][..., width:], hidden.units, in_variance @ doubled)
        in_inner = torch.ops.aten.silu_backward(in_units, hidden.inner)
        in_around = in_inner * noise / hidden.deviation  # twice the gradient in the variance
        of_means["hidden.weight"], of_means["hidden.bias"] = in_inner.mT @ x[..., : self.plain], in_inner.sum(-2)
        of_variances["hidden.weight"] = 0.5 * (in_around.mT @ squares[..., : self.plain])
        of_variances["hidden.bias"] = 0.5 * in_around.sum(-2)
        return of_means, of_variances

    def _hidden(
        self, means: dict[str, Tensor], variances: dict[str, Tensor], x: Tensor, squares: Tensor, noise: Tensor
    ) -> Hidden | None:
        """Return the hidden units for sampled inputs of theirs; squares: x^2."""
        if self.hidden is None:
            return None
        inner = _linear(x[..., : self.plain], means["hidden.weight"], means["hidden.bias"])
        smallest = variances["hidden.bias"] + 1e-10
        deviation = _linear(squares[..., : self.plain], variances["hidden.weight"], smallest).sqrt()
        inner = torch.addcmul(inner, deviation, noise)
        units = functional.silu(inner)
        return Hidden(units, units.square(), inner, deviation)

    def _head(
        self,
        means: dict[str, Tensor],
        variances: dict[str, Tensor],
        x: Tensor,
        squares: Tensor,
        hidden: Hidden | None,
    ) -> tuple[Tensor, Tensor]:
        """Return means and variances (n, O) of the outputs, given the hidden units; squares: x^2."""
        width = self.plain + self.pieces
        weight, spread = means["head.weight"], variances["head.weight"]
        mean = _linear(x, weight[..., :width], means["head.bias"])
        variance = _linear(squares, spread[..., :width], variances["head.bias"])
        if hidden is not None:
            # Two products instead of one with the joined inputs, which would have to be copied.
            mean = mean + hidden.units @ weight[..., width:].mT
            variance = variance + hidden.squares @ spread[..., width:].mT
        if not self.reference and self.constants is None:
            return mean, variance
        return (
            self._completed(mean, means.get("constants")),
            self._completed(variance, variances.get("constants")),
        )

    def stacked(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return the outputs (K, n, O) of K networks with stacked parameters at the same inputs (n, plain + pieces)."""
        width = self.plain + self.pieces
        head = parameters["head.weight"]
        outputs = x @ head[..., :width].mT + parameters["head.bias"].unsqueeze(-2)
        if self.hidden is not None:
            hidden = parameters["hidden.weight"]
            units = functional.silu(x[..., : self.plain] @ hidden.mT + parameters["hidden.bias"].unsqueeze(-2))
            outputs = outputs + units @ head[..., width:].mT
        if not self.reference and self.constants is None:
            return outputs
        return self._completed(outputs, parameters.get("constants"))
