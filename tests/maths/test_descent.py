import pytest
import torch
from torch.testing import assert_close

from federations import randn, same_bits
from pfedbayes.maths.descent import descend, join_rows, split_rows
from pfedbayes.maths.gaussian import MeanField, grad_in_rho, sigma
from pfedbayes.maths.optim import Adam, adam, adam_init

V = torch.stack([randn(7, seed=1), randn(7, seed=2) - 1])
GRADS = [MeanField(randn(7, seed=3 + k), randn(7, seed=9 + k)) for k in range(3)]


def in_v(grad, v):
    return torch.stack([grad.mu, grad_in_rho(grad.sigma, v[1])])


def test_join_rows_is_the_inverse_of_split_rows():
    state = Adam(randn(2, 7, seed=20), randn(2, 7, seed=21), torch.tensor(0.1), torch.tensor(0.2))
    assert same_bits(join_rows(split_rows(V, state)), (V, state))


def test_adam_moves_the_rows_as_it_moves_v():
    moving, v, state = split_rows(V, adam_init(V)), V, adam_init(V)
    for grad in GRADS:
        v, state = adam(v, in_v(grad, v), state, 0.1)
        moving = descend(moving, grad, 0.1)
        assert_close(moving.sigma, sigma(v[1]))
    assert_close(join_rows(moving), (v, state))


def test_adam_overwrites_the_memory_of_what_moves():
    moving = split_rows(V, adam_init(V))
    after = descend(moving, GRADS[0], 0.1)
    assert after.mu is moving.mu
    assert after.rho is moving.rho


def test_sgd_is_a_plain_step():
    moving = descend(split_rows(V, adam_init(V)), GRADS[0], 0.1, "sgd")
    moved, state = join_rows(moving)
    assert_close(moved, V - 0.1 * in_v(GRADS[0], V))
    assert same_bits(state, adam_init(V))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_steps_leave_what_was_split_alone(optimizer):
    v, state = V.clone(), adam_init(V)
    descend(split_rows(v, state), GRADS[0], 0.1, optimizer)
    assert same_bits((v, state), (V, adam_init(V)))
