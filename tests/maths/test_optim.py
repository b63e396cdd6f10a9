import pytest
import torch
from torch.testing import assert_close

from pfedbayes.maths import optim
from pfedbayes.maths.optim import Adam, adam, adam_init, adam_of, momentum, momentum_init, sgd, without_fused_adam


def gradients(steps: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Both signs, magnitudes from 1e-6 to 1e3, and one coordinate that is never touched."""
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(steps, *shape, generator=generator, dtype=torch.float64)
    scale = torch.logspace(-6, 3, shape[-1], dtype=torch.float64)
    scale[0] = 0
    return (signal * scale).to(dtype)


def start(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def run_adam(theta: torch.Tensor, grads: torch.Tensor, rate: float, reuse: bool = False) -> tuple[torch.Tensor, Adam]:
    theta, state = theta.clone(), adam_init(theta)
    for grad in grads:
        theta, state = step_adam(theta, grad, state, rate, reuse)
    return theta, state


def step_adam(theta, grad, state, rate, reuse):
    if not reuse:
        return adam(theta, grad, state, rate)
    alone = Adam((state.mean,), (state.square,), state.mean_weight, state.square_weight)
    (moved,), after = adam_of((theta,), (grad,), alone, rate, reuse=True)
    return moved, Adam(after.mean[0], after.square[0], after.mean_weight, after.square_weight)


def run_torch(optimizer: type[torch.optim.Optimizer], theta, grads, rate, **settings) -> torch.Tensor:
    parameter = torch.nn.Parameter(theta.clone())
    optimiser = optimizer([parameter], lr=rate, **settings)
    for grad in grads:
        parameter.grad = grad.clone()
        optimiser.step()
    return parameter.detach()


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_adam_agrees_with_torch_over_fifty_steps(dtype, rtol, reuse):
    theta, grads = start(2, 30, dtype=dtype), gradients(50, 2, 30, dtype=dtype)
    expected = run_torch(torch.optim.Adam, theta, grads, 0.001)
    assert (expected - theta).abs().max() > 0.005  # it has moved
    assert_close(run_adam(theta, grads, 0.001, reuse)[0], expected, rtol=rtol, atol=rtol)


def test_sgd_agrees_with_torch():
    theta, grads = start(30), gradients(5, 30)
    ours = theta
    for grad in grads:
        ours = sgd(ours, grad, 0.1)
    assert_close(ours, run_torch(torch.optim.SGD, theta, grads, 0.1), rtol=1e-14, atol=1e-14)


def test_momentum_agrees_with_torch():
    theta, grads = start(30), gradients(20, 30)
    ours, state = theta, momentum_init(theta)
    for grad in grads:
        ours, state = momentum(ours, grad, state, 0.1, decay=0.8)
    assert_close(ours, run_torch(torch.optim.SGD, theta, grads, 0.1, momentum=0.8), rtol=1e-13, atol=1e-13)


def test_first_adam_step_has_the_size_of_the_rate():
    grad = torch.tensor([3.0, -0.2, 1e3], dtype=torch.float64)
    moved, state = adam(torch.zeros(3, dtype=torch.float64), grad, adam_init(grad), 0.01)
    assert_close(moved, -0.01 * grad.sign(), rtol=1e-6, atol=0)
    assert_close(state.mean_weight, torch.tensor(0.1, dtype=torch.float64))


def test_adam_leaves_coordinates_without_gradient_alone():
    theta, grads = start(30), gradients(20, 30)
    assert torch.equal(run_adam(theta, grads, 0.01)[0][0], theta[0])


def test_adam_does_not_see_the_scale_of_the_gradient():
    theta, grads = start(10), gradients(20, 10)[..., 5:].repeat(1, 2)
    assert_close(run_adam(theta, grads, 0.01)[0], run_adam(theta, 1000 * grads, 0.01)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("pasts", [(0, 4, 9), (4, 4, 9)])
@pytest.mark.parametrize("reuse", [False, True])
def test_adam_maps_over_clients_with_different_pasts(reuse, pasts):
    thetas, grads = start(3, 8), gradients(10, 3, 8)
    alone = [run_adam(theta, grads[:past, k], 0.01) for k, (theta, past) in enumerate(zip(thetas, pasts, strict=True))]
    stacked = torch.stack([theta for theta, _ in alone])
    states = Adam(*(torch.stack(leaf) for leaf in zip(*(state for _, state in alone), strict=True)))
    together, after = torch.func.vmap(lambda theta, grad, state: step_adam(theta, grad, state, 0.01, reuse))(
        stacked, grads[-1], states
    )
    for k, (theta, state) in enumerate(alone):
        assert_close(together[k], adam(theta, grads[-1, k], state, 0.01)[0])
    assert_close(after.mean_weight, 1 - 0.9 ** (1.0 + torch.tensor(pasts, dtype=torch.float64)))


def test_adam_takes_over_what_is_not_needed_any_more():
    theta, (grad, past) = start(8), gradients(2, 8)
    _, state = adam(theta, past, adam_init(theta), 0.1)
    expected = adam(theta, grad, state, 0.1)
    with without_fused_adam():  # as a compiler sees it: nothing is changed
        assert step_adam(theta, grad, state, 0.1, True)[0] is not theta
        assert_close(theta, start(8), rtol=0, atol=0)
    moved, after = step_adam(theta, grad, state, 0.1, True)
    assert moved is theta
    assert after.mean is state.mean
    assert after.square is state.square
    assert_close((moved, *after), (expected[0], *expected[1]))


@pytest.mark.parametrize(("pasts", "passes"), [((4, 4, 4), 1), ((0, 4, 4), 3)])
def test_clients_with_the_same_past_are_moved_in_one_pass(monkeypatch, pasts, passes):
    calls, step = [], optim.fused_adam
    monkeypatch.setattr(optim, "fused_adam", lambda **settings: calls.append(1) or step(**settings))
    thetas, grads = start(3, 8), gradients(5, 3, 8)
    states = [run_adam(thetas[k], grads[:past, k], 0.01)[1] for k, past in enumerate(pasts)]
    stacked = Adam(*(torch.stack(leaf) for leaf in zip(*states, strict=True)))
    torch.func.vmap(lambda theta, grad, state: step_adam(theta, grad, state, 0.01, True))(thetas, grads[-1], stacked)
    assert len(calls) == passes


def test_adam_in_place_refuses_a_gradient_of_another_shape():
    thetas, grad = start(3, 8), gradients(1, 8)[0]
    with pytest.raises(ValueError, match="one shape"):
        torch.func.vmap(lambda theta: step_adam(theta, grad, adam_init(theta), 0.1, True))(thetas)


def test_optimisers_leave_their_arguments_alone():
    theta, (grad, past) = start(8), gradients(2, 8)
    _, state = adam(theta, past, adam_init(theta), 0.1)
    arguments = [theta, grad, *state]
    copies = [argument.clone() for argument in arguments]
    adam(theta, grad, state, 0.1)
    sgd(theta, grad, 0.1)
    assert all(torch.equal(argument, copy) for argument, copy in zip(arguments, copies, strict=True))
