"""Algorithm 1 of the paper as plain loops: read it beside the paper. The package is tested against it.

It loops over clients, steps and weight draws. torch.distributions gives the objectives, autograd their gradients, and
torch.optim.Adam updates both models. It imports nothing from the package.

    python examples/naive_pfedbayes.py

The letters are the paper's:

- v = (mu, rho), (2, T): a Gaussian over the T weights, with sigma = log(1 + exp(rho))
- v_w: a client's copy of the shared Gaussian (the localized global model)
- g: standard normal noise; K: weight draws per step; zeta: weight of the KL term
- n: examples of a client; b: examples of a batch; R: local steps; S: clients averaged per round
- beta: mixing of the server; eta_1, eta_2: learning rates of v and v_w
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, one_hot, softplus

Step = tuple[Tensor, Tensor, Tensor]  # a batch x (b, ...), y (b,) and the noise g (K, T)


def q(v: Tensor) -> Normal:
    """Return the distribution of the weights: independent, theta_m ~ N(mu_m, sigma_m^2)."""
    mu, rho = v
    return Normal(mu, softplus(rho))


def h(v: Tensor, g: Tensor) -> Tensor:
    """Return the weights theta = mu + log(1 + exp(rho)) g, Eq. (26)."""
    mu, rho = v
    return mu + softplus(rho) * g


def network(module: nn.Module, theta: Tensor, x: Tensor) -> Tensor:
    """Return the outputs of the module with the weights theta (T,)."""
    parts = torch.split_with_sizes(theta, [weight.numel() for weight in module.parameters()])
    weights = {name: part.view_as(w) for (name, w), part in zip(module.named_parameters(), parts, strict=True)}
    return torch.func.functional_call(module, weights, (x,))


def omega(module: nn.Module, v: Tensor, v_w: Tensor, step: Step, n: int, zeta: float) -> Tensor:
    """Return -(n/b) (1/K) sum_j sum_k log p_{h(v, g_k)}(D_j) + zeta KL(q_v || w), Eq. (27)."""
    x, y, g = step
    minus_log_p = sum(cross_entropy(network(module, h(v, g_k), x), y, reduction="sum") for g_k in g)
    return (n / len(y)) * (1 / len(g)) * minus_log_p + zeta * kl_divergence(q(v), q(v_w.detach())).sum()


def omega_w(v: Tensor, v_w: Tensor) -> Tensor:
    """Return KL(q_v || w), Eq. (28), as a function of the localized global model."""
    return kl_divergence(q(v.detach()), q(v_w)).sum()


class Client:
    """What a client keeps between rounds: its model v, memory for v_w, and the Adam states of both."""

    def __init__(self, v: Tensor, n: int, eta_1: float, eta_2: float) -> None:
        self.n = n
        self.v, self.v_w = v.clone().requires_grad_(), v.clone().requires_grad_()
        self.adam, self.adam_w = torch.optim.Adam([self.v], lr=eta_1), torch.optim.Adam([self.v_w], lr=eta_2)

    def update(self, module: nn.Module, v: Tensor, steps: Iterable[Step], zeta: float) -> Tensor:
        """Run ClientUpdate(i, v^t): from v_w = v^t, R times a step on Omega for v and one on Omega_w for v_w."""
        self.v_w.data.copy_(v)
        for step in steps:
            self.adam.zero_grad()
            omega(module, self.v, self.v_w, step, self.n, zeta).backward()
            self.adam.step()
            self.adam_w.zero_grad()
            omega_w(self.v, self.v_w).backward()
            self.adam_w.step()
        return self.v_w.detach().clone()


def algorithm_1(
    module: nn.Module,
    v: Tensor,
    sizes: Sequence[int],
    draw: Callable[[int, int, int], Step],
    choose: Callable[[int], Sequence[int]],
    R: int,  # noqa: N803
    zeta: float = 10.0,
    eta_1: float = 0.001,
    eta_2: float = 0.001,
    beta: float = 1.0,
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield the shared v and the clients' v after each round.

    draw(i, t, r) returns batch and noise of client i in round t = 1, 2, ... at step r. choose(t) returns the set S^t.
    """
    clients = [Client(v, n, eta_1, eta_2) for n in sizes]
    for t in count(1):
        uploads = []
        for i, client in enumerate(clients):  # all N clients train ...
            steps = (draw(i, t, r) for r in range(R))
            uploads.append(client.update(module, v, steps, zeta))
        chosen = choose(t)  # ... and S of them are averaged
        v = (1 - beta) * v + beta / len(chosen) * sum(uploads[i] for i in chosen)
        yield v, [client.v.detach().clone() for client in clients]


def accuracy(module: nn.Module, v: Tensor, x: Tensor, y: Tensor) -> float:
    """Return the accuracy in percent of the prediction averaged over ten weight draws."""
    outputs = [network(module, h(v, torch.randn(v.shape[1])), x).softmax(-1) for _ in range(10)]
    return 100 * float((sum(outputs).argmax(-1) == y).float().mean())


def main() -> None:
    """Train six clients: the even ones hold the classes 0-2, the odd ones 3-5, which look much like 0-2."""
    torch.manual_seed(1)
    sizes, R, K, b = [30, 60, 90, 120, 60, 90], 20, 1, 20  # noqa: N806
    module = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 6))
    labels = [torch.randint(3, (n + 200,)) + 3 * (i % 2) for i, n in enumerate(sizes)]
    data = [(3 * one_hot(y % 3, 6) + one_hot(y, 6) + torch.randn(len(y), 6), y) for y in labels]
    tests = [(x[n:], y[n:]) for n, (x, y) in zip(sizes, data, strict=True)]
    num_weights = sum(weight.numel() for weight in module.parameters())
    v_0 = torch.stack([0.1 * torch.randn(num_weights), torch.full((num_weights,), -2.5)])

    def draw(i: int, t: int, r: int) -> Step:
        x, y = data[i]
        rows = torch.randperm(sizes[i])[:b]
        return x[rows], y[rows], torch.randn(K, num_weights)

    rounds = algorithm_1(module, v_0, sizes, draw, lambda t: range(6), R, zeta=1.0, eta_1=0.01, eta_2=0.01)
    for t, (v, v_clients) in zip(range(1, 11), rounds, strict=False):
        personal = sum(accuracy(module, v_i, *test) for v_i, test in zip(v_clients, tests, strict=True)) / 6
        shared = sum(accuracy(module, v, *test) for test in tests) / 6
        print(f"round {t:2}  personal model {personal:5.1f} %  shared model {shared:5.1f} %")


if __name__ == "__main__":
    main()
