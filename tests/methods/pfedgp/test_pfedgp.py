import dataclasses
import math
import subprocess
import sys
import textwrap

import pytest
import torch
from pfedgp_inputs import blobs, generator
from torch.testing import assert_close

from federations import (
    EXACT,
    SIZES,
    TRAINING,
    client_steps,
    copy,
    difference,
    first_server,
    make_shards,
    model_for,
    one_of,
    randn,
    same_bits,
    stacked_inputs,
    trained,
)
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.maths.likelihoods import Classification
from pfedbayes.maths.trees import pick
from pfedbayes.methods.base import Adaptation
from pfedbayes.methods.pfedgp import method as pfedgp
from pfedbayes.methods.pfedgp import polya_gamma
from pfedbayes.methods.pfedgp.label_tree import build_tree
from pfedbayes.methods.pfedgp.method import FLOOR, Personal, PFedGP
from pfedbayes.methods.pfedgp.polya_gamma import draw, gibbs, rbf
from pfedbayes.nets import Batch, Model, Net, mlp

SMALL = PFedGP(features=6, chains=4, test_chains=4, gibbs_steps=3)
LOOP = {"plan": dataclasses.replace(EXACT, over="loop")}


def adaptation(x, y, num_classes, seed=1, test=None):
    train = Batch(x, y, torch.ones(len(y), dtype=x.dtype))
    return Adaptation(train, len(y), num_classes, seed, test, pick(train, slice(0)))


IDENTITY = Model(Net(mlp([4, 4])), Classification())
AS_GIVEN = torch.cat([torch.eye(4, dtype=torch.float64).flatten(), torch.zeros(4, dtype=torch.float64)])


def objective_of(method, z, y, splits, seed):
    """The objective of a client with features z and labels y."""
    return sum(method.losses(z[None], list(method.tasks(0, y, splits, generator(seed)))))


def adapt(method, phi, data):
    return method.adapt(IDENTITY, (), phi, method.prepare(data))


def predict(method, z, y, new, num_classes, seed=1):
    """Probabilities (m, C) at features `new` of the personal model made from features z, the network being identity."""
    state = adapt(method, AS_GIVEN, adaptation(z, y, num_classes, seed))
    return method.predict(IDENTITY, state, new, None)[0].exp()


