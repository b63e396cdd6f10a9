"""BNFed, the PFNM of Yurochkin et al. (2019): hidden units are matched between clients before they are averaged.

The units of the clients' networks are noisy copies of global units, whose number is not fixed: a Beta-Bernoulli process
lets popular units attract more copies and leaves room for new ones. The server finds the most probable copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.errors import UserError
from pfedbayes.maths.optim import sgd
from pfedbayes.maths.trees import pick
from pfedbayes.methods.base import About, Habits, Method, Needs, Shard, State, require
from pfedbayes.nets import Batch, Model


class Server(NamedTuple):
    """The global network, layer by layer, and which of its hidden units each client has.

    weights: (L1, D), (L2, L1), ..., (C, L); biases: (L1,), ..., (C,); assignments: (N, H) for each hidden layer, where
    a client has H units and the global network L; round: how many rounds were matched.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    assignments: tuple[Tensor, ...]
    round: Tensor


class Local(NamedTuple):
    """A client's network, flat, and how many of its examples each class has. All of it is uploaded."""

    theta: Tensor
    labels: Tensor


class Units(NamedTuple):
    """One hidden layer of all clients as vectors w, H of length V each, and their prior.

    evidence (N, H, V): s w; precision (N, V): s; prior_evidence (V,): mu_0 / sigma0^2; prior_precision: 1 / sigma0^2.
    """

    evidence: Tensor
    precision: Tensor
    prior_evidence: Tensor
    prior_precision: float


class Posterior(NamedTuple):
    """The global units of a layer given their copies: means num / den and precisions den, both (L, V), and the number
    of copies, counts (L,)."""

    num: Tensor
    den: Tensor
    counts: Tensor


