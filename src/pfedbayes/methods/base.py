"""What a federated method is: hyper-parameters, and pure functions written for one client.

A method is a frozen dataclass. Its fields are its hyper-parameters; constraints on them stand in their types
(`pfedbayes.constraints`) and are checked when the method is made. An author meets these names:

- Description: `about` (what it is), `needs` (what it requires of data, network and engine), `habits` (what its paper
  does where a config says nothing).
- Server: `init`, `download`, `aggregate`, `leave`; `check_upload` where clients are not trusted.
- Client, in the order in which a round calls them: `enrol`, `begin`, `noise_shape`, `step`, `end`.
- Prediction: `prepare`, `adapt`, `views`, `drawn`, `posterior`, `predict`.

The defaults are FedAvg's: the server's state is one tensor w, every client receives it, clients remember nothing, and
the server averages the uploads with weights proportional to the clients' numbers of examples.

A state is a tensor, or a NamedTuple of states. Inside a client function tensors have no client axis; the engine adds it
with `torch.func.vmap`. Client functions therefore must not branch on values, and shapes are fixed.

Where to find what is not an argument:

- Features phi(x) below the last linear layer: `model.net.features(theta, model.inputs(x, theta.dtype))`. That layer
  has `model.net.head_size` parameters.
- The round number: count rounds in the client's state.
- A mask of the last layer outside `step` and `adapt`, which receive the model: build it in `init` from `net`.
- Noise that is not standard normal of shape (..., T): transform or slice the normal numbers of `noise_shape` or, in
  prediction, of `drawn`.
- Several initial networks: derive them in `init` from theta with a generator of a fixed seed.
- A client state that must match the server's, as in PVI or SCAFFOLD: set `needs.tied`.
- The end of a client's membership: `leave` removes its contribution from the server's state.
- The weights of a deterministic model: `posterior`, with sigma 0. Post-hoc methods use it.
- A server state of several tensors, or one that is not an average: set `about.averages` to False, which refuses a
  server optimizer.
- A pass over all of a client's data at the end of a round (Fisher information, control variates): use the last of the R
  steps. A verb `finish(model, local, prepared)` would run once, between the last `step` and `end`, with `prepare`'s
  tree; it waits for the first method that needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from pfedbayes.constraints import check
from pfedbayes.errors import UserError
from pfedbayes.maths.gaussian import MeanField, sample
from pfedbayes.maths.stacked import broadcast, weighted_mean
from pfedbayes.maths.trees import Tree, pick
from pfedbayes.nets import Batch, Init, Model, Net, Pixels

State = Tree  # each method has its own


class Shard(NamedTuple):
    """What a method knows about a client's training set besides its batches."""

    size: Tensor
    """Number n of examples."""
    labels: Tensor
    """Number of examples of each class (C,); empty in regression."""


class LocalModel(NamedTuple):
    """The state of a round in which one model is trained."""

    theta: Tensor


class Adaptation(NamedTuple):
    """What `prepare` may use to make a personal model at prediction time."""

    train: Batch
    """The client's whole training set."""
    batch_size: int
    num_classes: int | None
    """None in regression."""
    seed: int
    """Seed for random draws."""
    test: Batch | None
    """The data to be predicted, if their targets are known. Only options that reproduce a leaky evaluation use it."""
    validation: Batch
    """The client's validation set, which may be empty."""

    def rows(self, steps: int) -> Tensor:
        """Return rows (steps, b) of the training set: shuffled epochs, one after another, cut into batches."""
        size, count = len(self.train.weight), steps * self.batch_size
        generator = torch.Generator().manual_seed(self.seed)
        epochs = [torch.randperm(size, generator=generator) for _ in range(0, count, size)]
        order = torch.cat([torch.empty(0, dtype=torch.int64), *epochs])[:count]
        return order.view(steps, self.batch_size).to(self.train.weight.device)

    def batches(self, steps: int) -> Batch:
        """Return the batches (steps, b, ...) of these rows."""
        batches: Batch = pick(self.train, self.rows(steps))
        return batches


class About(NamedTuple):
    """What a method is."""

    title: str
    reference: str
    learns: str
    """Completes the sentence "The method learns …"."""
    personal: bool = False
    """There is a model for each client."""
    shared: bool = True
    """There is one model for all clients."""
    stochastic: bool = False
    """Predictions average over draws of the weights."""
    gaussian: bool = False
    """Weights are independent Gaussians; the server averages their means and rhos (2, T)."""
    averages: bool = True
    """The server's state is one tensor, an average of the uploads."""
    mean_only: bool = False
    """The server's state is more than one tensor, and of the uploads it uses their mean and their number alone."""


class Limits(NamedTuple):
    """What an upload of a believable client may be."""

    largest: float
    """Largest magnitude of an entry of a model, and of a gradient per example."""
    rho: float
    """Largest magnitude of an entry of rho."""
    step: float
    """Largest distance of an entry from the server's model."""
    examples: float
    """Training examples of all clients."""
    steps: int
    """Local steps of a round."""


