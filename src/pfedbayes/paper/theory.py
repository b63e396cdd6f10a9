"""The theory of Section 3: bounds on the error of the personal posteriors, as functions of n and the network.

The paper's letters: n size, L layers, M width, s_0 inputs, s_{L+1} outputs, B weight_bound, beta smoothness, d
dimension, T num_params. `Constants` holds the constants that the paper leaves open. docs/theory.md explains the
formulas and where the paper contradicts itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pfedbayes.errors import UserError

LARGEST_DISTANCE = 1.0  # of two regressions, by the paper's squared Hellinger distance
# The largest numbers for which no term overflows.
LARGEST, LARGEST_SIZE, MOST_LAYERS, LARGEST_EXPONENT = 10**15, 2**100, 10**4, 50


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _require_at_most(name: str, value: float, largest: int) -> None:
    _require(value <= largest, f"{name} must be at most {largest:g}: give a smaller number")


@dataclass(frozen=True)
class Constants:
    """The constants for which the paper gives no values. With the default 1 a bound shows growth, not size."""

    C: float = 1.0
    """Of Lemma 1."""
    C_prime: float = 1.0
    """C' of Lemma 2, "any diverging sequence"."""
    C_second: float = 1.0
    """C'' of Lemma 2, "any diverging sequence"."""
    C_0: float = 1.0
    """Of Eq. (21)."""
    C_1: float = 1.0
    """Of the choice of T in Section 3."""
    C_2: float = 1.0
    """Of Eq. (22)."""
    delta: float = 1.01
    """The exponent of the logarithm in Eq. (13), above 1."""

    def __post_init__(self) -> None:
        for name in ("C", "C_prime", "C_second", "C_0", "C_1", "C_2"):
            _require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
            _require_at_most(name, getattr(self, name), LARGEST)
        _require(self.delta > 1, f"delta must be more than 1, got {self.delta}")
        _require_at_most("delta", self.delta, LARGEST_EXPONENT)


@dataclass(frozen=True)
class Setting:
    """What the bound depends on; the defaults are the paper's medium MNIST.

    The network is fully connected with hidden layers of equal width (Assumption 1) and 1-Lipschitz activations
    (Assumption 2).
    """

    size: int = 1000
    """n, training examples per client."""
    layers: int = 1
    """L, hidden layers."""
    width: int = 100
    """M, of every hidden layer."""
    inputs: int = 784
    """s_0."""
    outputs: int = 10
    """s_{L+1}."""
    weight_bound: float = 2.0
    """B, the largest absolute weight."""
    zeta: float = 10.0
    """The weight of the KL term, at least 1."""
    smoothness: float = 1.0
    """beta, of the true functions."""
    dimension: float | None = None
    """d, the intrinsic dimension of the data; None: the number of inputs."""
    constants: Constants = Constants()

    def __post_init__(self) -> None:
        _require(self.size >= 2, f"n must be at least 2, got {self.size}")
        for name, least in (("layers", 1), ("width", 2), ("inputs", 1), ("outputs", 1)):
            _require(getattr(self, name) >= least, f"{name} must be at least {least}, got {getattr(self, name)}")
        _require_at_most("n", self.size, LARGEST_SIZE)
        _require_at_most("layers", self.layers, MOST_LAYERS)
        for name in ("width", "inputs", "outputs", "weight_bound", "zeta", "smoothness", "dimension"):
            _require_at_most(name, getattr(self, name) or 0, LARGEST)
        product = self.weight_bound * self.width
        _require(
            product > 1, f"the bound B times the width M must be more than 1, got {product:g}: A divides by BM - 1"
        )
        _require(self.zeta >= 1, f"the theorem needs zeta of at least 1, got {self.zeta:g}")
        _require(self.smoothness > 0, f"beta, the smoothness, must be positive, got {self.smoothness:g}")
        _require(
            self.dimension is None or self.dimension > 0, f"d, the dimension, must be positive, got {self.dimension}"
        )

    @property
    def num_params(self) -> int:
        """T: weights and biases of the network."""
        hidden = (self.layers - 1) * self.width * (self.width + 1)
        return self.width * (self.inputs + 1) + hidden + self.outputs * (self.width + 1)

    @property
    def d(self) -> float:
        """The intrinsic dimension of the data."""
        return self.dimension if self.dimension is not None else self.inputs


def scale_a(s: Setting) -> float:
    """Eq. (10): A = [(2H)^(2(L+1)) log(3 s_0 M) {(s_0 + 1 + 1/(H-1))^2 + 1/((2H)^2-1) + 2/(2H-1)^2}]^-1, H = BM."""
    h = s.weight_bound * s.width
    bracket = (s.inputs + 1 + 1 / (h - 1)) ** 2 + 1 / ((2 * h) ** 2 - 1) + 2 / (2 * h - 1) ** 2
    return math.pow(2 * h, -2 * (s.layers + 1)) / (math.log(3 * s.inputs * s.width) * bracket)


def sigma_n_squared(s: Setting) -> float:
    """Eq. (9): sigma_n^2 = T A / (8 n), the variance of every weight in the proof; Assumption 3 requires <= B^2."""
    return s.num_params * scale_a(s) / (8 * s.size)


def _log_terms(s: Setting) -> float:
    """Return (L+1) log M + log(s_0 sqrt(n/T)), common to Eqs. (11) and (13)."""
    return (s.layers + 1) * math.log(s.width) + math.log(s.inputs * math.sqrt(s.size / s.num_params))


def least_size(s: Setting) -> float:
    """Return the n below which Eq. (11) is negative and so meaningless: T / (s_0 M^(L+1))^2."""
    return s.num_params * math.exp(-2 * (math.log(s.inputs) + (s.layers + 1) * math.log(s.width)))