class TestObjective:
    method = PFedGP(features=4, chains=3, gibbs_steps=3)
    z, y = blobs([7, 5, 8], spread=1.0)

    def literal(self, z, splits, seed):
        """Section 4.7 of the specification with inverses and loops; the draws alone are the method's."""
        draws = generator(seed)
        total = 0.0
        for left, right in splits.tolist():
            rows = [i for i, label in enumerate(self.y.tolist()) if left[label] or right[label]]
            goes_left = torch.tensor([left[self.y[i]] for i in rows])
            target = self.method._draw_targets(goes_left, draws)
            old = [i for i, is_target in zip(rows, target, strict=True) if not is_target]
            new = [i for i, is_target in zip(rows, target, strict=True) if is_target]
            kappa = torch.tensor([0.5 if left[self.y[i]] else -0.5 for i in old], dtype=torch.float64)
            cov = rbf(z[old], z[old], 8.0, 1.0) + 1e-3 * torch.eye(len(old))
            omega = gibbs(cov.detach(), kappa, draw(3, len(old), 3, draws))
            losses = []
            for i in new:
                k = rbf(z[[i]], z[old], 8.0, 1.0)[0]
                probability = 0.0
                for chain in omega:
                    inverse = torch.linalg.inv(cov + torch.diag(1 / chain))
                    mean, variance = k @ inverse @ (kappa / chain), 8 - k @ inverse @ k
                    nodes = torch.distributions.Normal(mean, variance.sqrt())
                    f = nodes.icdf((torch.arange(4000, dtype=torch.float64) + 0.5) / 4000)
                    probability = probability + torch.sigmoid(f).mean() / len(omega)
                losses.append(-torch.log(probability if left[self.y[i]] else 1 - probability))
            total = total + torch.stack(losses).mean()
        return total

    def test_value_and_gradient_are_those_of_the_literal_formulas(self):
        splits = build_tree(self.z, self.y, 3)
        results = []
        for objective in (
            lambda z: objective_of(self.method, z, self.y, splits, 5),
            lambda z: self.literal(z, splits, 5),
        ):
            z = self.z.clone().requires_grad_()
            value = objective(z)
            results.append((value.detach(), *torch.autograd.grad(value, z)))
        assert_close(results[0][0], results[1][0], rtol=1e-3, atol=0)
        assert_close(results[0][1], results[1][1], rtol=0, atol=2e-3 * float(results[1][1].abs().max()))

    def test_omega_carries_no_gradient(self):
        z = self.z.clone().requires_grad_()
        node = self.method._classifier(z, self.y == 0, draw(3, len(z), 3, generator()))
        assert node.z.requires_grad
        assert not node.omega.requires_grad

    @pytest.mark.parametrize(("share", "left", "right"), [(0.5, 3, 2), (0.3, 2, 1), (0.9, 6, 4)])
    def test_targets_are_a_share_of_either_side(self, share, left, right):
        method = dataclasses.replace(self.method, target_share=share)
        goes_left = torch.tensor([k < 7 for k in range(12)])  # 7 and 5 examples; shares are rounded down
        drawn = [method._draw_targets(goes_left, generator(seed)) for seed in range(20)]
        assert {int(target[goes_left].sum()) for target in drawn} == {left}
        assert {int(target[~goes_left].sum()) for target in drawn} == {right}
        assert torch.stack(drawn).any(0).all()

    def test_nothing_to_predict_costs_nothing(self):
        z, y = self.z[:2], torch.tensor([0, 1])
        assert list(self.method.tasks(0, y, build_tree(z, y, 2), generator())) == []
        assert len(pfedgp.NO_ROWS) == 0  # of the tasks that learn a tree, or predict with it


class TestLocalTraining:
    inputs = one_of(stacked_inputs(SMALL), 0)

    def run(self, method, inputs=None):
        return client_round(method, model_for(method), *(inputs or self.inputs))[1]

    def test_steps_are_clipped_sgd_with_momentum_and_weight_decay(self):
        method = dataclasses.replace(SMALL, inner_steps=3, clip=0.5, weight_decay=0.1)
        model = model_for(method)
        phi = self.inputs.received.clone().requires_grad_()
        optimizer = torch.optim.SGD([phi], lr=0.05, momentum=0.9, weight_decay=0.1)
        local = method.begin((), self.inputs.received, self.inputs.shard)
        norms = []
        for (batch,), noise in self.inputs.steps[:3]:
            # The method's own objective at the current point, read off a step without momentum, decay or clipping.
            plain = dataclasses.replace(method, eta=1.0, momentum=0.0, weight_decay=0.0, clip=1e9)
            phi.grad = phi.detach() - plain.step(model, local._replace(phi=phi.detach()), (batch,), noise).phi
            norms.append(float(torch.nn.utils.clip_grad_norm_(phi, 0.5)))
            optimizer.step()
            local = method.step(model, local, (batch,), noise)
            assert_close(local.phi, phi.detach(), rtol=1e-5, atol=1e-6)  # torch's clipping adds 1e-6 to the norm
        assert max(norms) > 0.5

    def test_only_the_inner_steps_count(self):
        fewer = self.inputs._replace(steps=self.inputs.steps[:2])
        method = dataclasses.replace(SMALL, inner_steps=2)
        assert len(self.inputs.steps) > 2
        assert same_bits(self.run(method), self.run(method, fewer))
        assert not same_bits(self.run(method), self.run(SMALL))

    def test_the_tree_is_that_of_the_start_of_the_round(self):
        method = dataclasses.replace(SMALL, inner_steps=2, eta=1.0)
        model, local = model_for(method), method.begin((), self.inputs.received, self.inputs.shard)
        (batch,), _ = self.inputs.steps[0]
        expected = build_tree(method.normalised(model, self.inputs.received, batch.x), batch.y, 3)
        for batches, noise in self.inputs.steps[:2]:
            local = method.step(model, local, batches, noise)
            assert torch.equal(local.splits, expected)

    def test_draws_depend_on_the_noise_and_on_nothing_else(self):
        batches, noise = self.inputs.steps[0]
        first, again, other = (
            self.run(SMALL, self.inputs._replace(steps=[(batches, given)])) for given in (noise, noise, noise + 1)
        )
        assert same_bits(first, again)
        assert not same_bits(first, other)

    def test_at_rate_zero_nothing_moves(self):
        assert same_bits(self.run(dataclasses.replace(SMALL, eta=0.0)), self.inputs.received)

    def test_training_lowers_the_objective(self):
        method = PFedGP(features=6, chains=20, inner_steps=30, weight_decay=0.0)
        shards, model = make_shards(sizes=(60,), test_sizes=(3,)), model_for(method)
        training = dataclasses.replace(TRAINING, local_steps=30)
        received = first_server(method, model, 1, 1)
        steps = client_steps(shards, model, method, training, 0, 1, 0)
        shard = self.inputs.shard
        _, upload = client_round(method, model, (), received, shard, steps)
        (batch,), _ = steps[0]

        def value(phi):
            z = method.normalised(model, phi, batch.x)
            return sum(objective_of(method, z, batch.y, build_tree(z, batch.y, 3), k) for k in range(5))

        assert value(upload) < 0.9 * value(received)


