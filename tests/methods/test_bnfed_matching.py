import itertools
import math

import pytest
import torch
from bnfed_networks import (
    FORCED,
    ONE,
    layers_of,
    merge,
    random_assignments,
    random_thetas,
    widths,
)
from torch.testing import assert_close

from federations import randn
from pfedbayes.methods.bnfed import BNFed, Units, posterior


def some_units(num_clients=4, width=3, length=5, seed=0, spread=1.0):
    precision = 0.1 + randn(num_clients, length, seed=seed).abs()
    vectors = spread * randn(num_clients, width, length, seed=seed + 1)
    return Units(vectors * precision[:, None], precision, randn(length, seed=seed + 2), prior_precision=0.7)


def objective(units, clients, assignments):
    """sum_i (num_i^2 / den_i - its prior value), unit by unit."""
    total = 0.0
    for i in assignments.unique().tolist():
        num, den = units.prior_evidence.clone(), torch.full_like(units.prior_evidence, units.prior_precision)
        for client, own in zip(clients, assignments, strict=True):
            for unit in (own == i).nonzero().flatten().tolist():
                num, den = num + units.evidence[client, unit], den + units.precision[client]
        total += float((num**2 / den - units.prior_evidence**2 / units.prior_precision).sum())
    return total


class TestPosterior:
    def test_sums_over_the_copies(self):
        units, clients = some_units(), [3, 0, 2]
        assignments = torch.tensor([[1, 0, 2], [3, 1, 0], [4, 3, 1]])
        num, den, counts = posterior(units, clients, assignments)
        members = {0: [(3, 1), (0, 2)], 1: [(3, 0), (0, 1), (2, 2)], 2: [(3, 2)], 3: [(0, 0), (2, 1)], 4: [(2, 0)]}
        for i, copies in members.items():
            assert_close(num[i], units.prior_evidence + sum(units.evidence[j, unit] for j, unit in copies))
            assert_close(den[i], 0.7 + sum(units.precision[j] for j, _ in copies))
        assert counts.tolist() == [2, 3, 1, 2, 1]
        assert counts.sum() == assignments.numel()

    def test_nobody_has_anything(self):
        num, den, counts = posterior(some_units(), [], torch.empty(0, 3, dtype=torch.int64))
        assert (num.shape, den.shape, counts.shape) == ((0, 5), (0, 5), (0,))


class TestMatchingOfOneClient:
    """Against the most probable of all assignments, each scored by what it does to the whole objective."""

    def score(self, method, units, client, others, assignments, own):
        counts, num_clients = torch.bincount(assignments.flatten()), len(others) + 1
        known = len(counts)
        new = sum(i >= known for i in own)
        score = objective(units, [*others, client], torch.cat([assignments, torch.tensor([own])]))
        score += sum(2 * math.log(counts[i] / (num_clients - counts[i])) for i in own if i < known)
        return score + 2 * new * math.log(method.gamma / num_clients) - 2 * math.log(math.factorial(new))

    @pytest.mark.parametrize("gamma", [0.01, 1.0, 30.0])
    @pytest.mark.parametrize("seed", range(6))
    def test_brute_force(self, gamma, seed):
        method = BNFed(gamma=gamma)
        units, client, others = some_units(seed=10 * seed), 1, [0, 2, 3]
        assignments = random_assignments(3, 3, known=4, seed=seed)
        assignments = torch.unique(assignments, return_inverse=True)[1]
        known = int(assignments.max()) + 1
        own = method.match_client(units, client, posterior(units, others, assignments))

        best, best_score = None, -math.inf
        for choice in itertools.product([*range(known), None], repeat=3):
            fresh = itertools.count(known)
            candidate = [next(fresh) if i is None else i for i in choice]
            if len(set(candidate)) == 3:
                score = self.score(method, units, client, others, assignments, candidate)
                if score > best_score:
                    best, best_score = candidate, score
        assert own.tolist() == best


