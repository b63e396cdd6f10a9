"""The network for tables: a linear part, piecewise-linear columns, and a small hidden layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class TableNet(nn.Module):
    """f(x, z) = b + W x + Z z + U silu(V x + c) for plain inputs x and piecewise-linear inputs z.

    W, Z, U and b start at zero, so the untrained network predicts the same for every input.
    """

    def __init__(
        self, plain: int, pieces: int, hidden: int, outputs: int, constants: int = 0, reference: bool = False
    ) -> None:
        """Build the network.

        plain, pieces: numbers of inputs x and z, which are the first and the last columns. hidden: width of the hidden
        layer. outputs: outputs that depend on the input. constants: further outputs that are the same for every input.
        reference: prepend an output that is always 0, the logit of the first of two classes.
        """
        super().__init__()
        self.plain, self.pieces, self.outputs, self.reference = plain, pieces, outputs, reference
        self.hidden = nn.Linear(plain, hidden)
        self.constants = nn.Parameter(torch.zeros(constants)) if constants else None
        self.head = nn.Linear(plain + pieces + hidden, outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw V from N(0, 1 / plain); set everything else to zero."""
        nn.init.normal_(self.hidden.weight, std=1 / math.sqrt(self.plain))
        for part in (self.hidden.bias, self.head.weight, self.head.bias, self.constants):
            if part is not None:
                nn.init.zeros_(part)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (n, O) at inputs (n, plain + pieces)."""
        units = functional.silu(self.hidden(x[..., : self.plain]))
        outputs: Tensor = self.head(torch.cat([x, units], dim=-1))
        if not self.reference and self.constants is None:
            return outputs
        return self._completed(outputs, self.constants)

    def _completed(self, outputs: Tensor, constants: Tensor | None) -> Tensor:
        """Return the outputs with the reference before and the constants behind them."""
        parts = [outputs.new_zeros(*outputs.shape[:-1], 1)] * self.reference + [outputs]
        if constants is not None:
            parts.append(constants.expand(*outputs.shape[:-1], constants.shape[-1]))
        return torch.cat(parts, dim=-1)

    @property
    def num_units(self) -> int:
        """The number of hidden units, whose inputs are sampled."""
        return self.hidden.out_features

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
            "hidden.weight": torch.zeros_like(self.hidden.weight, dtype=torch.int64),
            "hidden.bias": torch.zeros_like(self.hidden.bias, dtype=torch.int64),
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
        with standard normal noise (n, units).
        """
        plain, width = x[..., : self.plain], self.plain + self.pieces
        mean = functional.linear(plain, means["hidden.weight"], means["hidden.bias"])
        variance = functional.linear(plain.square(), variances["hidden.weight"], variances["hidden.bias"])
        units = functional.silu(torch.addcmul(mean, (variance + 1e-10).sqrt(), noise))
        # Two products instead of one with the joined inputs, which would have to be copied.
        weight, spread = means["head.weight"], variances["head.weight"]
        mean = functional.linear(x, weight[..., :width], means["head.bias"])
        mean = mean + functional.linear(units, weight[..., width:])
        variance = functional.linear(x.square(), spread[..., :width], variances["head.bias"])
        variance = variance + functional.linear(units.square(), spread[..., width:])
        if not self.reference and self.constants is None:
            return mean, variance
        return (
            self._completed(mean, means.get("constants")),
            self._completed(variance, variances.get("constants")),
        )

    def stacked(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return the outputs (K, n, O) of K networks with stacked parameters at the same inputs (n, plain + pieces)."""
        width = self.plain + self.pieces
        hidden, head = parameters["hidden.weight"], parameters["head.weight"]
        units = functional.silu(x[..., : self.plain] @ hidden.mT + parameters["hidden.bias"].unsqueeze(-2))
        outputs = x @ head[..., :width].mT + units @ head[..., width:].mT + parameters["head.bias"].unsqueeze(-2)
        if not self.reference and self.constants is None:
            return outputs
        constants = parameters.get("constants")
        return self._completed(outputs, None if constants is None else constants.unsqueeze(-2))
