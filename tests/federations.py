"""A small federation for tests, and its training as plain loops over clients."""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pfedbayes.data import Shards, positions
from pfedbayes.engine.backend.local_training import Step, client_round
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import Plan
from pfedbayes.engine.training import Training
from pfedbayes.maths.likelihoods import Classification, Likelihood
from pfedbayes.maths.random import Purpose, choose, key, normal
from pfedbayes.maths.trees import leaves, pick, stack, tree_map
from pfedbayes.methods import Method
from pfedbayes.methods.base import Shard
from pfedbayes.methods.hierarchical import with_schedule
from pfedbayes.nets import Batch, Model, Net, mlp

SIZES = (23, 4, 11, 7, 16)  # unequal; the second client has less than a batch
TEST_SIZES = (9, 5, 8, 13, 4)
TRAINING = Training(rounds=3, local_steps=4, batch_size=6, participants=3, seed=3)
FEW = dataclasses.replace(TRAINING, participants=2, train="chosen", rounds=6)
EXACT = Plan(dtype="float64", threads=1)
CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_shards(
    sizes: tuple[int, ...] = SIZES, test_sizes: tuple[int, ...] = TEST_SIZES, features: int = 3, classes: int = 3
) -> Shards:
    """Return noisy linear classes; the rows of a client are scattered in the pool."""
    total = sum(sizes) + sum(test_sizes)
    x = randn(total, features, seed=1)
    y = (x @ randn(features, classes, seed=2) + randn(total, classes, seed=3)).argmax(-1)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(4))
    rows = order.split([*sizes, *test_sizes])
    return Shards(
        x=x,
        y=y,
        train=rows[: len(sizes)],
        test=rows[len(sizes) :],
        validation=tuple(torch.empty(0, dtype=torch.int64) for _ in sizes),
        names=tuple(f"site {i}" for i in range(len(sizes))),
        num_classes=classes,
    )


def pooled(shards: Shards) -> Shards:
    """Return one client that trains on the data of all clients."""
    others = {name: getattr(shards, name)[:1] for name in ("test", "validation", "names")}
    return dataclasses.replace(shards, train=(torch.cat(shards.train),), **others)


def make_model(module: nn.Module | None = None, likelihood: Likelihood | None = None) -> Model:
    """Return a tanh network: its units never die, so every weight has a gradient."""
    return Model(Net(module or mlp([3, 4, 3], "tanh")), likelihood or Classification())


def model_for(method: Method) -> Model:
    """Return the small model with the outputs that the method needs."""
    return make_model(mlp([3, 4, method.needs.outputs or 3], "tanh"))._replace(pixels=method.habits.pixels)


def federation(method: Method, training: Training = TRAINING, plan: Plan = EXACT, **others: Any) -> Federation:
    settings = {"shards": make_shards(), "model": model_for(method), "training": training, "plan": plan} | others
    return Federation(method=method, **settings)


def trained(method: Method, rounds: int = TRAINING.rounds, **others: Any) -> Federation:
    """Return a federation after this many rounds."""
    result = federation(method, **others)
    for _ in result.rounds(rounds):
        pass
    return result


def client_states(federation: Federation) -> dict[int, tuple[Tensor, ...]]:
    """Return the leaves of every client's state by client number, in the order in which the clients enrolled."""
    tensors = federation.tensors()
    stacked = [tensor for name, tensor in tensors.items() if name.split(".")[0] == "clients"]
    return {client: tuple(leaf[row] for leaf in stacked) for row, client in enumerate(tensors["enrolled"].tolist())}


def client_shard(shards: Shards, rows: Tensor) -> Shard:
    labels = torch.bincount(shards.y[rows], minlength=shards.num_classes) if shards.num_classes else torch.empty(0)
    return Shard(torch.tensor(len(rows), dtype=torch.float64), labels)


def client_steps(
    shards: Shards, model: Model, method: Method, training: Training, client: int, round: int, cursor: int
) -> list[Step]:
    """Return batches and noise of one client's round, found by name, without padding."""
    rows = shards.train[client]
    batch_size = len(rows) if method.needs.full_batch else min(training.batch_size, len(rows))
    batches = []
    for k in range(training.local_steps * method.needs.batches_per_step):
        taken = rows
        if method.needs.shuffled:
            taken = rows[positions(training.seed, client, len(rows), cursor + k * batch_size, batch_size)]
        batches.append(Batch(shards.x[taken], shards.y[taken], torch.ones(batch_size, dtype=torch.float64)))
    shape = method.noise_shape(model, batch_size)
    steps = []
    for r in range(training.local_steps):
        name = key(training.seed, Purpose.TRAINING, round, client, r)
        own = batches[r * method.needs.batches_per_step : (r + 1) * method.needs.batches_per_step]
        steps.append((tuple(own), normal(shape, name, torch.float64, CPU)))
    return steps


