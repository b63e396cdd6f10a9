"""A method with many settings at once keeps them apart, and knows which of them have diverged."""

import pytest
import torch

from pfedbayes.methods import FedAvg, FedProx, PFedGP
from pfedbayes.methods.varied import TaggedUpload, varied

METHODS = [FedAvg(eta=0.1), FedAvg(eta=0.2)]


def test_a_setting_has_diverged_as_soon_as_one_of_its_clients_has():
    together, sizes, clients = varied(METHODS), torch.ones(3), torch.arange(3)
    server = together.tagged(METHODS[1], torch.zeros(2))
    uploads = TaggedUpload(torch.zeros(3), torch.tensor([[1.0, 2.0]] * 3))
    fine = together.aggregate(server, uploads, sizes, clients)
    assert (fine.diverged.item(), fine.values.item()) == (0.0, pytest.approx(0.2))
    assert fine.state.tolist() == [1.0, 2.0]
    after = together.aggregate(server, uploads._replace(diverged=torch.tensor([0.0, 1.0, 0.0])), sizes, clients)
    assert after.diverged.item() == 1.0
    assert together.aggregate(after, uploads, sizes, clients).diverged.item() == 1.0  # for good


def test_every_client_receives_the_values_of_its_setting():
    together = varied(METHODS)
    server = together.tagged(METHODS[1], torch.tensor([1.0, 2.0]))
    received = together.download(server._replace(diverged=torch.ones(())), torch.arange(3))
    assert received.values.tolist() == [[pytest.approx(0.2)]] * 3
    assert received.diverged.tolist() == [1.0] * 3
    assert received.state.tolist() == [[1.0, 2.0]] * 3


def test_what_varies_is_named():
    assert varied(METHODS).names == ("eta",)
    assert varied([FedProx(eta=0.1, prox=0.1), FedProx(eta=0.1, prox=0.2), FedProx(eta=0.1, prox=0.1)]).names == (
        "prox",
    )
    assert varied([FedAvg(eta=0.1)]).names == ()
    assert varied([FedProx(eta=0.1, prox=0.0), FedProx(eta=0.2, prox=0.0)]).names == ("eta",)
    for first, second in ((0.0, 0.1), (0.1, 0.0)):
        with pytest.raises(ValueError, match="prox is 0 in one setting"):
            varied([FedProx(prox=first), FedProx(prox=second)])
    with pytest.raises(ValueError, match="decides by its hyper-parameters on the host"):
        varied([PFedGP()])
