"""BNFed, the PFNM of Yurochkin et al. (2019): match hidden units between clients before averaging them.

The clients' units are noisy copies of global units. The number of global units is not fixed: under a Beta-Bernoulli
process, popular units attract more copies, and new units can appear. The server finds the most probable assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import Count, CountOrZero, NonNegative, Positive
from pfedbayes.errors import UserError
from pfedbayes.maths.optim import sgd
from pfedbayes.maths.trees import pick
from pfedbayes.methods.base import About, Habits, Method, Needs, Shard, State
from pfedbayes.nets import Batch, Model, Net


class Server(NamedTuple):
    """The global network, layer by layer, and which of its hidden units each client has."""

    weights: tuple[Tensor, ...]
    """(L1, D), (L2, L1), ..., (C, L)."""
    biases: tuple[Tensor, ...]
    """(L1,), ..., (C,)."""
    assignments: tuple[Tensor, ...]
    """For each hidden layer (N, H): the global unit of each of a client's H units."""
    round: Tensor
    """Number of rounds matched so far."""


class ModelAndLabels(NamedTuple):
    """The state of a round, and the upload."""

    theta: Tensor
    """The client's network (T,)."""
    labels: Tensor
    """The client's number of examples of each class (C,)."""


class Units(NamedTuple):
    """One hidden layer of all clients, as H vectors w of length V per client, and their prior."""

    evidence: Tensor
    """s w, (N, H, V)."""
    precision: Tensor
    """s, (N, V)."""
    prior_evidence: Tensor
    """mu_0 / sigma0^2, (V,)."""
    prior_precision: float
    """1 / sigma0^2."""


class Posterior(NamedTuple):
    """The global units of a layer, given their copies: means num / den with precisions den."""

    num: Tensor
    """(L, V)."""
    den: Tensor
    """(L, V)."""
    counts: Tensor
    """Number of copies (L,)."""


@dataclass(frozen=True)
class BNFed(Method):
    """Clients run local SGD; the server matches their hidden units and takes posterior means."""

    eta: NonNegative[float] = 0.5
    """Learning rate of the local SGD steps."""
    sigma2: Positive[float] = 1.0
    """Variance of a client's unit around the global unit."""
    sigma02: Positive[float] = 1.0
    """Variance of a global unit around its prior mean, which is 0 for weights."""
    gamma: Positive[float] = 1.0
    """Mass of the process; larger values give more global units."""
    sweeps: CountOrZero = 3
    """How often the server re-matches every client in a round."""
    bias: float = 0.1
    """Prior mean and initial value of all biases."""
    class_shares: bool = True
    """Weight a client's connections to a class by its share of that class's examples; otherwise weight all equally."""
    popularity: NonNegative[float] = 2.0
    """Factor of the log-probability of existing units: 2 in the derivation, 1 in the public code."""
    novelty: NonNegative[float] = 2.0
    """Factor of the log-probability of new units."""
    max_count: Count | None = None
    """Largest number of copies that counts towards popularity (public code: 10)."""
    max_width: Count | None = None
    """Number of units in a global layer above which no new ones appear (public code: 700)."""

    about = About(
        "BNFed",
        "Yurochkin et al., ICML 2019",
        "one shared network; hidden units are matched between clients and their number is inferred",
        averages=False,
    )
    habits = Habits(init="normal", pixels="unit", trains="all")

    @property
    def needs(self) -> Needs:
        return Needs(all_clients=True, net="mlp", eager=True)

    def init(self, theta: Tensor, num_clients: int, net: Net) -> Server:
        """Return the initial network, with biases at their prior mean; every client has all its units."""
        shapes = net.shapes
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
        """Return each client's units of the global network, as networks (n, T) of the clients' width."""
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

    def aggregate(self, server: Server, uploads: ModelAndLabels, sizes: Tensor, clients: Tensor) -> Server:
        """Match the hidden layers from the last to the first, and take the posterior means of the global units.

        A unit's vector is [incoming weights, bias, outgoing weights]. Only the first hidden layer has incoming weights:
        in the others they are the outgoing weights of the layer below. The precision is 1 / sigma^2, except for weights
        to class c, where it is p_jc / sigma^2 with client j's share p_jc of the examples of class c.
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
        """Return p (N, C) from label counts n (N, C): p_jc = n_jc / sum_i n_ic, 0 for a class without examples."""
        if not self.class_shares or labels.shape[1] == 0:  # regression has no classes
            return torch.ones_like(biases)
        return labels / labels.sum(0).clamp(min=1)

    def _output_bias(self, biases: Tensor, share: Tensor) -> Tensor:
        """Return b_c = (b_0 / sigma0^2 + sum_j p_jc b_jc / sigma^2) / (1 / sigma0^2 + sum_j p_jc / sigma^2)."""
        num = self.bias / self.sigma02 + (share * biases).sum(0) / self.sigma2
        den = 1 / self.sigma02 + share.sum(0) / self.sigma2
        return num / den

    def match(self, units: Units, start: Tensor | None, generator: torch.Generator) -> Tensor:
        """Return assignments (N, H) of the clients' units to global units, numbered in the order of their first use.

        Clients are matched one after another, each given the assignments of the others: first in the order of clients,
        unless there are assignments to start from, then in `sweeps` random orders.
        """
        num_clients, width, _ = units.evidence.shape
        all_clients = list(range(num_clients))
        assignments = torch.zeros(num_clients, width, dtype=torch.int64) if start is None else start.clone()
        matched, turns = ([], all_clients) if start is None else (all_clients, [])
        for _ in range(self.sweeps):
            turns = turns + torch.randperm(num_clients, generator=generator).tolist()
        for client in turns:
            others = [j for j in matched if j != client]
            assignments[others] = _by_first_use(assignments[others])
            assignments[client] = self.match_client(units, client, posterior(units, others, assignments[others]))
            matched = [*others, client]
        return _by_first_use(assignments)

    def match_client(self, units: Units, client: int, others: Posterior) -> Tensor:
        """Return the most probable global units (H,) of one client's units; new units are numbered from L on."""
        from scipy.optimize import linear_sum_assignment  # noqa: PLC0415  (only this method needs scipy)

        _, columns = linear_sum_assignment(self.gains(units, client, others).numpy(), maximize=True)
        own = torch.from_numpy(columns)
        known = len(others.counts)
        return torch.where(own < known, own, known - 1 + (own >= known).cumsum(0))

    def gains(self, units: Units, client: int, others: Posterior) -> Tensor:
        """Return twice the gain in log-probability (H, L + H) if unit l copies global unit i or the k-th new unit:

        sum_d [(num_id + s_d w_ld)^2 / (den_id + s_d) - num_id^2 / den_id] + 2 log(m_i / (J - m_i)),
        the same sum with the prior's num and den + 2 log(gamma / J) - 2 log k.
        """
        evidence, precision = units.evidence[client], units.precision[client]
        num, den, counts = others
        num_clients, width, known = len(units.precision), len(evidence), len(counts)
        # Expand the square, so that sums over d are matrix products.
        scale = 1 / (den + precision)
        existing = evidence**2 @ scale.T + 2 * evidence @ (num * scale).T + (num**2 * (scale - 1 / den)).sum(1)
        copies = counts.clamp(max=self.max_count or num_clients)
        existing = existing + self.popularity * torch.log(copies / (num_clients - copies))

        room = width if self.max_width is None else min(width, max(self.max_width - known, width - known, 0))
        prior = units.prior_evidence
        single = (prior + evidence) ** 2 / (units.prior_precision + precision) - prior**2 / units.prior_precision
        chance = self.gamma / (num_clients * torch.arange(1, room + 1, dtype=evidence.dtype))
        return torch.cat([existing, single.sum(1, keepdim=True) + self.novelty * torch.log(chance)], dim=1)

    def begin(self, client: State, received: Tensor, shard: Shard) -> ModelAndLabels:
        return ModelAndLabels(received, shard.labels)

    def step(self, model: Model, local: ModelAndLabels, batches: tuple[Batch, ...], noise: Tensor) -> ModelAndLabels:
        """theta <- theta - eta grad CE(theta; B)."""
        (batch,) = batches
        return ModelAndLabels(sgd(local.theta, model.grad_loss(local.theta, batch), self.eta), local.labels)

    def end(self, local: ModelAndLabels) -> tuple[State, ModelAndLabels]:
        return (), local

    def posterior(self, state: Server) -> None:
        """Return None: the global network is wider than the clients'."""

    def predict(self, model: Model, state: Server, x: Tensor, noise: Tensor | None) -> Tensor:
        """Return the outputs of the global network, which may be wider than the clients'."""
        parts = [part for layer in zip(state.weights, state.biases, strict=True) for part in layer]
        return model.net.apply(parts, model.inputs(x, parts[0].dtype))[None]


