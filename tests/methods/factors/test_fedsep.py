import torch
from conjugate import SIZES, federate, problem, solved_by_tilting
from torch.testing import assert_close

from pfedbayes.maths.trees import pick
from pfedbayes.methods import FedSEP

METHOD = FedSEP()


def change_at_the_best_mean_field_posterior(data):
    """Return q and the change of a round that starts there, both as (2, d) naturals."""
    server = METHOD.init(torch.zeros(4).double(), len(SIZES), None)
    precision = data.precision.diagonal()
    q = torch.stack([precision * data.mean, precision])
    sizes = torch.tensor([len(rows) for rows in data.x]).double().mean()
    server = server._replace(product=server.product._replace(q=q), size=sizes)
    after, clients = federate(METHOD, data, 1, solved_by_tilting, server=server)
    assert set(clients.values()) == {()}
    return q, after.product.q - q


def test_it_is_exact_if_all_clients_have_the_same_data():
    q, change = change_at_the_best_mean_field_posterior(problem(same=True))
    assert float((change / q).abs().max()) < 1e-12


def test_its_mean_is_not_exact_if_they_differ():
    q, change = change_at_the_best_mean_field_posterior(problem())
    assert float((change[0] / q[1]).abs().max()) > 0.001
    # Precisions add up all the same: those of the data enter once.
    assert_close(change[1], torch.zeros_like(q[1]), rtol=0, atol=1e-10)


def test_a_client_divides_out_its_share_by_size():
    server = METHOD.init(torch.zeros(4).double(), 5, None)
    first = pick(METHOD.download(server, torch.arange(5)), 0)
    server = METHOD.aggregate(server, torch.rand(2, 2, 4).double(), torch.tensor([10.0, 30.0]), torch.arange(2))
    received = pick(METHOD.download(server, torch.arange(5)), 0)
    prior = METHOD._prior(torch.zeros(4).double())
    for got, size, share in ((first, 7.0, 1 / 5), (received, 60.0, 60 / (5 * 20))):
        shard = type("Shard", (), {"size": torch.tensor(size).double()})
        local = METHOD.begin((), got, shard)
        assert_close(local.tilted.cavity, got.q.q - share * (got.q.q - prior))
    assert len(SIZES) == 5
