"""The bound of Section 3: how far the personal posteriors are from the truth, as a formula of n and the network.

The paper's letters: n size, L layers, M width, s_0 inputs, s_{L+1} outputs, B weight_bound, beta smoothness, d
dimension, T num_params. What it leaves open is in `Constants`. docs/theory.md says what the formulas mean and where
they do not agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pfedbayes.errors import UserError

LARGEST_DISTANCE = 1.0  # no squared Hellinger distance, as the paper defines it, is larger


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class Constants:
    """What the paper gives no values for: 1 unless given, so that the bound has the right growth but no true size.

    C of Lemma 1; C_prime and C_second (C', C'') of Lemma 2, "any diverging sequences"; C_0 of Eq. (21), C_1 of T and
    C_2 of Eq. (22). delta is the exponent of the logarithm in Eq. (13), any number above 1.
    """

    C: float = 1.0
    C_prime: float = 1.0
    C_second: float = 1.0
    C_0: float = 1.0
    C_1: float = 1.0
    C_2: float = 1.0
    delta: float = 1.01

    def __post_init__(self) -> None:
        for name in ("C", "C_prime", "C_second", "C_0", "C_1", "C_2"):
            _require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        _require(self.delta > 1, f"delta must be more than 1, got {self.delta}")


@dataclass(frozen=True)
class Setting:
    """Everything that the bound depends on; the defaults are the paper's medium MNIST.

    Fully connected, every hidden layer of one width (Assumption 1), 1-Lipschitz activations (Assumption 2), weights in
    [-weight_bound, weight_bound]. dimension: the intrinsic one of the data; that of the inputs if not given.
    """

    size: int = 1000
    layers: int = 1
    width: int = 100
    inputs: int = 784
    outputs: int = 10
    weight_bound: float = 2.0
    zeta: float = 10.0
    smoothness: float = 1.0
    dimension: float | None = None
    constants: Constants = Constants()

    def __post_init__(self) -> None:
        _require(self.size >= 2, f"n must be at least 2, got {self.size}")
        for name, least in (("layers", 1), ("width", 2), ("inputs", 1), ("outputs", 1)):
            _require(getattr(self, name) >= least, f"{name} must be at least {least}, got {getattr(self, name)}")
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
        """The dimension that counts."""
        return self.dimension if self.dimension is not None else self.inputs


def scale_a(s: Setting) -> float:
    """Eq. (10): A = [(2H)^(2(L+1)) log(3 s_0 M) {(s_0 + 1 + 1/(H-1))^2 + 1/((2H)^2-1) + 2/(2H-1)^2}]^-1, H = BM."""
    h = s.weight_bound * s.width
    bracket = (s.inputs + 1 + 1 / (h - 1)) ** 2 + 1 / ((2 * h) ** 2 - 1) + 2 / (2 * h - 1) ** 2
    return math.pow(2 * h, -2 * (s.layers + 1)) / (math.log(3 * s.inputs * s.width) * bracket)


def sigma_n_squared(s: Setting) -> float:
    """Eq. (9): sigma_n^2 = T A / (8 n), the variance that the proof gives every weight; Assumption 3 wants <= B^2."""
    return s.num_params * scale_a(s) / (8 * s.size)


def _log_terms(s: Setting) -> float:
    """(L+1) log M + log(s_0 sqrt(n/T)), common to Eqs. (11) and (13)."""
    return (s.layers + 1) * math.log(s.width) + math.log(s.inputs * math.sqrt(s.size / s.num_params))


def least_size(s: Setting) -> float:
    """The n below which Eq. (11) is negative, and says nothing: T / (s_0 M^(L+1))^2."""
    return s.num_params * math.exp(-2 * (math.log(s.inputs) + (s.layers + 1) * math.log(s.width)))


def r_n(s: Setting) -> float:
    """Eq. (11): r_n = ((L+1) T/n) log M + (T/n) log(s_0 sqrt(n/T)), the estimation error."""
    return s.num_params / s.size * _log_terms(s)


def epsilon_n(s: Setting) -> float:
    """Eq. (13): epsilon_n = n^(-1/2) sqrt((L+1) T log M + T log(s_0 sqrt(n/T))) log^delta(n).

    So epsilon_n^2 = r_n log^(2 delta)(n): it outweighs r_n in Theorem 1.
    """
    spread = s.num_params * _log_terms(s)
    _require(spread >= 0, f"the paper's r_n is negative for n = {s.size}: it needs n > {least_size(s):.3g}")
    return math.sqrt(spread / s.size) * math.pow(math.log(s.size), s.constants.delta)


def xi_n(s: Setting) -> float:
    """Eq. (21): xi_n <= C_0 T^(-2 beta/d), the approximation error.

    It stands in for Eq. (12), which nobody can compute: the least squared distance, in the supremum norm, of a network
    with weights up to B from the true function.
    """
    return s.constants.C_0 * math.pow(s.num_params, -2 * s.smoothness / s.d)


def lemma1(s: Setting, mean_objective: float) -> float:
    """Lemma 1, Eq. (18): mean_objective / n + C epsilon_n^2.

    mean_objective is the mean over clients of l_n/zeta + KL(q || w), with l_n the log-likelihood ratio of Eq. (15)
    averaged over the posterior.
    """
    return mean_objective / s.size + s.constants.C * epsilon_n(s) ** 2


def lemma2(s: Setting) -> float:
    """Lemma 2, Eq. (19): n (C' zeta r_n + C'' xi_n), which bounds the mean over clients of l_n + zeta KL(q || w)."""
    return s.size * (s.constants.C_prime * s.zeta * r_n(s) + s.constants.C_second * xi_n(s))


def theorem1(s: Setting) -> float:
    """Theorem 1, Eq. (20): C epsilon_n^2 + C' r_n + C'' xi_n / zeta bounds the averaged squared Hellinger distance.

    It is Lemma 1 with Lemma 2, divided by zeta, for the objective.
    """
    return lemma1(s, lemma2(s) / s.zeta)


def useful_size(s: Setting) -> int | None:
    """The n from which on Theorem 1 says more than that the distance is at most 1; None if there is none.

    The bound falls where n is large, so the search comes down from there. It is small again for tiny n, where the
    paper's logarithms vanish, and that means nothing.
    """

    def says_something(n: int) -> bool:
        return theorem1(replace(s, size=n)) < LARGEST_DISTANCE

    least = max(2, math.floor(least_size(s)) + 1)
    high = 2**100
    if not says_something(high):
        return None
    while high // 2 > least and says_something(high // 2):
        high //= 2
    low = max(high // 2, least)
    if says_something(low):
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if says_something(middle) else (middle, high)
    return high


def chosen_num_params(s: Setting) -> float:
    """Section 3: the number of parameters T = C_1 n^(d/(2 beta + d)) that balances estimation and approximation."""
    return s.constants.C_1 * math.pow(s.size, s.d / (2 * s.smoothness + s.d))


def width_for(num_params: float, inputs: int, outputs: int, layers: int = 1) -> int:
    """The largest width M, but at least 2, whose network has no more than so many parameters."""
    width = 2
    while Setting(width=width + 1, inputs=inputs, outputs=outputs, layers=layers).num_params <= num_params:
        width += 1
    return width


def rate_exponent(smoothness: float, dimension: float) -> float:
    """The exponent -2 beta / (2 beta + d) of the minimax rate, Eq. (25)."""
    return -2 * smoothness / (2 * smoothness + dimension)


def minimax_rate(s: Setting) -> float:
    """Eq. (25): n^(-2 beta/(2 beta + d)), which no estimator beats for all smooth functions; C_3 is taken as 1."""
    return math.pow(s.size, rate_exponent(s.smoothness, s.d))


def convergence_rate(s: Setting) -> float:
    """Eq. (22): C_2 n^(-2 beta/(2 beta + d)) log^(2 delta')(n), what Theorem 1 becomes with the chosen T.

    Any delta' > delta will do; here it is delta itself, the limit.
    """
    return s.constants.C_2 * minimax_rate(s) * math.pow(math.log(s.size), 2 * s.constants.delta)


def hellinger_squared(f: Tensor, truth: Tensor, sigma_eps: float) -> Tensor:
    """Section 3: d^2 = E_X(1 - exp(-[f(X) - truth(X)]^2 / (8 sigma_eps^2))), the mean over the last dimension.

    It is 1 minus the integral of sqrt(p q) of two Gaussians with the same variance: between 0 and 1.
    """
    return -torch.expm1(-(f - truth).square() / (8 * sigma_eps**2)).mean(-1)


def l2_factor(largest: float, sigma_eps: float) -> float:
    """Eq. (23): C_F = (1 - exp(-4F^2 / (8 sigma_eps^2))) / (4 F^2).

    Then d^2 >= C_F ||f - truth||^2 for functions whose absolute values are at most F, `largest`.
    """
    return -math.expm1(-(largest**2) / (2 * sigma_eps**2)) / (4 * largest**2)
