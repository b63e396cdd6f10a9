"""Times to an event of which some are censored, by hazards that are constant on intervals of time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pfedbayes.maths import censoring, metrics, ranking
from pfedbayes.maths.counts import CAP, capped_exp

GRID = 64  # times at which survival curves are scored


@dataclass(frozen=True)
class Survival:
    """Times to an event: the hazard in interval k is rate * exp(f(x) + c_k), so that hazards are proportional.

    Targets y (n, 2) are times and events: 1 if the event happened then, 0 if the row was observed for so long without
    one (right-censored). Outputs (n, 1 + K) are f and the constants c, which are the same for every input. A time at an
    edge belongs to the interval before it. The hazard of the last interval continues beyond the last edge.
    """

    edges: tuple[float, ...] = (1.0,)
    """Ends of the K intervals, increasing. The last one is the horizon, up to which the training data have events."""
    rate: float = 1.0
    """Events per unit of time in the training data, which the untrained network predicts."""

    task = "survival"
    predicts = "times"

    @property
    def metrics(self) -> tuple[str, ...]:
        return metrics.METRICS["survival"]

    @property
    def pooled_metrics(self) -> tuple[str, ...]:
        return "c_index", "ibs"

    @property
    def offset(self) -> float:
        return 0.0

    @property
    def horizon(self) -> float:
        """The time up to which predictions are made."""
        return self.edges[-1]

    def exposure(self, time: Tensor) -> Tensor:
        """Return the events (..., K) that the untrained network expects in each interval until a time (...)."""
        starts = (0.0, *self.edges[:-1])
        inner = [(time - start).clamp(0.0, end - start) for start, end in pairwise(starts)]
        return self.rate * torch.stack([*inner, (time - starts[-1]).clamp(min=0.0)], -1)

    def _happened(self, time: Tensor, event: Tensor) -> Tensor:
        """Return the events (..., K) that happened in each interval."""
        ends = [(time <= end).to(time.dtype) for end in self.edges[:-1]]
        before = torch.stack([torch.zeros_like(time), *ends, torch.ones_like(time)], -1)
        return before.diff() * event[..., None]

    def cumulative_hazard(self, outputs: Tensor, time: Tensor) -> Tensor:
        """Return the expected events until a time (..., n), for outputs (..., n, 1 + K)."""
        total: Tensor = (capped_exp(outputs[..., :1] + outputs[..., 1:]) * self.exposure(time)).sum(-1)
        return total

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-density of events, and minus the log-probability to survive of censored rows."""
        time, event = y[..., 0], y[..., 1]
        logs = outputs[..., :1] + outputs[..., 1:] + math.log(self.rate)
        return self.cumulative_hazard(outputs, time) - (logs * self._happened(time, event)).sum(-1)

    def expected_nll(self, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        """Return the expectation in closed form: E[exp(f + c)] = exp(m + v/2), capped."""
        time, event = y[..., 0], y[..., 1]
        level = (mean + variance / 2)[..., :1] + (mean + variance / 2)[..., 1:]
        logs = mean[..., :1] + mean[..., 1:] + math.log(self.rate)
        return (capped_exp(level) * self.exposure(time) - logs * self._happened(time, event)).sum(-1)

    def grad_expected_nll(self, mean: Tensor, variance: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients: expected minus observed events in means, half the expected ones in variances."""
        time, event = y[..., 0], y[..., 1]
        level = (mean + variance / 2)[..., :1] + (mean + variance / 2)[..., 1:]
        expected = level.clamp(max=CAP).exp() * self.exposure(time)  # beyond the cap, the slope stays
        excess = expected - self._happened(time, event)
        in_mean = torch.cat([excess.sum(-1, keepdim=True), excess], -1)
        return in_mean, torch.cat([expected.sum(-1, keepdim=True), expected], -1) / 2

    def survival(self, outputs: Tensor, time: Tensor) -> Tensor:
        """Return the probability (..., n) of no event until a time (..., n), for the mixture of (..., K, n, O)."""
        chance: Tensor = (-self.cumulative_hazard(outputs, time.unsqueeze(-2))).exp().mean(-2)
        return chance

    def curve(self, outputs: Tensor, times: Tensor) -> Tensor:
        """Return the probabilities (..., n, G) of no event until each of the times (G,), for the mixture."""
        hazards = capped_exp(outputs[..., :1] + outputs[..., 1:])
        # One time after the other: all at once would take G times the memory of the outputs.
        points = [(-(hazards @ exposure)).exp().mean(-2) for exposure in self.exposure(times)]
        return torch.stack(points, -1)

    def quantile(self, outputs: Tensor, level: float) -> Tensor:
        """Return the time (..., n) by which the event has happened with this probability; inf beyond the horizon."""
        ends = outputs.new_tensor((0.0, *self.edges))
        at_ends = self.curve(outputs, ends)  # decreasing
        beyond = at_ends[..., -1] > 1 - level
        place = ((at_ends > 1 - level).sum(-1) - 1).clamp(0, len(self.edges) - 1)
        low, high = ends[place], ends[place + 1]
        for _ in range(40):
            middle = (low + high) / 2
            early = self.survival(outputs, middle) > 1 - level
            low, high = torch.where(early, middle, low), torch.where(early, high, middle)
        return torch.where(beyond, torch.inf, high)

    def grid(self, like: Tensor) -> Tensor:
        """Return the middles (G,) of equal parts of the time up to the horizon."""
        return (torch.arange(GRID, dtype=like.dtype, device=like.device) + 0.5) * (self.horizon / GRID)

    def point(self, outputs: Tensor) -> Tensor:
        """Return the probabilities (n, K) of no event until each edge."""
        hazards = capped_exp(outputs[..., :1] + outputs[..., 1:])
        exposure = self.exposure(outputs.new_tensor(self.edges))
        chances: Tensor = (-(hazards @ exposure.mT)).exp()
        return chances

    def gist(self, outputs: Tensor) -> Tensor:
        """Return the survival curves (..., n, G) on the grid."""
        return self.curve(outputs, self.grid(outputs))

    def risk(self, curves: Tensor) -> Tensor:
        """Return the mean probability (..., n) of an event, over all times up to the horizon."""
        return 1 - curves.mean(-1)

    def pooled_scores(self, gist: Tensor, y: Tensor) -> Tensor:
        time, event = y[..., 0], y[..., 1]
        ranked = ranking.concordance(self.risk(gist), time, event)
        return torch.stack([ranked, censoring.integrated_brier(gist, self.grid(gist), time, event)], -1)

    def scores(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the metrics of the mixture; the NLL is that of times in their own unit."""
        ranked, brier = self.pooled_scores(self.gist(outputs), y).unbind(-1)
        log_density = torch.logsumexp(-self.nll(outputs, y.unsqueeze(-3)), dim=-2) - math.log(outputs.shape[-3])
        return torch.stack([ranked, -log_density.mean(-1), brier], -1)
