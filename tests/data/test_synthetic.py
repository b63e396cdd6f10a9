import numpy as np
import pytest
import torch

from pfedbayes.data.synthetic import make_blobs, make_regression


def test_blobs_scatter_around_their_means() -> None:
    pool = make_blobs(per_class=2000, classes=3, features=2, noise=0.5, seed=4)
    assert pool.x.dtype == torch.float32
    assert pool.y.bincount().tolist() == [2000, 2000, 2000]
    for label in range(3):
        of_label = pool.x[pool.y == label]
        assert torch.allclose(of_label.std(0), torch.tensor(0.5), atol=0.03)


def test_regression_noise_has_the_given_deviation() -> None:
    """The same seed without noise gives f^i(x), so the difference is the noise of Eq. (1)."""
    noisy = make_regression(clients=4, examples=5000, features=3, noise=0.2, seed=4)
    exact = make_regression(clients=4, examples=5000, features=3, noise=0.0, seed=4)
    assert torch.equal(noisy.x, exact.x)
    assert noisy.y.shape == (20_000, 1)
    assert noisy.y.dtype == noisy.x.dtype == torch.float32
    assert noisy.num_classes is None
    assert abs(float((noisy.y - exact.y).std()) - 0.2) < 0.005


def test_client_functions_differ_a_little() -> None:
    """With a^i = a + 0.3 g^i the mean squares of f^1 - f^2 and f^1 are as 2 * 0.09 to 1.09, about 0.165."""
    grid, apart, square = np.linspace(-0.9, 0.9, 50), [], []
    for seed in range(100):
        pool = make_regression(clients=2, examples=500, features=1, noise=0.0, seed=seed)
        order = pool.x.reshape(2, -1).argsort(1)
        x, y = (values.reshape(2, -1).gather(1, order).numpy() for values in (pool.x, pool.y))
        first, second = (np.interp(grid, x[i], y[i]) for i in range(2))
        apart.append(np.mean((first - second) ** 2))
        square.append(np.mean(first**2))
    assert np.mean(apart) / np.mean(square) == pytest.approx(0.165, rel=0.4)