def test_the_server_takes_the_plain_mean_of_unequal_clients():
    server = trained(SMALL, 1, training=dataclasses.replace(TRAINING, participants=len(SIZES)), **LOOP).servers[0]
    inputs = stacked_inputs(SMALL)
    uploads = [client_round(SMALL, model_for(SMALL), *one_of(inputs, i))[1] for i in range(len(SIZES))]
    assert difference(server, torch.stack(uploads).mean(0)) < 1e-12


class TestManyClients:
    """Clients with different labels, some with equal numbers of each and some not, one with a single label."""

    LABELS = ((0, 1, 2), (2, 3, 4), (0, 2, 4), (1, 3), (0, 1, 2, 3, 4), (3,), (1, 4))
    PER_LABEL = (6, 6, 6, 9, 5, 8, 7)
    training = dataclasses.replace(TRAINING, participants=len(LABELS))
    method = dataclasses.replace(SMALL, inner_steps=2)

    def shards(self):
        counts = [len(labels) * count for labels, count in zip(self.LABELS, self.PER_LABEL, strict=True)]
        shards = make_shards(tuple(counts), test_sizes=(5,) * len(counts), classes=5)
        for rows, labels in zip(shards.train, self.LABELS, strict=True):
            shards.y[rows] = torch.tensor(labels).repeat(len(rows) // len(labels))
        return shards

    def trained(self, **others):
        settings = {"shards": self.shards(), "training": self.training, "rounds": 2} | others
        return trained(self.method, **settings)

    @pytest.mark.parametrize("participants", [7, 3])
    @pytest.mark.parametrize("chunk", [None, 2])
    def test_together_they_are_as_one_at_a_time(self, participants, chunk):
        training = dataclasses.replace(self.training, participants=participants)
        one_by_one = self.trained(training=training, **LOOP)
        at_once = self.trained(training=training, plan=dataclasses.replace(EXACT, chunk=chunk))
        assert difference(at_once.servers, one_by_one.servers) < 1e-11
        ours, theirs = (torch.tensor(each.evaluate()["personal"]["mean"]["nll"]) for each in (at_once, one_by_one))
        assert_close(ours, theirs)

    @pytest.mark.parametrize("size", [1, 1000])
    def test_chunks_change_nothing(self, size, monkeypatch):
        whole = self.trained()
        scores = whole.evaluate()["personal"]["mean"]["nll"]
        monkeypatch.setattr(polya_gamma, "CHUNK", size)
        assert difference(self.trained().servers, whole.servers) < 1e-11
        assert_close(torch.tensor(whole.evaluate()["personal"]["mean"]["nll"]), torch.tensor(scores))

    def test_nodes_with_equally_many_examples_are_one_group(self, monkeypatch):
        groups = []

        def counting(cov, *others):
            groups.append(tuple(cov.shape[:2]))
            return gibbs(cov, *others)

        monkeypatch.setattr(pfedgp, "gibbs", counting)
        self.trained(rounds=1, training=dataclasses.replace(self.training, local_steps=1))
        # Three clients have a root with 18 examples and a node with 12, half of which are to be predicted.
        assert {(3, 9), (3, 6)} < set(groups)
        assert sum(count for count, _ in groups) == sum(len(labels) - 1 for labels in self.LABELS)


class TestPrediction:
    method = PFedGP(features=4)
    z, y = blobs([9, 6, 8, 5], spread=0.3)
    new, truth = blobs([4, 4, 4, 4], spread=0.3)

    def test_labels_of_the_client_share_all_probability(self):
        for link in ("mean", "reference"):
            probabilities = predict(dataclasses.replace(self.method, link=link), self.z, 2 * self.y, self.new, 9)
            assert_close(probabilities[:, ::2][:, :4].sum(-1), torch.ones(16, dtype=torch.float64))
            assert_close(probabilities[:, 1::2], torch.full((16, 4), FLOOR, dtype=torch.float64))
            assert_close(probabilities[:, 8], torch.full((16,), FLOOR, dtype=torch.float64))

    def test_a_client_with_one_label_expects_that_label(self):
        probabilities = predict(self.method, self.z, torch.full_like(self.y, 2), self.new, 4)
        assert_close(probabilities, torch.tensor([FLOOR, FLOOR, 1, FLOOR], dtype=torch.float64).expand(16, -1))

    def test_separate_blobs_are_told_apart_with_the_exact_probabilities(self):
        z, y = blobs([12, 10])
        new = torch.cat([blobs([5, 5])[0], blobs([12, 10], spread=1.0)[0][:6]])  # some of them between the blobs
        method = dataclasses.replace(self.method, gibbs_steps=20, test_chains=400)
        probabilities = predict(method, z, y, new, 2)
        # The posterior by importance sampling from the prior, jointly at old and new points.
        both = torch.cat([z, new])
        cov = rbf(both, both, 8.0, 1.0) + 1e-3 * torch.eye(len(both))
        f = randn(400_000, len(both), seed=9) @ torch.linalg.cholesky(cov).mT
        weight = torch.sigmoid(torch.where(y == 0, f[:, :22], -f[:, :22])).prod(-1)
        assert weight.sum() ** 2 / weight.square().sum() > 2000  # independent draws that these are worth
        exact = (weight @ torch.sigmoid(f[:, 22:])) / weight.sum()
        assert_close(probabilities[:, 0], exact, rtol=0, atol=0.02)

    def test_accuracy_on_separate_blobs_is_full(self):
        z, y = blobs([12, 10, 9, 14, 11])
        probabilities = predict(self.method, z[20:], y[20:], z[:20], 5)
        assert torch.equal(probabilities.argmax(-1), y[:20])

    def test_the_order_of_the_training_data_does_not_matter(self):
        method = dataclasses.replace(self.method, test_chains=1500)
        order = torch.randperm(len(self.y), generator=generator(4))
        one = predict(method, self.z, self.y, self.new, 4)
        assert_close(one, predict(method, self.z[order], self.y[order], self.new, 4, seed=2), rtol=0, atol=0.02)

    def test_it_is_made_from_the_shared_features_and_the_whole_training_set(self):
        running = trained(SMALL, 1, **LOOP)
        state = running.personal_state(0)
        assert isinstance(state, Personal)
        assert same_bits(state.phi, running.servers[0])
        assert len(state.y) == SIZES[0]
        assert state.omega.shape == (2, SMALL.test_chains, SIZES[0])
        assert (state.omega[0] > 0).all()

    def test_equal_seeds_give_equal_bits(self):
        one, same, other = (predict(self.method, self.z, self.y, self.new, 4, seed) for seed in (1, 1, 2))
        assert same_bits(one, same)
        assert not same_bits(one, other)
        assert_close(one, other, rtol=0, atol=0.1)

    def test_data_to_be_predicted_are_not_looked_at(self):
        data = adaptation(self.z, self.y, 4)
        poisoned = adaptation(self.z, self.y, 4, test=Batch(self.new * torch.nan, self.truth, torch.ones(16)))
        states = [adapt(self.method, AS_GIVEN, each) for each in (data, poisoned)]
        assert same_bits(*states)

    def test_adapting_and_predicting_change_no_argument(self):
        data, phi = adaptation(self.z, self.y, 4), AS_GIVEN.clone()
        kept = copy((data.train, phi))
        state = adapt(self.method, phi, data)
        kept_state = copy(state)
        self.method.predict(IDENTITY, state, self.new, None)
        assert same_bits((data.train, phi, state), (*kept, kept_state))

    def test_rows_are_predicted_one_by_one_as_together(self):
        state = adapt(self.method, AS_GIVEN, adaptation(self.z, self.y, 4))
        together = self.method.predict(IDENTITY, state, self.new, None)
        alone = [self.method.predict(IDENTITY, state, row[None], None) for row in self.new]
        assert_close(together, torch.cat(alone, dim=1), rtol=1e-9, atol=1e-9)

    def test_the_reference_link_leans_to_the_right(self):
        mean, reference = (
            predict(dataclasses.replace(self.method, link=link), self.z, self.y, self.new, 4)
            for link in ("mean", "reference")
        )
        right = build_tree(self.z, self.y, 4)[0, 1]
        assert (reference[:, right].sum(-1) > mean[:, right].sum(-1)).all()


@pytest.mark.slow
def test_4500_examples_need_no_more_than_one_and_a_half_gigabytes():
    """A step with 20 chains and a prediction from 4500 examples, in a process whose memory nothing else has used."""
    script = """
        import resource
        import torch
        from pfedbayes.maths.likelihoods import Classification
        from pfedbayes.maths.trees import pick
        from pfedbayes.methods.base import Adaptation, Shard
        from pfedbayes.methods.pfedgp import PFedGP
        from pfedbayes.nets import Batch, Model, Net, mlp

        def used():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

        n, m = 4500, 1500
        model = Model(Net(mlp([20, 84])), Classification())
        batch = Batch(torch.randn(n, 20), torch.arange(n) % 5, torch.ones(n))
        method = PFedGP(gibbs_steps=2, test_chains=3)
        before, phi = used(), model.net.init(1, "torch")
        local = method.begin((), phi, Shard(batch.size, torch.bincount(batch.y)))
        local = method.step(model, local, (batch,), torch.zeros(2))
        trained = used()
        data = Adaptation(batch, n, 5, 1, None, pick(batch, slice(0)))
        state = method.adapt(model, (), local.phi, method.prepare(data))
        assert method.predict(model, state, batch.x[:m], None).isfinite().all()
        print(trained - before, used() - before)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert max(map(int, done.stdout.split())) < 1.5e9, done.stdout


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eta", -0.1),
        ("momentum", 1.0),
        ("weight_decay", -1.0),
        ("clip", 0.0),
        ("inner_steps", 0),
        ("features", 0),
        ("outputscale", 0.0),
        ("lengthscale", -1.0),
        ("jitter", -1e-3),
        ("gibbs_steps", 0),
        ("chains", 0),
        ("test_chains", 0),
        ("target_share", 1.0),
    ],
)
def test_values_without_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        PFedGP(**{field: value})


def test_the_network_gives_features():
    assert PFedGP().needs.outputs == 84
    assert math.prod(PFedGP().noise_shape(Model(Net(mlp([3, 4, 3])), Classification()), 100)) == 2
