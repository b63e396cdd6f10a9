import torch
from torch.testing import assert_close

from federations import difference, model_for, one_of, randn, same_bits, stacked_inputs, trained
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.maths.stacked import weighted_mean
from pfedbayes.methods import FOLA, FedAvg, FedProx
from pfedbayes.methods.fola import Laplace, Server

SERVER = Server(randn(6), torch.ones(6).double(), torch.zeros(()).double(), torch.tensor(3.0).double())
UPLOADS = Laplace(randn(3, 6, seed=2), randn(3, 6, seed=3).exp())
COUNTS = torch.tensor([5.0, 50.0, 500.0]).double()


def merged(uploads=UPLOADS):
    return FOLA().aggregate(SERVER, uploads, COUNTS, torch.arange(3))


def test_the_server_multiplies_gaussians():
    after, shares = merged(), COUNTS / COUNTS.sum()
    precision = sum(s * lam for s, lam in zip(shares, UPLOADS.precision, strict=True))
    mean = sum(s * lam * mu for s, lam, mu in zip(shares, UPLOADS.precision, UPLOADS.mean, strict=True)) / precision
    assert_close(after.precision, precision)
    assert_close(after.mean, mean)
    assert after.size == COUNTS.mean()


def test_means_do_not_depend_on_the_scale_of_precisions_and_equal_ones_give_the_plain_mean():
    assert_close(merged(UPLOADS._replace(precision=9 * UPLOADS.precision)).mean, merged().mean)
    flat = UPLOADS._replace(precision=torch.full((3, 6), 0.3).double())
    assert_close(merged(flat).mean, weighted_mean(UPLOADS.mean, COUNTS))


def test_one_round_on_diagonal_quadratics_is_the_joint_optimum():
    curvatures, optima = randn(3, 6, seed=4).exp(), randn(3, 6, seed=5)
    weights = COUNTS[:, None] * curvatures
    joint = (weights * optima).sum(0) / weights.sum(0)
    assert_close(merged(Laplace(optima, curvatures)).mean, joint)


def run(method):
    inputs = one_of(stacked_inputs(FOLA()), 0)
    received = (
        inputs.received.mean
        if isinstance(method, FedAvg | FedProx)
        else inputs.received._replace(precision=torch.ones_like(inputs.received.precision))
    )
    return client_round(method, model_for(method), (), received, inputs.shard, inputs.steps)[1]


def test_training_is_fedavg_or_fedprox_with_one_precision_for_all():
    assert torch.equal(run(FOLA(eta=0.1, prior_weight=0.0)).mean, run(FedAvg(eta=0.1)))
    assert_close(run(FOLA(eta=0.1, prior_weight=0.5)).mean, run(FedProx(eta=0.1, prox=0.5)), rtol=0, atol=1e-15)


def test_accumulated_precision_counts_the_same_data_again():
    def precision(rounds, **fields):
        server = trained(FOLA(eta=0.0, **fields), rounds).servers[0]
        return float(server.precision.sum())

    assert precision(6, accumulate=True) > 4 * precision(1, accumulate=True)
    assert precision(6) < 2 * precision(1)


def test_weights_without_curvature_have_the_floor_and_the_prior_bounds_widths():
    ours = trained(FOLA(), 1)
    assert (ours.servers[0].precision >= 1e-8).all()
    q = FOLA(prior_sigma=0.3).posterior(ours.servers[0])
    assert (q.sigma < 0.3).all()
    examples = ours.servers[0].size * 5
    assert_close(q.sigma.pow(-2), examples * ours.servers[0].precision + 0.3**-2)


def test_fisher_is_collected_at_the_iterates_of_a_round():
    method = FOLA(eta=0.0)
    inputs = one_of(stacked_inputs(method), 0)
    _, upload = client_round(method, model_for(method), *inputs)
    each = [model_for(method).fisher(inputs.received.mean, batches[0], noise) for batches, noise in inputs.steps]
    assert_close(upload.precision, (sum(each) / len(each)).clamp(min=1e-8))
    assert same_bits(upload.mean, inputs.received.mean)


def test_it_learns():
    start, after = trained(FOLA(), 0), trained(FOLA(eta=0.2), 12)
    nll = [each.evaluate(samples=4)["shared"]["mean"]["nll"][0] for each in (start, after)]
    assert sum(nll[1]) < sum(nll[0])
    assert difference(start.servers, after.servers) > 0
