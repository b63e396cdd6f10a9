"""The work of a race, the same for every contender: data, network, method and amount of training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pfedbayes.data import DataConfig, Shards, load_published, load_shards, positions
from pfedbayes.engine.training import Training
from pfedbayes.maths.likelihoods import Classification
from pfedbayes.maths.random import Purpose, key
from pfedbayes.methods import FedAvg, Method, PFedBayes
from pfedbayes.nets import Init, Model, Net, mlp, vgg

SEED = 1
METHODS: dict[str, Method] = {"pfedbayes": PFedBayes(), "fedavg": FedAvg()}
EXAMPLES = {"many": 250, "images": 125}  # per client, as in the paper's small MNIST and small CIFAR-10


@dataclass(frozen=True)
class Work:
    """The work of one contender."""

    method: Literal["pfedbayes", "fedavg"]
    device: str
    data: Literal["mnist", "many", "images"] = "mnist"
    """mnist: the bundled set as in the paper's small protocol, 10 clients. many: random rows of it for any number of
    clients. images: random 32 x 32 colour images for the VGG."""
    clients: int = 10
    local_steps: int = 20
    batch_size: int = 100
    seeds: int = 1
    """Federations that train at once."""
    chosen: int | None = None
    """Clients that train in a round; None: all."""

    @property
    def client_steps(self) -> int:
        """Local steps of a round, summed over the clients that train."""
        return self.seeds * (self.chosen or self.clients) * self.local_steps

    @property
    def example_shape(self) -> tuple[int, ...]:
        return (3, 32, 32) if self.data == "images" else (1, 28, 28)

    @property
    def init(self) -> Init:
        """The initialisation, as in the experiments of the paper."""
        return "kaiming" if self.data == "images" else self.rule().habits.init

    def module(self) -> nn.Module:
        """Return the paper's network for these data, not yet initialised."""
        return vgg() if self.data == "images" else mlp([784, 100, 10])

    def model(self) -> Model:
        return Model(Net(self.module()), Classification())

    def rule(self) -> Method:
        """Return the method with its defaults."""
        return METHODS[self.method]

    def training(self) -> Training:
        return Training(
            local_steps=self.local_steps,
            batch_size=self.batch_size,
            participants=self.chosen,
            train="chosen" if self.chosen else "all",
            seed=SEED,
        )

    def shards(self) -> Shards:
        if self.data == "mnist":
            return load_shards(DataConfig(name="mnist", size="small"))
        rng = np.random.default_rng(SEED)
        examples = EXAMPLES[self.data]
        if self.data == "images":
            pool_x = torch.from_numpy(rng.integers(0, 256, (self.clients * examples, *self.example_shape), np.uint8))
            pool_y = torch.from_numpy(rng.integers(0, 10, len(pool_x)))
            rows = torch.split(torch.arange(len(pool_x)), examples)
        else:
            pool = load_published("mnist")
            pool_x, pool_y = pool.x, pool.y
            picks = (rng.choice(len(pool_x), examples, replace=False) for _ in range(self.clients))
            rows = tuple(torch.from_numpy(pick) for pick in picks)
        none = (torch.empty(0, dtype=torch.int64),) * self.clients
        names = tuple(f"client {i}" for i in range(self.clients))
        return Shards(pool_x, pool_y, rows, none, none, names, num_classes=10)

    def first_theta(self) -> Tensor:
        """Return the initial parameters (T,) of the shared model, the same for every contender."""
        return self.model().net.init(key(SEED, Purpose.INIT), self.init).to(self.device)


class Examples:
    """The training data of a client for plain loops: floats on the device, converted once."""

    def __init__(self, work: Work, shards: Shards, client: int) -> None:
        self.work, self.client = work, client
        rows = shards.train[client]
        self.x = work.model().inputs(shards.x[rows].to(work.device), torch.float32)
        self.y = shards.y[rows].to(work.device)

    def order(self, round: int) -> Tensor:
        """Return the rows (local_steps, batch_size) of the batches of a round, the same as in the engine."""
        per_round = self.work.local_steps * self.work.batch_size
        taken = positions(SEED, self.client, len(self.y), (round - 1) * per_round, per_round)
        return torch.from_numpy(taken).to(self.work.device).view(self.work.local_steps, self.work.batch_size)

    def batches(self, round: int, loader: bool = False) -> Iterable[Sequence[Tensor]]:
        """Return inputs and labels of each batch of a round, sliced from tensors or from torch's DataLoader."""
        if loader:
            return DataLoader(TensorDataset(self.x, self.y), batch_sampler=self.order(round).tolist())
        return ((self.x[rows], self.y[rows]) for rows in self.order(round))


def split_theta(theta: Tensor, module: nn.Module) -> dict[str, Tensor]:
    """Return a flat theta as the tensors of a module, by name."""
    parts = torch.split(theta, [weight.numel() for weight in module.parameters()])
    return {name: part.view_as(w) for (name, w), part in zip(module.named_parameters(), parts, strict=True)}
