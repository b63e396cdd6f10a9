import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from federations import first_server, make_model, randn
from pfedbayes.errors import UserError
from pfedbayes.maths.likelihoods import Classification, Regression
from pfedbayes.maths.random import Purpose, key
from pfedbayes.methods import PFedBayes
from pfedbayes.nets import Batch, Model, Net, WithNoise, cnn, mlp, vgg

# Weights and biases of the 3 x 3 convolutions 3-16-32-64-128-128, layer by layer.
CONVOLUTIONS = sum(9 * a * b + b for a, b in [(3, 16), (16, 32), (32, 64), (64, 128), (128, 128)])
LINEAR_HEAD = 128 * 10 + 10
THREE_LAYER_HEAD = 2 * (128 * 128 + 128) + LINEAR_HEAD


class UserModule(nn.Module):
    """A parameter outside layers, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.layer = nn.Linear(3, 3)
        self.again = self.layer
        self.head = nn.Linear(3, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.again(torch.tanh(self.layer(self.scale * x)))))


class TiedModule(nn.Module):
    """Two layers with one weight, which has a name in each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


MODULES = {
    "mlp": (lambda: mlp([6, 5, 4]), (6,)),
    "images": (lambda: mlp([6, 5, 4], "tanh"), (1, 2, 3)),
    "vgg": (lambda: vgg(norm="group"), (3, 32, 32)),
    "user": (UserModule, (3,)),
    "tied": (TiedModule, (3,)),
}


@pytest.fixture(params=MODULES)
def module_and_x(request):
    make, shape = MODULES[request.param]
    torch.manual_seed(0)
    return make().double(), torch.randn(4, *shape, dtype=torch.float64)


def flat(module: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize(
    ("module", "count"),
    [
        (mlp([784, 100, 10]), 784 * 100 + 100 + 100 * 10 + 10),
        (vgg(head="mlp3"), CONVOLUTIONS + THREE_LAYER_HEAD),
        (vgg(head="linear"), CONVOLUTIONS + LINEAR_HEAD),
        (vgg(norm="group"), CONVOLUTIONS + THREE_LAYER_HEAD + 2 * (16 + 32 + 64 + 128 + 128)),
    ],
)
def test_parameter_counts(module, count):
    assert Net(module).num_params == count


def test_parameter_counts_are_the_published_ones():
    assert Net(mlp([784, 100, 10])).num_params == 79_510
    assert (CONVOLUTIONS, THREE_LAYER_HEAD, LINEAR_HEAD) == (245_024, 34_314, 1_290)
    assert Net(vgg()).num_params == 279_338


def test_net_is_its_module_as_a_function_of_the_parameters(module_and_x):
    module, x = module_and_x
    net = Net(module)
    assert net.num_params == len(flat(module))
    assert_close(net(flat(module), x), module(x))
    assert_close(net(torch.zeros(net.num_params, dtype=torch.float64), x), torch.zeros_like(module(x)))


def test_gradient_is_that_of_the_module(module_and_x):
    module, x = module_and_x
    y = torch.arange(4) % module(x).shape[-1]
    functional.cross_entropy(module(x), y, reduction="sum").backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
    batch = Batch(x, y, torch.ones(4, dtype=torch.float64))
    assert_close(Model(Net(module), Classification()).grad_nll(flat(module), batch), expected)


def test_net_maps_over_clients(module_and_x):
    module, x = module_and_x
    net = Net(module)
    thetas = torch.stack([flat(module), 0.5 * flat(module)])
    xs = torch.stack([x, -x])
    assert_close(torch.func.vmap(net)(thetas, xs), torch.stack([net(*pair) for pair in zip(thetas, xs, strict=True)]))


def test_net_keeps_nothing_of_the_module_it_was_made_from(module_and_x):
    module, x = module_and_x
    net, theta = Net(module), flat(module)
    before = net(theta, x)
    nn.init.zeros_(next(module.parameters()))
    assert torch.equal(net(theta, x), before)
    assert next(module.parameters()).requires_grad


WITH_FEATURES = {
    **MODULES,
    "cnn": (lambda: cnn((2, 16, 12), 3), (2, 16, 12)),
    "linear head": (lambda: vgg(head="linear"), (3, 32, 32)),
    "one layer": (lambda: nn.Linear(3, 2), (3,)),
}


class TestFeatures:
    """The input of the last linear layer."""

    @pytest.fixture(params=WITH_FEATURES)
    def case(self, request):
        make, shape = WITH_FEATURES[request.param]
        torch.manual_seed(0)
        return make().double(), torch.randn(4, *shape, dtype=torch.float64)

    @staticmethod
    def apply_head(module, features):
        last = [part for part in module.modules() if isinstance(part, nn.Linear)][-1]
        product = features @ last.weight.T
        return product if last.bias is None else product + last.bias

    def test_the_last_layer_turns_them_into_the_outputs(self, case):
        module, x = case
        net = Net(module)
        features = net.features(flat(module), x)
        assert features.dim() == 2
        assert_close(self.apply_head(module, features), net(flat(module), x))

    def test_of_many_clients(self, case):
        module, x = case
        net, thetas = Net(module), torch.stack([flat(module), 0.5 * flat(module)])
        mapped = torch.func.vmap(net.features, in_dims=(0, None))(thetas, x)
        assert_close(mapped, torch.stack([net.features(theta, x) for theta in thetas]))

    def test_with_learned_noise_they_give_the_means(self):
        module = WithNoise(mlp([3, 5, 2], "tanh")).double()
        net, x = Net(module), randn(4, 3)
        features = net.features(flat(module), x)
        assert_close(self.apply_head(module, features), net(flat(module), x)[:, :-1])

    def test_however_the_net_is_computed(self):
        module, x = cnn((2, 16, 12), 3).double(), randn(4, 2, 16, 12)
        plain = Net(module)
        others = (plain.fitted("matmul", contiguous=True), plain.through(lambda net: net))
        for net in others:
            assert_close(net.features(flat(module), x), plain.features(flat(module), x))

    @pytest.mark.parametrize(
        "module",
        [
            nn.Sequential(nn.Linear(3, 2), nn.Softmax(-1)),
            nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)),
            nn.LayerNorm(3),
            WithNoise(nn.Sequential(nn.Linear(3, 2), nn.ReLU())),
        ],
    )
    def test_a_network_that_ends_otherwise_has_none(self, module):
        net = Net(module)
        with pytest.raises(UserError, match="which this network does not have: append one"):
            net.features(torch.ones(net.num_params), torch.ones(4, 3))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "running_mean.*GroupNorm"),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), "'1'.*dropout"),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout2d(0.1)), "dropout"),
        (nn.Sequential(nn.Linear(2, 2), nn.AlphaDropout(0.1)), "dropout"),
        (nn.Sequential(nn.Flatten(), nn.ReLU()), "no parameters"),
    ],
)
def test_modules_with_hidden_state_noise_or_nothing_to_learn_are_refused(module, message):
    with pytest.raises(UserError, match=message):
        Net(module)