def posterior(units: Units, clients: Sequence[int], assignments: Tensor) -> Posterior:
    """Return num_i = mu_0 / sigma0^2 + sum s w and den_i = 1 / sigma0^2 + sum s.

    The sums run over the copies of unit i among these clients, given their assignments (n, H).
    """
    known = int(assignments.max()) + 1 if len(assignments) else 0
    has = units.precision.new_zeros(len(assignments), known).scatter(1, assignments, 1.0)
    num = units.prior_evidence.repeat(known, 1)
    for client, own in zip(clients, assignments, strict=True):
        num.index_add_(0, own, units.evidence[client])
    return Posterior(num, units.prior_precision + has.T @ units.precision[list(clients)], has.sum(0))


def _by_first_use(assignments: Tensor) -> Tensor:
    """Renumber the global units in assignments (n, H) as 0, 1, ... in the order of their first use."""
    used, places = torch.unique(assignments, return_inverse=True)
    position = torch.arange(assignments.numel())
    first = torch.empty_like(used).scatter_reduce(0, places.flatten(), position, "amin", include_self=False)
    return first.argsort().argsort()[places]


def _onto_global(assignments: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Map weights (N, H', H) into a layer to weights (N, L, H) into its global units.

    Also return which global units a client has (N, L); the client has no evidence on the others.
    """
    num_clients, width = len(weights), int(assignments.max()) + 1
    upward = weights.new_zeros(num_clients, width, weights.shape[2])
    share = weights.new_zeros(num_clients, width)
    for client, own in enumerate(assignments):
        upward[client, own] = weights[client]
        share[client, own] = 1
    return upward, share


def _shapes(widths: Sequence[int]) -> tuple[torch.Size, ...]:
    """Return the parameter shapes of fully connected layers."""
    layers = [(torch.Size((above, below)), torch.Size((above,))) for below, above in pairwise(widths)]
    return tuple(shape for layer in layers for shape in layer)


def _layers(theta: Tensor, shapes: tuple[torch.Size, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the weights and biases of networks (..., T)."""
    parts = torch.split_with_sizes(theta, [shape.numel() for shape in shapes], dim=-1)
    shaped = tuple(part.reshape(*theta.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True))
    return shaped[::2], shaped[1::2]


def _local_layers(server: Server, thetas: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the weights and biases of the clients' networks thetas (N, T), in float64 on the CPU for matching."""
    hidden = [assignment.shape[1] for assignment in server.assignments]
    shapes = _shapes([server.weights[0].shape[1], *hidden, server.weights[-1].shape[0]])
    return _layers(thetas.cpu().double(), shapes)
