"""Small networks, and what the server makes of them."""

import itertools

import torch

from federations import make_model, randn
from pfedbayes.methods.bnfed import BNFed, ModelAndLabels
from pfedbayes.nets import mlp

FLAT = {"sigma02": 1e12}  # a prior that says nothing
FORCED = {"gamma": 1e-300}  # no new units if it can be avoided
DEPTHS = {"one": [3, 4, 3], "two": [3, 5, 4, 3], "three": [3, 4, 6, 5, 3]}
ONE = DEPTHS["one"]


def small_model(sizes):
    return make_model(mlp(sizes, "tanh"))


def net_of(sizes):
    return small_model(sizes).net


def layers_of(theta, sizes):
    """Parameters of one flat network, cut by hand: [(W, b), ...]."""
    layers, start = [], 0
    for below, above in itertools.pairwise(sizes):
        weight = theta[start : start + above * below].view(above, below)
        start += above * below
        layers.append((weight, theta[start : start + above]))
        start += above
    return layers


def flat(layers):
    return torch.cat([part.flatten() for layer in layers for part in layer])


def permuted(theta, sizes, orders):
    """The same function with the units of each hidden layer in another order."""
    layers = layers_of(theta, sizes)
    for k, order in enumerate(orders):
        (weight, bias), (above, above_bias) = layers[k], layers[k + 1]
        layers[k], layers[k + 1] = (weight[order], bias[order]), (above[:, order], above_bias)
    return flat(layers)


def random_orders(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(width, generator=generator) for width in sizes[1:-1]]


def random_thetas(count, sizes, seed=0, scale=1.0):
    return scale * randn(count, small_model(sizes).net.num_params, seed=seed)


def some_labels(count, classes=3):
    return torch.randint(1, 30, (count, classes), generator=torch.Generator().manual_seed(9))


def merge(method, thetas, sizes=ONE, labels=None, server=None):
    """The server after a round in which the clients sent these networks."""
    server = server or method.init(thetas[0], len(thetas), net_of(sizes))
    labels = some_labels(len(thetas)) if labels is None else labels
    return method.aggregate(server, ModelAndLabels(thetas, labels), torch.ones(len(thetas)), torch.arange(len(thetas)))


def widths(server):
    return [len(bias) for bias in server.biases[:-1]]


def outputs(server, sizes, x):
    return BNFed().predict(small_model(sizes), server, x, None)[0]


def random_assignments(num_clients, width, known, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(known, generator=generator)[:width] for _ in range(num_clients)])
