import dataclasses

import pytest
import torch
from torch.testing import assert_close

from federations import TRAINING, difference, randn, trained
from pfedbayes.errors import UserError
from pfedbayes.maths.gaussian import barycentre
from pfedbayes.methods import FedAvg, FedBE
from pfedbayes.methods.base import weights_posterior
from pfedbayes.methods.fedbe import Server

UPLOADS, COUNTS = randn(4, 9, seed=1), torch.tensor([1.0, 2.0, 3.0, 10.0]).double()
EMPTY = Server(randn(9), torch.zeros(9).double(), randn(1, 9))


def merged(uploads=UPLOADS, **fields):
    return FedBE(**fields).aggregate(EMPTY, uploads, COUNTS[: len(uploads)], torch.arange(len(uploads)))


def test_the_gaussian_of_the_uploads():
    server, shares = merged(), COUNTS / COUNTS.sum()
    mean = sum(s * upload for s, upload in zip(shares, UPLOADS, strict=True))
    variance = sum(s * (upload - mean).square() for s, upload in zip(shares, UPLOADS, strict=True))
    assert_close(server.mean, mean)
    q = FedBE(scale=2.0).posterior(server)
    assert_close(q.sigma, 2 * variance.sqrt())


def test_its_variance_is_the_spread_in_the_barycentre():
    narrow = torch.stack([UPLOADS, torch.full_like(UPLOADS, -40.0)], 1)  # sigma is practically 0
    mean, rho = barycentre(narrow, COUNTS)
    q = FedBE().posterior(merged())
    assert_close(torch.nn.functional.softplus(rho), q.sigma)
    assert_close(mean, q.mu)


@pytest.mark.parametrize("teacher", ["gaussian", "dirichlet", "clients"])
def test_equal_uploads_leave_one_network(teacher):
    server = merged(UPLOADS[:1].expand(3, -1))
    networks = FedBE(teacher=teacher).networks(server, randn(6, 9))
    assert_close(networks, UPLOADS[:1].expand(6, -1))


def test_draws_have_the_moments_of_the_teacher():
    server, noise = merged(), randn(20_000, 9)
    q, drawn = FedBE().posterior(server), FedBE().networks(server, noise)
    assert ((drawn.mean(0) - q.mu) / q.sigma).abs().max() < 0.04
    assert (drawn.std(0) / q.sigma - 1).abs().max() < 0.03
    combined = FedBE(teacher="dirichlet").networks(server, noise)
    assert_close(combined.mean(0), UPLOADS.mean(0), rtol=0, atol=0.03)
    # The variance of Dirichlet(1, ..., 1) over S: that of the uploads / (S + 1).
    assert (combined.var(0) / (UPLOADS.var(0, correction=0) / 5) - 1).abs().max() < 0.06
    assert (combined <= UPLOADS.max(0).values).all()
    assert (combined >= UPLOADS.min(0).values).all()


def test_clients_take_turns_after_the_mean():
    server = merged()
    networks = FedBE(teacher="clients").networks(server, randn(7, 9))
    assert torch.equal(networks[0], server.mean)
    assert torch.equal(networks[1:5], UPLOADS)
    assert torch.equal(networks[5], server.mean)


def test_training_is_fedavg_and_one_client_has_no_spread():
    ours, fedavg = trained(FedBE(eta=0.1)), trained(FedAvg(eta=0.1))
    assert torch.equal(ours.servers[0].mean, fedavg.servers[0])
    assert_close(ours.predict("shared", 0, randn(4, 3), None), fedavg.predict("shared", 0, randn(4, 3), None))
    alone = trained(FedBE(), training=dataclasses.replace(TRAINING, participants=1))
    assert not alone.servers[0].variance.any()


def test_other_ensembles_have_no_distribution_over_weights():
    method = FedBE(teacher="dirichlet")
    with pytest.raises(UserError, match="FedBE has no distribution"):
        weights_posterior(method, merged())
    ours = trained(method)
    x = randn(4, 3)
    assert difference(ours.predict("shared", 0, x, 3)[0], ours.predict("shared", 0, x, 3)[1]) > 0