class TestLimits:
    thetas = random_thetas(5, ONE, seed=4)

    def test_no_mass_no_new_units(self):
        assert widths(merge(BNFed(**FORCED), self.thetas)) == [4]

    def test_much_mass_makes_every_unit_new(self):
        server = merge(BNFed(gamma=1e300), self.thetas)
        assert widths(server) == [20]
        for own, theta in zip(server.assignments[0], self.thetas, strict=True):
            assert_close(server.weights[0][own], layers_of(theta, ONE)[0][0] / 2)

    @pytest.mark.parametrize(("max_width", "expected"), [(1, 4), (4, 4), (7, 7), (20, 20), (99, 20)])
    def test_up_to_the_largest_width_allowed(self, max_width, expected):
        assert widths(merge(BNFed(gamma=1e300, max_width=max_width), self.thetas)) == [expected]


class TestSweeps:
    @pytest.mark.parametrize("seed", range(5))
    def test_without_log_terms_a_rematch_never_lowers_the_objective(self, seed):
        method, units = BNFed(popularity=0.0, novelty=0.0), some_units(5, 4, 6, seed=20 + seed)
        assignments = random_assignments(5, 4, known=7, seed=seed)
        values = [objective(units, range(5), assignments)]
        for client in [2, 0, 4, 1, 3] * 3:
            others = [j for j in range(5) if j != client]
            assignments[others] = torch.unique(assignments[others], return_inverse=True)[1]
            assignments[client] = method.match_client(units, client, posterior(units, others, assignments[others]))
            values.append(objective(units, range(5), assignments))
        assert all(after >= before - 1e-9 for before, after in itertools.pairwise(values))
        assert values[-1] > values[0] + 0.1

    def test_sweeps_end_no_lower_than_they_began(self):
        units = some_units(5, 4, 6, seed=30)
        start = random_assignments(5, 4, known=7, seed=0)
        values = [objective(units, range(5), start)]
        for sweeps in (0, 1, 2, 5):
            method = BNFed(popularity=0.0, novelty=0.0, sweeps=sweeps)
            found = method.match(units, start, torch.Generator().manual_seed(0))
            values.append(objective(units, range(5), found))
        assert values[1] == pytest.approx(values[0])  # renumbered, otherwise the same
        assert all(after >= before - 1e-9 for before, after in itertools.pairwise(values))
        assert values[2] > values[1]

    def test_true_copies_are_found_from_a_bad_start(self):
        truth = random_assignments(6, 3, known=5, seed=1)
        vectors = 5 * randn(5, 8, seed=2)[truth] + 0.1 * randn(6, 3, 8, seed=3)
        units = Units(vectors, torch.ones(6, 8).double(), torch.zeros(8).double(), prior_precision=0.01)
        for start in (None, random_assignments(6, 3, known=18, seed=4)):
            found = BNFed().match(units, start, torch.Generator().manual_seed(0))
            same = (found.flatten()[:, None] == found.flatten()) == (truth.flatten()[:, None] == truth.flatten())
            assert same.all()


class TestGains:
    units = some_units(6, 3, 5, seed=40)
    others = posterior(units, range(1, 6), random_assignments(5, 3, known=4, seed=1))

    def gains(self, **fields):
        return BNFed(**fields).gains(self.units, 0, self.others)

    def test_log_terms(self):
        bare = self.gains(popularity=0.0, novelty=0.0)
        counts = self.others.counts
        existing = 2 * torch.log(counts / (6 - counts))
        new = torch.tensor([2 * math.log(3.0 / 6) - 2 * math.log(k) for k in (1, 2, 3)]).double()
        assert_close(self.gains(gamma=3.0) - bare, torch.cat([existing, new]).expand(3, -1))
        half = self.gains(gamma=3.0, popularity=1.0) - bare
        assert_close(half, torch.cat([existing / 2, new]).expand(3, -1))

    def test_popularity_may_count_no_further_than_some_number(self):
        assert self.others.counts.max() > 2
        capped = self.others.counts.clamp(max=2)
        expected = (self.gains(popularity=0.0)[:, :4] + 2 * torch.log(capped / (6 - capped))).double()
        assert_close(self.gains(max_count=2)[:, :4], expected)