@dataclass(frozen=True)
class BNFed(Method):
    """eta: rate of the local SGD steps; sigma2: variance of a client's unit around the global one; sigma02: variance of
    a global unit around its prior mean, which is 0 but for biases `bias`, where all biases start, too; gamma: mass of
    the process, more makes more global units; sweeps: how often every client is matched anew in a round.

    class_shares: a client's weights to a class count by its share of the examples of that class; without, all count
    alike. popularity, novelty: factors of the log-probabilities of existing and of new units; the derivation has 2, the
    public code a popularity of 1. max_count: popularity sees no more copies than this (public code: 10). max_width: no
    new units in a global layer that has so many (public code: 700).
    """

    eta: float = 0.5
    sigma2: float = 1.0
    sigma02: float = 1.0
    gamma: float = 1.0
    sweeps: int = 3
    bias: float = 0.1
    class_shares: bool = True
    popularity: float = 2.0
    novelty: float = 2.0
    max_count: int | None = None
    max_width: int | None = None

    about = About(
        "BNFed",
        "Yurochkin et al., ICML 2019",
        "one shared network; hidden units are matched between clients and their number is inferred",
        averages=False,
    )
    habits = Habits(init="normal", pixels="unit", trains="all")

    def __post_init__(self) -> None:
        require(self.eta >= 0, f"eta must not be negative, got {self.eta}")
        require(self.sigma2 > 0, f"sigma2 must be positive, got {self.sigma2}")
        require(self.sigma02 > 0, f"sigma02 must be positive, got {self.sigma02}")
        require(self.gamma > 0, f"gamma must be positive, got {self.gamma}")
        require(self.sweeps >= 0, f"sweeps must not be negative, got {self.sweeps}")
        require(self.popularity >= 0, f"popularity must not be negative, got {self.popularity}")
        require(self.novelty >= 0, f"novelty must not be negative, got {self.novelty}")
        require(self.max_count is None or self.max_count >= 1, f"max_count must be at least 1, got {self.max_count}")
        require(self.max_width is None or self.max_width >= 1, f"max_width must be at least 1, got {self.max_width}")

    @property
    def needs(self) -> Needs:
        return Needs(all_clients=True, net="mlp", eager=True)

    def init(self, theta: Tensor, num_clients: int, shapes: tuple[torch.Size, ...]) -> Server:
        """Everybody has all units of the first network, whose biases are at their prior mean."""
        widths = (*shapes[0][-1:], *(width for shape in shapes[1::2] for width in shape[:1]))
        if len(widths) < 3 or shapes != _shapes(widths):
            raise UserError("BNFed matches the hidden units of fully connected layers with biases: set net.name=mlp")
        weights, biases = _layers(theta, shapes)
        return Server(
            weights,
            tuple(torch.full_like(bias, self.bias) for bias in biases),
            tuple(torch.arange(width, device=theta.device).repeat(num_clients, 1) for width in widths[1:-1]),
            torch.zeros((), dtype=torch.int64, device=theta.device),
        )

    def download(self, server: Server, clients: Tensor) -> Tensor:
        """Each client's own units of the global network, as flat networks (n, T) of the width that clients have."""
        device = server.round.device
        inputs, outputs = (
            torch.arange(width, device=device).expand(len(clients), -1)
            for width in (server.weights[0].shape[1], server.weights[-1].shape[0])
        )
        units = [inputs, *(assignment[clients.to(device)] for assignment in server.assignments), outputs]
        parts = []
        for weight, bias, (below, own) in zip(server.weights, server.biases, pairwise(units), strict=True):
            parts += [weight[own[:, :, None], below[:, None, :]].flatten(1), bias[own]]
        return torch.cat(parts, dim=1)

    def aggregate(self, server: Server, uploads: Local, sizes: Tensor, clients: Tensor) -> Server:
        """Match the hidden layers from the last to the first, and take the posterior means of the global units.

        A unit's vector is [incoming weights, bias, outgoing weights]; incoming ones only in the first hidden layer,
        since elsewhere they are the outgoing ones of the layer below. All have precision 1 / sigma^2, but weights to
        class c have p_jc / sigma^2, where p_jc is client j's share of the examples of class c.
        """
        num_clients = len(clients)
        uploads = pick(uploads, clients.argsort())
        weights, biases = _local_layers(server, uploads.theta)
        upward, share = weights[-1], self._class_shares(uploads.labels.cpu().double(), biases[-1])
        new_weights: list[Tensor] = []
        new_biases = [self._output_bias(biases[-1], share)]
        assignments: list[Tensor] = []
        generator = torch.Generator().manual_seed(int(server.round))
        for k in reversed(range(len(server.assignments))):
            if assignments:
                upward, share = _onto_global(assignments[0], weights[k + 1])
            inputs = weights[0].shape[2] if k == 0 else 0
            vectors = torch.cat([weights[k][:, :, :inputs], biases[k][..., None], upward.mT], dim=2)
            precision = torch.cat([share.new_ones(num_clients, inputs + 1), share], dim=1) / self.sigma2
            prior_mean = vectors.new_zeros(vectors.shape[2])
            prior_mean[inputs] = self.bias
            units = Units(vectors * precision[:, None], precision, prior_mean / self.sigma02, 1 / self.sigma02)
            assignments.insert(0, self.match(units, server.assignments[k].cpu() if server.round else None, generator))
            num, den, _ = posterior(units, range(num_clients), assignments[0])
            incoming, bias, outgoing = (num / den).tensor_split([inputs, inputs + 1], dim=1)
            new_weights.insert(0, outgoing.T)
            new_biases.insert(0, bias[:, 0])
        new_weights.insert(0, incoming)
        return Server(
            tuple(weight.to(uploads.theta).contiguous() for weight in new_weights),
            tuple(bias.to(uploads.theta).contiguous() for bias in new_biases),
            tuple(assignment.to(server.round) for assignment in assignments),
            server.round + 1,
        )

    def _class_shares(self, labels: Tensor, biases: Tensor) -> Tensor:
        """p (N, C) from label counts (N, C): p_jc = n_jc / sum_i n_ic, 0 for a class that nobody has."""
        if not self.class_shares or labels.shape[1] == 0:  # regression has no classes
            return torch.ones_like(biases)
        return labels / labels.sum(0).clamp(min=1)

    def _output_bias(self, biases: Tensor, share: Tensor) -> Tensor:
        """b_c = (b_0 / sigma0^2 + sum_j p_jc b_jc / sigma^2) / (1 / sigma0^2 + sum_j p_jc / sigma^2)."""
        num = self.bias / self.sigma02 + (share * biases).sum(0) / self.sigma2
        den = 1 / self.sigma02 + share.sum(0) / self.sigma2
        return num / den

    def match(self, units: Units, start: Tensor | None, generator: torch.Generator) -> Tensor:
        """Assignments (N, H) of the clients' units to global ones, numbered in the order of their first use.

        Clients are matched one after another, each given the assignments of all others: once in their own order if
        there are no assignments to start from, and then in `sweeps` random orders.
        """
        num_clients, width, _ = units.evidence.shape
        everybody = list(range(num_clients))
        assignments = torch.zeros(num_clients, width, dtype=torch.int64) if start is None else start.clone()
        matched, turns = ([], everybody) if start is None else (everybody, [])
        for _ in range(self.sweeps):
            turns = turns + torch.randperm(num_clients, generator=generator).tolist()
        for client in turns:
            others = [j for j in matched if j != client]
            assignments[others] = _by_first_use(assignments[others])
            assignments[client] = self.match_client(units, client, posterior(units, others, assignments[others]))
            matched = [*others, client]
        return _by_first_use(assignments)

    def match_client(self, units: Units, client: int, others: Posterior) -> Tensor:
        """The most probable global units (H,) of one client's units; new ones have the numbers from L on."""
        from scipy.optimize import linear_sum_assignment  # noqa: PLC0415  (the other methods do without scipy)

        _, columns = linear_sum_assignment(self.gains(units, client, others).numpy(), maximize=True)
        own = torch.from_numpy(columns)
        known = len(others.counts)
        return torch.where(own < known, own, known - 1 + (own >= known).cumsum(0))

    def gains(self, units: Units, client: int, others: Posterior) -> Tensor:
        """Twice the gain in log-probability (H, L + H) of making unit l a copy of global unit i or of the k-th new one:

        sum_d [(num_id + s_d w_ld)^2 / (den_id + s_d) - num_id^2 / den_id] + 2 log(m_i / (J - m_i)),
        the same sum with the prior's num and den + 2 log(gamma / J) - 2 log k.
        """
        evidence, precision = units.evidence[client], units.precision[client]
        num, den, counts = others
        num_clients, width, known = len(units.precision), len(evidence), len(counts)
        # The square is multiplied out, so that sums over d are matrix products.
        scale = 1 / (den + precision)
        existing = evidence**2 @ scale.T + 2 * evidence @ (num * scale).T + (num**2 * (scale - 1 / den)).sum(1)
        copies = counts.clamp(max=self.max_count or num_clients)
        existing = existing + self.popularity * torch.log(copies / (num_clients - copies))

        room = width if self.max_width is None else min(width, max(self.max_width - known, width - known, 0))
        prior = units.prior_evidence
        single = (prior + evidence) ** 2 / (units.prior_precision + precision) - prior**2 / units.prior_precision
        chance = self.gamma / (num_clients * torch.arange(1, room + 1, dtype=evidence.dtype))
        return torch.cat([existing, single.sum(1, keepdim=True) + self.novelty * torch.log(chance)], dim=1)

    def begin(self, client: State, received: Tensor, shard: Shard) -> Local:
        return Local(received, shard.labels)

    def step(self, model: Model, local: Local, batches: tuple[Batch, ...], noise: Tensor) -> Local:
        """theta <- theta - eta grad CE(theta; B)."""
        (batch,) = batches
        return Local(sgd(local.theta, model.grad_loss(local.theta, batch), self.eta), local.labels)

    def end(self, local: Local) -> tuple[State, Local]:
        return (), local

    def posterior(self, state: Server) -> None:
        """The global network has other widths than the clients'."""

    def predict(self, model: Model, state: Server, x: Tensor, noise: Tensor | None) -> Tensor:
        """Outputs of the global network, which may be wider than the clients'."""
        parts = [part for layer in zip(state.weights, state.biases, strict=True) for part in layer]
        return model.net.apply(parts, model.inputs(x, parts[0].dtype))[None]