class Needs(NamedTuple):
    """What a method requires of the data, the network and the engine."""

    full_batch: bool = False
    """A batch is the client's whole training set."""
    labels: bool = False
    """Classification only."""
    all_clients: bool = False
    """Every client takes part in every round."""
    pooled_data: bool = False
    """One model is trained on the data of all clients in one place."""
    tied: bool = False
    """A client's state changes only if the server uses its upload, so only chosen clients may train."""
    keeps_examples: bool = False
    """A personal model holds the client's whole training set, so its size depends on the client."""
    loop: bool = False
    """vmap cannot map its functions: clients train one after another."""
    eager: bool = False
    """Its steps differ in their tensor operations, so they can be neither compiled nor replayed."""
    full_precision: bool = False
    """Matrix products must not be rounded to TF32."""
    net: Literal["mlp"] | None = None
    """The only kind of network that it can train."""
    outputs: int | None = None
    """Number of network outputs, if the likelihood does not determine it."""
    batches_per_step: int = 1
    max_steps: int | None = None
    """It takes at most this many of the R local steps."""
    mapped: bool = True
    """`begin`, `step` and `end` must be mapped over stacked clients. If not, they accept any leading axes."""
    shuffled: bool = True
    """Batches are shuffled. Steps that do not depend on the order of a full batch need not have it shuffled."""
    at_once: int | None = None
    """The largest number of clients that a CPU trains or adapts together; None for as many as fit."""


class Habits(NamedTuple):
    """What the method's paper does where a config says nothing."""

    init: Init = "torch"
    """Initialisation of the network."""
    pixels: Pixels = "signed"
    """Scale of image inputs."""
    trains: Literal["all", "chosen"] = "chosen"
    """Which clients train in a round: all of them, or only those whose uploads are averaged."""


@dataclass(frozen=True)
class Method:
    """A federated method. Its fields are hyper-parameters, with the paper's values as defaults."""

    about: ClassVar[About]
    habits: ClassVar[Habits] = Habits()

    def __post_init__(self) -> None:
        check(self)

    @property
    def needs(self) -> Needs:
        """What the method requires of the data, the network and the engine; may depend on hyper-parameters."""
        return Needs()

    # Server

    def init(self, theta: Tensor, num_clients: int, net: Net) -> State:
        """Return the first server state from initial parameters theta (T,) of the network."""
        return theta

    def download(self, server: State, clients: Tensor) -> State:
        """Return what each of the clients (n,) receives, stacked along a new first axis."""
        return broadcast(server, len(clients))

    def aggregate(self, server: State, uploads: State, sizes: Tensor, clients: Tensor) -> State:
        """Return the next server state from the uploads (n, ...) of the clients (n,) with `sizes` (n,) examples."""
        return weighted_mean(uploads, sizes)

    def leave(self, server: State, client: int, kept: State) -> State:
        """Return the server state without a client's contribution. Default: the state, which forgets nothing.

        kept: the client's own state, which it sends when it leaves.
        """
        return server

    def check_upload(self, server: State, upload: State, limits: Limits) -> str | None:
        """Return why no honest client sends this upload of finite numbers, or None. Needed with `about.mean_only`."""
        return None

    # Client

    def enrol(self, received: State) -> State:
        """Return the state of a client that takes part for the first time. Default: clients remember nothing."""
        return ()

    def begin(self, client: State, received: State, shard: Shard) -> State:
        """Return the local state at the start of a round. Default: the received model."""
        return LocalModel(received)

    def noise_shape(self, model: Model, batch_size: int) -> tuple[int, ...]:
        """Return the shape of the standard normal noise of one step. Default: no noise.

        If it depends on the batch size b, it is (b, ...): each example has its own noise.
        """
        return ()

    def step(self, model: Model, local: State, batches: tuple[Batch, ...], noise: Tensor) -> State:
        """Take one of the R local steps. It may overwrite the memory of `local` if `begin` has made copies."""
        raise NotImplementedError

    def end(self, local: State) -> tuple[State, State]:
        """Return the client's new state and its upload. Default: keep nothing and upload the trained model."""
        return (), local.theta

    # Prediction

    def prepare(self, data: Adaptation) -> State:
        """Return what `adapt` needs of a client's data, random draws included. Default: nothing."""
        return ()

    def adapt(self, model: Model, client: State, received: State, prepared: State) -> State:
        """Return the state of a client's personal model. Default: the client's state.

        Draw random numbers in `prepare` or in a function called by `call_stacked`: vmap adapts many clients at once.
        """
        return client

    def views(self, client: State, received: State) -> dict[str, State]:
        """Return further personal models to evaluate, by name, as states that `predict` accepts."""
        return {}

    def posterior(self, state: State) -> MeanField | None:
        """Return the Gaussian over the weights (T,) of a client's or the server's model; sigma is 0 for one network.

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


def adapts(method: Method) -> bool:
    """Return whether a method makes personal models at prediction time; it follows from overriding `adapt`."""
    return type(method).adapt is not Method.adapt


def is_used(weight: float) -> bool:
    """Return whether a term with this weight is computed. The weight may be a tensor, see `methods.varied`."""
    return isinstance(weight, Tensor) or weight != 0


def weights_posterior(method: Method, state: State) -> MeanField:
    """Return `method.posterior(state)`, or raise UserError for a model that is more than its weights."""
    q = method.posterior(state)
    if q is None:
        raise UserError(f"{method.about.title} has no distribution over weights: use method.name=pfedbayes")
    return q
