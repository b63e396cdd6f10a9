"""What a federated method is: hyper-parameters and pure functions written for one client.

The defaults are FedAvg's plumbing: the server state is one tensor w, every client receives it, clients remember
nothing, and the server takes the mean of what is uploaded, weighted by the number of examples.

State is tensors in NamedTuples. Inside a client function tensors have no client axis; the engine adds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.maths.trees import Tree, pick, stack, tree_map
from pfedbayes.nets import Batch, Init, Model, Pixels

State = Tree  # each method names its own


class Shard(NamedTuple):
    """What a method may know of a client's training data besides its batches.

    size: the number n of examples; labels (C,): how many of them each class has (none in regression).
    """

    size: Tensor
    labels: Tensor


class Local(NamedTuple):
    """A round under way where one model is trained."""

    theta: Tensor


class Adaptation(NamedTuple):
    """What a personal model may be made from when it is asked to predict.

    train: the client's whole training set; batch_size b; num_classes (None in regression); seed for whatever has to
    be drawn. test: the data to be predicted where their targets are known, which only an option that reproduces a
    leaky evaluation looks at.
    """

    train: Batch
    batch_size: int
    num_classes: int | None
    seed: int
    test: Batch | None


@dataclass(frozen=True)
class Method:
    """One federated method; fields are its hyper-parameters, with the paper's values as defaults."""

    title: ClassVar[str]
    reference: ClassVar[str]
    learns: ClassVar[str]
    personal: ClassVar[bool] = False  # has a model per client
    shared: ClassVar[bool] = True  # has one model for all
    stochastic: ClassVar[bool] = False  # predicts by drawing weights
    gaussian: ClassVar[bool] = False  # draws independent Gaussians; what it averages are (2, T), means and rhos
    adapts: ClassVar[bool] = False  # makes its personal model when it is asked to predict
    batched: ClassVar[bool] = True  # its client functions can be mapped by vmap; else by loop only
    full_batch: ClassVar[bool] = False  # a batch is the client's whole training set
    classifies: ClassVar[bool] = False  # knows labels only, no regression
    pools: ClassVar[bool] = False  # trains one client that has everybody's data
    everybody: ClassVar[bool] = False  # cannot do without any client in a round
    traceable: ClassVar[bool] = True  # its steps are the same tensor operations each time: can be compiled and replayed
    bears_rounding: ClassVar[bool] = True  # of what goes into its matrix products, to 10 bits
    averages: ClassVar[bool] = True  # its server state is one tensor, an average of uploads
    default_init: ClassVar[Init] = "torch"
    pixels: ClassVar[Pixels] = "signed"
    net: ClassVar[Literal["mlp"] | None] = None  # the only kind of network it can train
    who_trains: ClassVar[Literal["all", "chosen"]] = "chosen"  # what the method's own paper does each round

    # Server

    def init(self, theta: Tensor, num_clients: int, shapes: tuple[torch.Size, ...]) -> State:
        """Server state from the first parameters theta (T,), a concatenation of tensors of these shapes."""
        return theta

    def download(self, server: State, clients: Tensor) -> State:
        """What each of the clients (n,) receives, stacked along a new first axis."""
        return broadcast(server, len(clients))

    def aggregate(self, server: State, uploads: State, sizes: Tensor, clients: Tensor) -> State:
        """The next server state from stacked uploads (n, ...) of the clients (n,) with `sizes` (n,) examples each."""
        return weighted_mean(uploads, sizes)

    # One client

    def enrol(self, received: State) -> State:
        """The state of a client that takes part for the first time. Default: clients remember nothing."""
        return ()

    def begin(self, client: State, received: State, shard: Shard) -> State:
        """Local state at the start of a round. Default: the received model."""
        return Local(received)

    @property
    def batches_per_step(self) -> int:
        """How many batches a step takes."""
        return 1

    @property
    def most_steps(self) -> int | None:
        """How many of the R local steps it takes at most; None for all of them."""
        return None

    @property
    def outputs(self) -> int | None:
        """How many outputs the network shall have; None for as many as the likelihood asks for."""
        return None

    def noise_shape(self, num_params: int) -> tuple[int, ...]:
        """Shape of the standard normal noise of one step; an empty tuple for none."""
        return ()

    def step(self, model: Model, local: State, batches: tuple[Batch, ...], noise: Tensor) -> State:
        """One of the R local steps. It may use the memory of `local`, if `begin` has copied what is in it."""
        raise NotImplementedError

    def end(self, local: State) -> tuple[State, State]:
        """The client's new state and its upload. Default: nothing is kept, and the trained model is sent."""
        return (), local.theta

    # Prediction: a stack of outputs (K, n, ...), one per row of noise (K, T); noise=None asks for the mean network.

    def prepare(self, data: Adaptation) -> State:
        """What `adapt` needs of a client's data, a tree of tensors if the method is `batched`. Default: nothing."""
        return ()

    def adapt(self, model: Model, client: State, received: State, prepared: State) -> State:
        """The state of a client's personal model, made from its data if the method `adapts`.

        Many clients adapt at once where the method is `batched`, so it draws nothing: `prepare` does, or what is
        called by `together`.
        """
        return client

    def views(self, client: State, received: State) -> dict[str, State]:
        """Further personal models worth a column of their own, as states that `predict_personal` takes."""
        return {}

    def predict_personal(self, model: Model, client: State, x: Tensor, noise: Tensor | None) -> Tensor:
        """Outputs of the client's own model."""
        raise NotImplementedError

    def predict_shared(self, model: Model, server: State, x: Tensor, noise: Tensor | None) -> Tensor:
        """Outputs of the shared model."""
        return model.outputs(server, x)[None]

    def personal_weights(self, client: State) -> tuple[Tensor, Tensor]:
        """Means and standard deviations (T,) of the weights of the client's own model, if the method is `gaussian`."""
        raise NotImplementedError

    def shared_weights(self, server: State) -> tuple[Tensor, Tensor]:
        """Means and standard deviations (T,) of the weights of the shared model, if the method is `gaussian`."""
        raise NotImplementedError


def broadcast(state: State, count: int) -> State:
    """The same state for `count` clients, without copying it."""
    return tree_map(lambda leaf: leaf.expand(count, *leaf.shape), state)


def weighted_mean(stacked: Tensor, weights: Tensor) -> Tensor:
    """Mean over the first axis of stacked (n, ...) with weights (n,) that need not sum to one."""
    share = (weights / weights.sum()).to(stacked.dtype)
    mean: Tensor = torch.tensordot(share, stacked, dims=1)
    return mean


def together(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """What a function of stacked clients gives for the client with these tensors.

    It is for what vmap cannot map, such as decisions on the host and sizes that differ between clients: inside vmap the
    function is called once, with the tensors of all clients. It has no gradient.
    """
    outputs: tuple[Tensor, ...] = _Together.apply(function, *tensors)  # type: ignore[no-untyped-call]
    return outputs


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> Any:
        return pick(function(*stack([tensors])), 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> Any:
        clients = info.batch_size
        stacked = (
            tensor.expand(clients, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        )
        outputs = function(*stacked)
        return outputs, (0,) * len(outputs)


def require(condition: bool, message: str) -> None:
    """Refuse a hyper-parameter that makes no sense."""
    if not condition:
        raise ValueError(message)