class Alone(NamedTuple):
    """The result of `train_alone`; uploads are those of the last round."""

    server: Any
    clients: dict[int, Any]
    uploads: dict[int, Any]


def first_server(method: Method, model: Model, seed: int, num_clients: int = len(SIZES)) -> Any:
    theta = model.net.init(key(seed, Purpose.INIT), method.habits.init)
    return method.init(theta.double(), num_clients, model.net)


def train_alone(
    method: Method,
    rounds: int,
    training: Training = TRAINING,
    shards: Shards | None = None,
    model: Model | None = None,
) -> Alone:
    """Train a federation in float64, one client at a time: no client axis, no padding, no engine."""
    method = with_schedule(method, training.rounds * training.local_steps)
    shards, model = shards or make_shards(), model or model_for(method)
    if method.needs.pooled_data:
        shards = pooled(shards)
    num_clients = len(shards.train)
    sizes = torch.tensor([len(rows) for rows in shards.train], dtype=torch.float64)
    server = first_server(method, model, training.seed, num_clients)
    clients: dict[int, Any] = {}
    uploads: dict[int, Any] = {}
    cursors = [0] * num_clients
    for round in range(1, rounds + 1):
        chosen = choose(training.seed, round, num_clients, min(training.participants or num_clients, num_clients))
        all_train = (training.train or method.habits.trains) == "all"
        uploads = {}
        for i in range(num_clients) if all_train else chosen.tolist():
            received = pick(method.download(server, torch.tensor([i])), 0)
            shard = client_shard(shards, shards.train[i])
            steps = client_steps(shards, model, method, training, i, round, cursors[i])
            client = clients[i] if i in clients else method.enrol(received)
            clients[i], uploads[i] = client_round(method, model, client, received, shard, steps)
            cursors[i] += sum(int(batch.size) for batches, _ in steps for batch in batches)
        received_uploads = stack([uploads[i] for i in chosen.tolist()])
        server = method.aggregate(server, received_uploads, sizes[chosen], torch.from_numpy(chosen))
    return Alone(server, clients, uploads)


class Inputs(NamedTuple):
    """The arguments of client_round for all clients at once."""

    client: Any
    received: Any
    shard: Shard
    steps: list[Step]


def _pad(batch: Batch, width: int, filler: float) -> Batch:
    missing = width - len(batch.weight)
    x = torch.cat([batch.x, torch.full((missing, *batch.x.shape[1:]), filler, dtype=batch.x.dtype)])
    y = torch.cat([batch.y, torch.full((missing, *batch.y.shape[1:]), int(filler) % 3, dtype=batch.y.dtype)])
    return Batch(x, y, torch.cat([batch.weight, torch.zeros(missing, dtype=batch.weight.dtype)]))


def stacked_inputs(method: Method, filler: float = 0.0, shards: Shards | None = None) -> Inputs:
    """Return the first round of all clients, with small batches padded by rows of `filler`."""
    shards, model, clients = shards or make_shards(), model_for(method), range(len(SIZES))
    received = method.download(first_server(method, model, TRAINING.seed), torch.arange(len(SIZES)))
    client = stack([method.enrol(pick(received, i)) for i in clients])
    shard = stack([client_shard(shards, rows) for rows in shards.train])
    each = [client_steps(shards, model, method, TRAINING, i, 1, 0) for i in clients]
    steps = []
    for parts in zip(*each, strict=True):
        width = max(len(batches[0].weight) for batches, _ in parts)
        padded = [tuple(_pad(batch, width, filler) for batch in batches) for batches, _ in parts]
        noises = [noise for _, noise in parts]
        if method.noise_shape(model, 1) != method.noise_shape(model, 2):  # each example has its own
            noises = [
                nn.functional.pad(noise, [0, 0] * (noise.dim() - 1) + [0, width - len(noise)]) for noise in noises
            ]
        steps.append((stack(padded), torch.stack(noises)))
    return Inputs(client, received, shard, steps)


def one_of(inputs: Inputs, i: int) -> Inputs:
    """Return the arguments for one client alone, including padding."""
    steps = [(pick(batches, i), noise[i]) for batches, noise in inputs.steps]
    return Inputs(pick(inputs.client, i), pick(inputs.received, i), pick(inputs.shard, i), steps)


def copy(tree: Any) -> Any:
    return tree_map(torch.clone, tree)


def same_bits(left: Any, right: Any) -> bool:
    """Return whether two trees are equal to the last bit."""
    return all(torch.equal(a, b) for a, b in zip(leaves(left), leaves(right), strict=True))


def difference(left: Any, right: Any) -> float:
    """Return the largest deviation (or NaN) between two trees, relative to the largest entry of each leaf."""
    gaps = [torch.zeros((), dtype=torch.float64)]
    for a, b in zip(leaves(left), leaves(right), strict=True):
        assert a.shape == b.shape
        gaps.append((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-300))
    return float(torch.stack(gaps).max())