def test_user_buffers_are_refused():
    module = nn.Linear(2, 2)
    module.register_buffer("counter", torch.zeros(1))
    with pytest.raises(UserError, match="'counter'"):
        Net(module)


def test_dropout_that_never_drops_is_accepted():
    assert Net(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0))).num_params == 6


@pytest.mark.parametrize("scheme", ["torch", "kaiming", "normal"])
class TestInit:
    net = Net(mlp([400, 300, 10]))

    def test_depends_on_its_seed_alone(self, scheme):
        torch.manual_seed(1)
        first = self.net.init(5, scheme)
        torch.manual_seed(2)
        assert torch.equal(self.net.init(5, scheme), first)
        assert not torch.equal(self.net.init(6, scheme), first)

    def test_leaves_the_global_generator_alone(self, scheme):
        before = torch.get_rng_state()
        self.net.init(5, scheme)
        assert torch.equal(torch.get_rng_state(), before)

    def test_leaves_the_generators_of_other_devices_alone(self, scheme, monkeypatch):
        seeded = []
        monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
        self.net.init(5, scheme)
        assert seeded == []

    def test_leaves_the_net_alone(self, scheme):
        x, theta = torch.ones(1, 400), torch.ones(self.net.num_params)
        before = self.net(theta, x)
        self.net.init(5, scheme)
        assert torch.equal(self.net(theta, x), before)


def test_distributions_of_the_first_parameters():
    net = Net(mlp([400, 300, 10]))
    parts = [400 * 300, 300, 300 * 10, 10]

    normal = net.init(1, "normal")
    assert normal.mean().abs() < 5 * 0.1 / math.sqrt(net.num_params)
    assert normal.std().item() == pytest.approx(0.1, rel=0.02)
    assert normal.split(parts)[1].std().item() == pytest.approx(0.1, rel=0.2)  # biases too

    weight1, bias1, weight2, bias2 = net.init(1, "kaiming").split(parts)
    assert weight1.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.02)
    assert weight2.std().item() == pytest.approx(math.sqrt(2 / 300), rel=0.06)
    assert not bias1.any()
    assert not bias2.any()

    # U(-a, a) with a = 1 / sqrt(fan_in) for weights and biases.
    for part, fan_in in zip(net.init(1, "torch").split(parts), (400, 400, 300, 300), strict=True):
        assert part.abs().max() <= 1 / math.sqrt(fan_in)
        assert part.abs().max() > 0.7 / math.sqrt(fan_in)


