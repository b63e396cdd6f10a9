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

from pfedbayes.errors import UserError
from pfedbayes.maths.gaussian import MeanField, sample
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


class About(NamedTuple):
    """What a method is."""

    title: str
    reference: str
    learns: str
    personal: bool = False
    """There is a model for each client."""
    shared: bool = True
    """There is one model for all clients."""
    stochastic: bool = False
    """Predictions average over draws of the weights."""
    gaussian: bool = False
    """Weights are independent Gaussians; what the server averages are their means and rhos (2, T)."""
    averages: bool = True
    """The server's state is one tensor, an average of the uploads."""


class Needs(NamedTuple):
    """What a method asks of the data, the network and the engine."""

    full_batch: bool = False
    """A batch is the client's whole training set."""
    labels: bool = False
    """It classifies; there is no regression."""
    all_clients: bool = False
    """Every client takes part in every round."""
    pooled_data: bool = False
    """One model is trained on the data of all clients in one place."""
    tied: bool = False
    """A client's state changes only if the server takes its upload: only those chosen may train."""
    loop: bool = False
    """Its functions cannot be mapped by vmap: clients train one after another."""
    eager: bool = False
    """Its steps are not the same tensor operations each time, so they can be neither compiled nor replayed."""
    full_precision: bool = False
    """Matrix products may not be rounded to TF32."""
    net: Literal["mlp"] | None = None
    """The only kind of network that it can train."""
    outputs: int | None = None
    """Outputs of the network, if not those of the likelihood."""
    batches_per_step: int = 1
    max_steps: int | None = None
    """It takes at most this many of the R local steps."""


class Habits(NamedTuple):
    """What the method's own paper does where a config says nothing."""

    init: Init = "torch"
    pixels: Pixels = "signed"
    trains: Literal["all", "chosen"] = "chosen"
    """Which clients train in a round: all of them, or those whose uploads are averaged."""


@dataclass(frozen=True)
class Method:
    """One federated method; fields are its hyper-parameters, with the paper's values as defaults."""

    about: ClassVar[About]
    habits: ClassVar[Habits] = Habits()

    @property
    def needs(self) -> Needs:
        """What the method asks of the data, the network and the engine."""
        return Needs()

    @property
    def adapts(self) -> bool:
        """Whether personal models are made at prediction time."""
        return type(self).adapt is not Method.adapt

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

    def noise_shape(self, num_params: int) -> tuple[int, ...]:
        """Shape of the standard normal noise of one step; an empty tuple for none."""
        return ()

    def step(self, model: Model, local: State, batches: tuple[Batch, ...], noise: Tensor) -> State:
        """One of the R local steps. It may use the memory of `local`, if `begin` has copied what is in it."""
        raise NotImplementedError

    def end(self, local: State) -> tuple[State, State]:
        """The client's new state and its upload. Default: nothing is kept, and the trained model is sent."""
        return (), local.theta

    # Prediction

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
        """Return further personal models worth a column of their own, as states that `predict` takes."""
        return {}

    def posterior(self, state: State) -> MeanField | None:
        """Return the Gaussian over the weights (T,) of a client's model or of the server's; sigma is 0 for one network.

        None if the model is more than the weights of the network. Default: the state itself, or its field `theta`.
        """
        theta: Tensor = state if isinstance(state, Tensor) else state.theta
        return MeanField(theta, theta.new_zeros(()))

    def predict(self, model: Model, state: State, x: Tensor, noise: Tensor | None) -> Tensor:
        """Return outputs (K, n, ...), one per row of noise (K, T); those of the mean network if noise is None."""
        q = weights_posterior(self, state)
        if noise is None:
            return model.outputs(q.mu, x)[None]
        return model.stacked_outputs(sample(q, noise), x)


def weights_posterior(method: Method, state: State) -> MeanField:
    """Return `method.posterior(state)` where a model that is more than its weights cannot be used."""
    q = method.posterior(state)
    if q is None:
        raise UserError(f"{method.about.title} has no distribution over weights: use method.name=pfedbayes")
    return q


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