def posterior(units: Units, clients: Sequence[int], assignments: Tensor) -> Posterior:
    """num_i = mu_0 / sigma0^2 + sum s w and den_i = 1 / sigma0^2 + sum s, summed over the copies of unit i that these
    clients have according to their assignments (n, H)."""
    known = int(assignments.max()) + 1 if len(assignments) else 0
    has = units.precision.new_zeros(len(assignments), known).scatter(1, assignments, 1.0)
    num = units.prior_evidence.repeat(known, 1)
    for client, own in zip(clients, assignments, strict=True):
        num.index_add_(0, own, units.evidence[client])
    return Posterior(num, units.prior_precision + has.T @ units.precision[list(clients)], has.sum(0))


def _by_first_use(assignments: Tensor) -> Tensor:
    """Assignments (n, H) with the global units numbered 0, 1, ... as they are met; unused ones vanish."""
    used, places = torch.unique(assignments, return_inverse=True)
    position = torch.arange(assignments.numel())
    first = torch.empty_like(used).scatter_reduce(0, places.flatten(), position, "amin", include_self=False)
    return first.argsort().argsort()[places]


def _onto_global(assignments: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weights (N, H', H) into a layer as weights (N, L, H) into its global units, and which of those a client has
    (N, L): of the others it says nothing."""
    num_clients, width = len(weights), int(assignments.max()) + 1
    upward = weights.new_zeros(num_clients, width, weights.shape[2])
    share = weights.new_zeros(num_clients, width)
    for client, own in enumerate(assignments):
        upward[client, own] = weights[client]
        share[client, own] = 1
    return upward, share


def _shapes(widths: Sequence[int]) -> tuple[torch.Size, ...]:
    """Shapes of the parameters of fully connected layers."""
    layers = [(torch.Size((above, below)), torch.Size((above,))) for below, above in pairwise(widths)]
    return tuple(shape for layer in layers for shape in layer)


def _layers(theta: Tensor, shapes: tuple[torch.Size, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Weights and biases of flat networks (..., T)."""
    parts = torch.split_with_sizes(theta, [shape.numel() for shape in shapes], dim=-1)
    shaped = tuple(part.reshape(*theta.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True))
    return shaped[::2], shaped[1::2]


def _local_layers(server: Server, thetas: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Weights and biases of the clients' networks thetas (N, T), in float64 on the host, where matching happens."""
    hidden = [assignment.shape[1] for assignment in server.assignments]
    shapes = _shapes([server.weights[0].shape[1], *hidden, server.weights[-1].shape[0]])
    return _layers(thetas.cpu().double(), shapes)