def test_parameters_outside_layers_keep_the_users_values():
    assert Net(UserModule()).init(1, "torch")[0] == 1.5


def test_images_are_scaled_to_plus_minus_one():
    model = Model(Net(nn.Linear(3, 1, bias=False)), Regression(1.0))
    x = torch.tensor([[0, 255, 51]], dtype=torch.uint8)
    for weights, expected in zip(torch.eye(3, dtype=torch.float64), (-1.0, 1.0, -0.6), strict=True):
        assert float(model.outputs(weights, x)) == pytest.approx(expected)


def test_a_method_may_ask_for_pixels_between_zero_and_one():
    model = Model(Net(nn.Linear(3, 1, bias=False)), Regression(1.0), pixels="unit")
    x = torch.tensor([[0, 255, 51]], dtype=torch.uint8)
    assert_close(model.inputs(x, torch.float64), torch.tensor([[0.0, 1.0, 0.2]], dtype=torch.float64))


def test_stacked_outputs_are_those_of_each_network(module_and_x):
    module, x = module_and_x
    model, thetas = make_model(module), torch.stack([flat(module), 0.5 * flat(module), -flat(module)])
    assert_close(model.stacked_outputs(thetas, x), torch.stack([model.outputs(theta, x) for theta in thetas]))


def test_padding_counts_neither_in_the_loss_nor_in_the_size():
    model = Model(Net(mlp([3, 4, 2], "tanh")), Classification())
    theta = torch.randn(model.net.num_params, generator=torch.Generator().manual_seed(0))
    x, y = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 1, 0, 1])
    padded = Batch(x, y, torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]))
    real = Batch(x[:3], y[:3], torch.ones(3))
    assert float(padded.size) == 3
    assert_close(model.nll(theta, padded), model.nll(theta, real))
    assert_close(model.grad_nll(theta, padded), model.grad_nll(theta, real))


def test_learned_noise_is_one_more_output():
    module = WithNoise(nn.Linear(2, 3), rho=0.7)
    outputs = module(torch.zeros(5, 2))
    assert outputs.shape == (5, 4)
    assert_close(outputs[:, 3], torch.full((5,), 0.7))
    assert Net(module).num_params == 2 * 3 + 3 + 1


def test_every_parameter_has_a_mean_and_a_rho():
    model = make_model(mlp([784, 100, 10]))
    v = first_server(PFedBayes(), model, seed=1)
    assert v.shape == (2, 79_510)
    assert torch.equal(v[0], model.net.init(key(1, Purpose.INIT), "normal").double())
    assert (v[1] == -2.5).all()


@pytest.mark.parametrize("quiet", ["noise 0", "sigma 0"])
def test_bayesian_net_without_noise_is_the_deterministic_net(quiet):
    model, x = make_model(), randn(5, 3)
    method = PFedBayes(noise_std=0.0) if quiet == "noise 0" else PFedBayes(rho0=-50.0)
    v, noise = first_server(method, model, seed=1), randn(4, model.net.num_params)
    assert_close(method.predict(model, v, x, noise), model.net(v[0], x).expand(4, 5, 3))


class TestThetaInMemory:
    """A theta may lie in memory in any way, and be differentiated in any way."""

    net = Net(mlp([3, 4, 2], "tanh")).fitted(contiguous=True)
    columns, x = randn(net.num_params, 2, dtype=torch.float32), randn(5, 3, dtype=torch.float32)

    def test_columns_of_a_matrix(self):
        expected = torch.stack([self.net(column.contiguous(), self.x) for column in self.columns.unbind(1)])
        assert_close(torch.stack([self.net(column, self.x) for column in self.columns.unbind(1)]), expected)
        assert_close(torch.func.vmap(lambda theta: self.net(theta, self.x), in_dims=1)(self.columns), expected)

    def test_one_number_for_all(self):
        everywhere = torch.tensor(0.3).expand(self.net.num_params)
        assert_close(self.net(everywhere, self.x), self.net(everywhere.contiguous(), self.x))

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch, about itself
    def test_forward_mode_agrees_with_a_difference(self):
        theta, tangent = self.columns.double().T.contiguous()
        x = self.x.double()
        _, found = torch.func.jvp(lambda t: self.net(t, x), (theta,), (tangent,))
        step = 1e-6
        expected = (self.net(theta + step * tangent, x) - self.net(theta - step * tangent, x)) / (2 * step)
        assert_close(found, expected, rtol=1e-6, atol=1e-8)
