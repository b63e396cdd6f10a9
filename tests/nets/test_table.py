"""The network for tables: its function, its blocks, and the moments of its outputs."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import silu
from torch.testing import assert_close

from federations import randn
from pfedbayes.maths.counts import NegativeBinomial
from pfedbayes.maths.likelihoods import Classification, Gaussian, StudentT
from pfedbayes.maths.ordinal import Ordinal
from pfedbayes.nets import Batch, Model, Net, TableNet, mlp
from pfedbayes.nets.zoo import cnn

PLAIN, PIECES = 2, 3
X = randn(6, PLAIN + PIECES, seed=1)
SHAPES = {
    "one logit": {"outputs": 1, "reference": True},
    "three logits": {"outputs": 3},
    "student": {"outputs": 2, "constants": 2},
}
WIDTHS = [0, 4]


@pytest.fixture(params=itertools.product(SHAPES, WIDTHS), ids=str)
def net(request):
    name, width = request.param
    return Net(TableNet(PLAIN, PIECES, width, **SHAPES[name]))


def parts(net, theta):
    """Return the parameters by name."""
    return {name: part.double() for name, part in net.module(theta).named_parameters()}


def formula(net, theta):
    """Return f(x, z) = b + W x + Z z + U silu(V x + c) with the reference before and the constants behind."""
    table, named = net.module(theta), parts(net, theta)
    rows = []
    for row in X:
        x = row
        if table.hidden is not None:
            x = torch.cat([row, silu(named["hidden.weight"] @ row[:PLAIN] + named["hidden.bias"])])
        outputs = list(named["head.weight"] @ x + named["head.bias"])
        reference = [torch.zeros((), dtype=torch.float64)] * table.reference
        rows.append(torch.stack([*reference, *outputs, *named.get("constants", torch.empty(0))]))
    return torch.stack(rows)


def test_the_network_is_its_formula(net):
    theta = randn(net.num_params, seed=2)
    assert_close(net(theta, X), formula(net, theta))
    assert net(theta, X).shape == (6, net.num_outputs)


def test_the_untrained_network_predicts_the_same_for_every_input(net):
    outputs = net(net.init(0, "torch").double(), X)
    assert not outputs.any()


def test_hidden_weights_start_with_variance_one_over_inputs():
    net = Net(TableNet(25, 0, 4000, 1))
    hidden = parts(net, net.init(0, "torch"))["hidden.weight"]
    assert float(hidden.std()) == pytest.approx(1 / 5, rel=0.01)


def test_stacked_networks_are_single_networks(net):
    thetas = randn(3, net.num_params, seed=3)
    expected = torch.stack([net(theta, X) for theta in thetas])
    assert_close(net.stacked(thetas, X), expected)
    model = Model(net, Classification())
    assert_close(model.stacked_outputs(thetas, X), expected)
    assert_close(model._replace(half=True).stacked_outputs(thetas, X), expected, rtol=0.1, atol=0.1)


def test_only_tables_are_stacked():
    model = Model(Net(mlp([5, 4, 2])), Classification())
    thetas = randn(3, model.net.num_params, seed=3)
    assert model.net.stacked(thetas, X) is None
    assert_close(model.stacked_outputs(thetas, X), torch.stack([model.net(theta, X) for theta in thetas]))


def test_moments_are_those_of_sampled_networks(net):
    mean, variance = 0.5 * randn(net.num_params, seed=4), randn(net.num_params, seed=5).square()
    count = 40_000
    draws = net.stacked(mean + variance.sqrt() * randn(count, net.num_params, seed=6), X)
    noise = randn(count, 1, net.num_units, seed=7).expand(count, 6, -1)
    means, variances = torch.func.vmap(lambda each: net.moments(mean, variance, X, each))(noise)
    # The law of total variance, over the sampled hidden units.
    spread = variances.mean(0) + means.var(0)
    error = (spread / count).sqrt()
    assert ((means.mean(0) - draws.mean(0)).abs() <= 6 * error).all()
    assert_close(spread, draws.var(0), rtol=0.1, atol=0)


def test_without_a_hidden_layer_the_moments_are_exact():
    net = Net(TableNet(PLAIN, PIECES, 0, 2))
    mean, variance = randn(net.num_params, seed=4), randn(net.num_params, seed=5).square()
    means, variances = net.moments(mean, variance, X, torch.empty(6, 0))
    (weight, bias), (spread, around) = ((each[:10].view(2, 5), each[10:]) for each in (mean, variance))
    assert_close(means, X @ weight.T + bias)
    assert_close(variances, X.square() @ spread.T + around)
    assert net.num_units == 0


def test_units_without_variance_have_a_finite_gradient():
    net = Net(TableNet(PLAIN, PIECES, 4, 1))
    theta, x = randn(net.num_params, seed=2), torch.zeros(1, 5, dtype=torch.float64)
    noise = randn(1, 4, seed=3)

    def total(variance):
        means, variances = net.moments(theta, variance, x, noise)
        return means.sum() + variances.sum()

    assert torch.func.grad(total)(torch.zeros_like(theta)).isfinite().all()


def test_other_networks_sample_their_weights():
    net = Net(mlp([5, 4, 2]))
    mean, variance, noise = randn(net.num_params, seed=4), randn(net.num_params, seed=5).square(), randn(net.num_params)
    outputs, variances = net.moments(mean, variance, X, noise)
    assert_close(outputs, net(mean + variance.sqrt() * noise, X))
    assert not variances.any()
    assert net.num_units is None
    assert net.num_outputs == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_features_of_a_table_are_the_inputs_of_its_head(width):
    net = Net(TableNet(PLAIN, PIECES, width, 3))
    theta = randn(net.num_params, seed=2)
    features, named = net.features(theta, X), parts(net, theta)
    assert features.shape == (6, PLAIN + PIECES + width)
    assert_close(features @ named["head.weight"].T + named["head.bias"], net(theta, X))
    assert net.head_size == named["head.weight"].numel() + 3


class TestBlocks:
    def blocks_by_name(self, net):
        number, fan_in = net.blocks()
        assert len(fan_in) == int(number.max()) + 1
        sizes = [math.prod(shape) for shape in net.shapes]
        names = [name for name, _ in net.module(torch.zeros(net.num_params)).named_parameters()]
        named = zip(names, number.split(sizes), net.shapes, strict=True)
        return {name: part.view(shape).tolist() for name, part, shape in named}, fan_in.tolist()

    def test_of_a_classifying_table(self):
        number, fan_in = self.blocks_by_name(Net(TableNet(2, 1, 3, 2)))
        assert number["hidden.weight"] == [[0, 0]] * 3
        assert number["hidden.bias"] == [1, 1, 1]
        assert number["head.weight"] == [[2, 2, 3, 4, 4, 4]] * 2
        assert number["head.bias"] == [5, 5]
        assert fan_in == [2, 1, 2, 1, 3, 1]

    def test_of_a_regression_each_output_has_its_own(self):
        number, fan_in = self.blocks_by_name(Net(TableNet(2, 1, 3, 2, constants=2)))
        assert number["constants"] == [0, 1]
        assert number["hidden.weight"] == [[2, 2]] * 3
        assert number["head.weight"] == [[4, 4, 5, 6, 6, 6], [7, 7, 8, 9, 9, 9]]
        assert number["head.bias"] == [10, 11]
        assert fan_in == [1, 1, 2, 1, 2, 1, 3, 2, 1, 3, 1, 1]

    def test_without_a_hidden_layer(self):
        number, fan_in = self.blocks_by_name(Net(TableNet(2, 1, 0, 2)))
        assert number == {"head.weight": [[0, 0, 1]] * 2, "head.bias": [2, 2]}
        assert fan_in == [2, 1, 1]

    def test_without_pieces_no_number_is_skipped_in_fan_in(self):
        _, fan_in = self.blocks_by_name(Net(TableNet(2, 0, 3, 2)))
        assert fan_in[-2:] == [3, 1]

    @pytest.mark.parametrize(
        ("module", "fans"), [(mlp([5, 4, 2]), [5, 1, 4, 1]), (cnn((1, 8, 8), 3), None)], ids=["mlp", "cnn"]
    )
    def test_of_other_networks_are_their_parameters(self, module, fans):
        net = Net(module)
        number, fan_in = net.blocks()
        sizes = [math.prod(shape) for shape in net.shapes]
        assert number.tolist() == [k for k, size in enumerate(sizes) for _ in range(size)]
        inputs = [math.prod(shape[1:]) if len(shape) > 1 else 1 for shape in net.shapes]
        assert fan_in.tolist() == inputs
        assert fans is None or fans == inputs


def expected(model, mean, variance, batch, count, seed):
    """Return the mean over draws of noise of `expected_nll`, and its standard error."""
    noise = randn(count, *model.noise_shape(len(batch.y)), seed=seed)
    values = torch.func.vmap(lambda each: model.expected_nll(mean, variance, batch, each))(noise)
    return float(values.mean()), float(values.std() / math.sqrt(count))


def sampled(model, mean, variance, batch, count, seed):
    """Return the mean over draws of the weights of `nll`, and its standard error."""
    thetas = mean + variance.sqrt() * randn(count, len(mean), seed=seed)
    values = torch.func.vmap(model.nll, in_dims=(0, None))(thetas, batch)
    return float(values.mean()), float(values.std() / math.sqrt(count))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("classes", [2, 3])
def test_expected_loss_of_a_classifier_is_unbiased(width, classes):
    settings = {"outputs": 1, "reference": True} if classes == 2 else {"outputs": 3}
    model = Model(Net(TableNet(PLAIN, PIECES, width, **settings)), Classification())
    mean, variance = randn(model.net.num_params, seed=4), 0.3 * randn(model.net.num_params, seed=5).square()
    batch = Batch(X, torch.arange(6) % classes, torch.tensor([1.0, 1, 1, 1, 1, 0], dtype=torch.float64))
    ours, error = expected(model, mean, variance, batch, 20_000, 6)
    exact, other = sampled(model, mean, variance, batch, 20_000, 7)
    assert abs(ours - exact) < 4 * math.hypot(error, other)
    assert error < 0.05


def test_expected_loss_of_student_t_is_an_upper_bound_and_exact_without_variance():
    model = Model(Net(TableNet(PLAIN, PIECES, 4, 2, constants=2)), StudentT())
    mean, variance = 0.5 * randn(model.net.num_params, seed=4), 0.1 * randn(model.net.num_params, seed=5).square()
    batch = Batch(X, randn(6, 1, seed=8), torch.ones(6, dtype=torch.float64))
    ours, error = expected(model, mean, variance, batch, 20_000, 6)
    exact, other = sampled(model, mean, variance, batch, 20_000, 7)
    assert exact < ours < exact + 0.5
    assert ours - exact > 2 * math.hypot(error, other)
    noise = randn(*model.noise_shape(6), seed=9)
    at_point = model.expected_nll(mean, torch.zeros_like(mean), batch, noise)
    assert_close(at_point, model.nll(mean, batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("settings", "likelihood"),
    [
        ({"outputs": 1, "reference": True}, Classification()), ({"outputs": 3}, Classification()),
        ({"outputs": 2, "constants": 2}, StudentT()), ({"outputs": 1}, Gaussian(0.5)),
        ({"outputs": 1, "constants": 1}, NegativeBinomial(2.0)), ({"outputs": 1, "constants": 1}, Ordinal()),
    ],
    ids=["two classes", "three classes", "student", "gaussian", "counts", "ordinal"],
)  # fmt: skip
def test_gradients_of_the_expected_loss_are_those_of_autograd(settings, likelihood, width):
    model = Model(Net(TableNet(PLAIN, PIECES, width, **settings)), likelihood)
    mean, variance = randn(model.net.num_params, seed=4), randn(model.net.num_params, seed=5).square()
    y = torch.arange(6) % 2 if likelihood.predicts == "labels" else torch.arange(6)[:, None].double()
    batch = Batch(X, y, torch.tensor([1.0, 1, 1, 0.5, 1, 0], dtype=torch.float64))
    noise = randn(*model.noise_shape(6), seed=6)
    expected = torch.func.grad(model.expected_nll, argnums=(0, 1))(mean, variance, batch, noise)
    found = model.grad_expected_nll(mean, variance, batch, noise)
    assert_close(found, expected)
    # Stacked clients: each has its own parameters, data, noise and weights.
    shifts = torch.tensor([1.0, 1.5, -1.0], dtype=torch.float64)
    own = [torch.stack([shift * each for shift in shifts]) for each in (mean, variance, noise, X)]
    own[1] = own[1].square()
    parts = [torch.stack([each, each.flip(0), each]) for each in (y, batch.weight)]
    stacked = own[0], own[1], Batch(own[3], *parts), own[2]
    mapped = torch.func.vmap(torch.func.grad(model.expected_nll, argnums=(0, 1)))(*stacked)
    assert_close(model.grad_expected_nll(*stacked), mapped)