def r_n(s: Setting) -> float:
    """Eq. (11): r_n = ((L+1) T/n) log M + (T/n) log(s_0 sqrt(n/T)), the estimation error."""
    return s.num_params / s.size * _log_terms(s)


def epsilon_n(s: Setting) -> float:
    """Eq. (13): epsilon_n = n^(-1/2) sqrt((L+1) T log M + T log(s_0 sqrt(n/T))) log^delta(n).

    epsilon_n^2 = r_n log^(2 delta)(n), so it dominates r_n in Theorem 1.
    """
    spread = s.num_params * _log_terms(s)
    _require(spread >= 0, f"the paper's r_n is negative for n = {s.size}: it needs n > {least_size(s):.3g}")
    return math.sqrt(spread / s.size) * math.pow(math.log(s.size), s.constants.delta)


def xi_n(s: Setting) -> float:
    """Eq. (21): xi_n <= C_0 T^(-2 beta/d), the approximation error.

    It replaces Eq. (12), which cannot be computed: the smallest squared distance, in the supremum norm, between a
    network with weights up to B and the true function.
    """
    return s.constants.C_0 * math.pow(s.num_params, -2 * s.smoothness / s.d)


def lemma1(s: Setting, mean_objective: float) -> float:
    """Lemma 1, Eq. (18): mean_objective / n + C epsilon_n^2.

    mean_objective: mean over clients of l_n/zeta + KL(q || w), with the log-likelihood ratio l_n of Eq. (15) averaged
    over the posterior.
    """
    return mean_objective / s.size + s.constants.C * epsilon_n(s) ** 2


def lemma2(s: Setting) -> float:
    """Lemma 2, Eq. (19): n (C' zeta r_n + C'' xi_n) bounds the mean over clients of l_n + zeta KL(q || w)."""
    return s.size * (s.constants.C_prime * s.zeta * r_n(s) + s.constants.C_second * xi_n(s))


def theorem1(s: Setting) -> float:
    """Theorem 1, Eq. (20): C epsilon_n^2 + C' r_n + C'' xi_n / zeta bounds the averaged squared Hellinger distance.

    It is Lemma 1 with the bound of Lemma 2, divided by zeta, in place of the objective.
    """
    return lemma1(s, lemma2(s) / s.zeta)


def useful_size(s: Setting) -> int | None:
    """Return the smallest n from which Theorem 1 is not vacuous, that is below 1; None if there is none.

    The bound decreases for large n, so the search starts there. For tiny n the paper's logarithms vanish and the bound
    is small too, but meaningless.
    """

    def is_not_vacuous(n: int) -> bool:
        return theorem1(replace(s, size=n)) < LARGEST_DISTANCE

    least = max(2, math.floor(least_size(s)) + 1)
    high = LARGEST_SIZE
    if not is_not_vacuous(high):
        return None
    while high // 2 > least and is_not_vacuous(high // 2):
        high //= 2
    low = max(high // 2, least)
    if is_not_vacuous(low):
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_not_vacuous(middle) else (middle, high)
    return high


def chosen_num_params(s: Setting) -> float:
    """Section 3: the number of parameters T = C_1 n^(d/(2 beta + d)) that balances estimation and approximation."""
    return s.constants.C_1 * math.pow(s.size, s.d / (2 * s.smoothness + s.d))


def width_for(num_params: float, inputs: int, outputs: int, layers: int = 1) -> int:
    """Return the largest width M >= 2 of a network with at most num_params parameters, or 2."""
    width = 2
    while Setting(width=width + 1, inputs=inputs, outputs=outputs, layers=layers).num_params <= num_params:
        width += 1
    return width


def rate_exponent(smoothness: float, dimension: float) -> float:
    """Return the exponent -2 beta / (2 beta + d) of the minimax rate, Eq. (25)."""
    return -2 * smoothness / (2 * smoothness + dimension)


def minimax_rate(s: Setting) -> float:
    """Eq. (25): n^(-2 beta/(2 beta + d)), which no estimator beats for all smooth functions; C_3 is 1 here."""
    return math.pow(s.size, rate_exponent(s.smoothness, s.d))


def convergence_rate(s: Setting) -> float:
    """Eq. (22): C_2 n^(-2 beta/(2 beta + d)) log^(2 delta')(n), Theorem 1 with the chosen T.

    The paper allows any delta' > delta; this is the limit delta' = delta.
    """
    return s.constants.C_2 * minimax_rate(s) * math.pow(math.log(s.size), 2 * s.constants.delta)


def hellinger_squared(f: Tensor, truth: Tensor, sigma_eps: float) -> Tensor:
    """Section 3: d^2 = E_X(1 - exp(-[f(X) - truth(X)]^2 / (8 sigma_eps^2))), the mean over the last dimension.

    This is 1 minus the integral of sqrt(p q) for two Gaussians of equal variance, so it lies between 0 and 1.
    """
    return -torch.expm1(-(f - truth).square() / (8 * sigma_eps**2)).mean(-1)


def l2_factor(largest: float, sigma_eps: float) -> float:
    """Eq. (23): C_F = (1 - exp(-4F^2 / (8 sigma_eps^2))) / (4 F^2).

    d^2 >= C_F ||f - truth||^2 for functions whose absolute values are at most F, `largest`.
    """
    return -math.expm1(-(largest**2) / (2 * sigma_eps**2)) / (4 * largest**2)


def l2_bound(s: Setting, largest: float, sigma_eps: float) -> float:
    """Eq. (24): C_2 n^(-2 beta/(2 beta + d)) log^(2 delta')(n) / C_F bounds the averaged squared L2 error."""
    return convergence_rate(s) / l2_factor(largest, sigma_eps)
