"""Gaussians over weights, and clients that hold them."""

import torch
from torch.distributions import Normal
from torch.nn.functional import softplus

from federations import make_model, randn
from pfedbayes.engine.backend.local_training import client_round
from pfedbayes.maths.optim import adam_init
from pfedbayes.methods.pfedbayes import Client


def as_normal(v):
    return Normal(v[0], softplus(v[1]))


def random_v(num_params, seed, rho=-1.0):
    return torch.stack([randn(num_params, seed=seed), rho + 0.5 * randn(num_params, seed=seed + 1)])


def new_client(q):
    return Client(q, adam_init(q), adam_init(q))


def run(method, inputs, model=None):
    return client_round(method, model or make_model(), *inputs)
