"""How a run is executed: device, precision, clients together or one after another, compiled or not."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch

from pfedbayes.constraints import AtLeastOne, Interval, check
from pfedbayes.data import Shards
from pfedbayes.engine.population.choose import Resting
from pfedbayes.engine.training import Training
from pfedbayes.errors import UserError
from pfedbayes.memory import keep_freed_memory
from pfedbayes.methods.base import Method
from pfedbayes.nets import Model
from pfedbayes.nets.convolutions import Convolutions

Over = Literal["vmap", "loop"]
Noise = Literal["torch", "philox"]
Precision = Literal["full", "tf32", "bf16"]
Dtype = Literal["float32", "float64"]
MOST_THREADS = 1024  # each has a stack of its own: many thousands end the process
Threads = Annotated[int, Interval(at_least=1, at_most=MOST_THREADS)]


@dataclass(frozen=True)
class Plan:
    """How a run is executed. Results agree to rounding across plans, and to the last bit within one."""

    device: str = "cpu"
    """"cpu" or "cuda"."""
    over: Over = "vmap"
    """Train clients together ("vmap") or one after another ("loop")."""
    chunk: AtLeastOne[int] | None = None
    """The largest number of clients to train together; None for all."""
    threads: Threads | None = None
    """The number of CPU threads; None to leave torch's setting."""
    dtype: Dtype = "float32"
    """The type of floating-point numbers."""
    compile: bool = False
    """Compile local steps (only with "vmap")."""
    graph: bool = False
    """Let a GPU replay the R steps of a round as one launch."""
    noise: Noise = "torch"
    """The generator of the weight noise in training, see `maths.random`: other numbers, same distribution."""
    precision: Precision = "full"
    """Precision on a GPU: "tf32" rounds inputs of matrix products to 10 bits, "bf16" runs the network in bfloat16."""
    convolutions: Convolutions = "native"
    """torch's own convolutions, or matrix products, which are faster for many networks on a GPU."""
    resting: Resting | None = None
    """Where clients' states rest between rounds; None to let the federation decide."""

    def __post_init__(self) -> None:
        check(self)
        if self.graph and (self.device, self.over, self.noise) != ("cuda", "vmap", "philox"):
            raise UserError(
                "execution.graph replays clients together on a GPU: set --device cuda, execution.over=vmap and "
                "execution.noise=philox too, or leave it out"
            )
        if self.compile and self.over == "loop":
            raise UserError("execution.compile compiles clients together: set execution.over=vmap too, or leave it out")

    def describe(self) -> list[str]:
        """Return the main choices of the plan, to be shown to users."""
        switches = {"compiled": self.compile, "replayed": self.graph, self.precision: self.precision != "full"}
        return [self.device, self.over, *(word for word, on in switches.items() if on)]

    def on(self, device: str) -> Plan:
        """Return the plan for another device, without the options that only its own device supports."""
        if device == self.device:
            return self
        threads = None if device == "cuda" else default_threads()
        return replace(self, device=device, threads=threads, graph=False, precision="full", convolutions="native")

    def activate(self) -> None:
        """Set torch's global switches: threads, deterministic kernels and the precision of matrix products.

        On a CPU that trains in chunks, also keep freed memory: clients' states take much of it, anew every round.
        """
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.device == "cpu" and self.chunk:
            keep_freed_memory()
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.allow_tf32 = self.precision == "tf32"
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")

    def fit(self, model: Model) -> Model:
        """Return the model as this plan computes it."""
        net = model.net.fitted(self.convolutions, contiguous=self.compile and self.device == "cuda")
        return model._replace(net=net, half=self.precision == "bf16")


def choose_device(device: str) -> str:
    """Return the device to use: resolve "auto", and refuse an unknown device or a missing GPU."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise UserError(f"there is no device {device!r}: use --device auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda needs a GPU, but torch finds none: use --device cpu or --device auto")
    return device


def default_threads() -> int:
    """Return the number of threads that torch chose, or that OMP_NUM_THREADS names."""
    return min(torch.get_num_threads(), MOST_THREADS)


def has_compiler(device: str) -> bool:
    """Return whether torch.compile has what it needs: a C++ compiler for a CPU, Triton for a GPU."""
    if device == "cuda":
        return importlib.util.find_spec("triton") is not None
    return shutil.which(os.environ.get("CXX", "g++")) is not None


# Parameter updates after which compiling, which takes up to half a minute, has paid for itself.
UPDATES_WORTH_COMPILING = 3 * 10**9
# Parameters that a CPU trains at once: more do not stay in its caches, fewer do not keep it busy.
PARAMETERS_AT_ONCE = 2**20


def is_long(model: Model, client_steps: int) -> bool:
    """Return whether a run is long enough to repay a search for the fastest plan."""
    return client_steps * model.net.num_params > UPDATES_WORTH_COMPILING


def choose_plan(
    model: Model,
    method: Method,
    device: str = "auto",
    dtype: Dtype = "float32",
    client_steps: int = 0,
    at_once: int = 1,
    over: Over | None = None,
    largest: int = 0,
) -> Plan:
    """Return the plan that is expected to be fastest.

    Clients train together where the method allows it, except with convolutions on a CPU. On a GPU, convolutions use
    TF32 unless the method needs full precision: it saves time and did not change accuracies (`benchmarks.precision`).

    client_steps: the local steps of all clients in the run; long runs are compiled where possible. at_once: the number
    of clients that train in a round. over: what was measured to be faster, see `Federation.faster_over`. largest: the
    number of examples in the largest mini-batch.
    """
    device = choose_device(device)
    on_gpu = device == "cuda"
    images_on_cpu, images_on_gpu = (model.net.convolutional and on_gpu == gpu for gpu in (False, True))
    together = over == "vmap" if over else not method.needs.loop and not images_on_cpu
    one_shape = together and not method.needs.eager
    long = is_long(model, client_steps)
    units = largest * (model.net.num_units or 0)
    most = min(PARAMETERS_AT_ONCE // model.net.num_params, PARAMETERS_AT_ONCE // max(1, units), at_once)
    most = max(1, min(most, method.needs.at_once or most))
    return Plan(
        device=device,
        over="vmap" if together else "loop",
        chunk=None if on_gpu or not together else _chunk(at_once, most),
        threads=None if on_gpu else default_threads(),
        dtype=dtype,
        compile=one_shape and long and not images_on_cpu and has_compiler(device),
        graph=one_shape and on_gpu,
        noise="philox" if on_gpu and together else "torch",  # philox launches too many kernels for a single client
        precision="tf32" if images_on_gpu and dtype == "float32" and not method.needs.full_precision else "full",
        convolutions="matmul" if images_on_gpu else "native",
    )


def _chunk(count: int, most: int) -> int | None:
    """Return how many of `count` clients to train at a time: at most `most`, in equal chunks if possible."""
    if count <= most:
        return None
    return next((size for size in range(most, most // 2, -1) if count % size == 0), most)


def plan_for(
    model: Model,
    method: Method,
    training: Training,
    num_clients: int,
    num_seeds: int,
    device: str = "auto",
    dtype: Dtype = "float32",
    over: Over | None = None,
    largest: int = 0,
) -> Plan:
    """Return the plan for a whole run."""
    client_steps, at_once = run_size(method, training, num_clients, num_seeds)
    return choose_plan(model, method, device, dtype, client_steps, at_once, over, largest)


def largest_batch(shards: Shards, method: Method, training: Training) -> int:
    """Return the number of examples in the largest mini-batch."""
    largest = max(map(len, shards.train), default=0)
    return largest if method.needs.full_batch else min(largest, training.batch_size)


def run_size(method: Method, training: Training, num_clients: int, num_seeds: int) -> tuple[int, int]:
    """Return the local steps of all clients in a run, and the number of clients that train in a round."""
    chosen = num_clients if training.trained_clients(method) == "all" else training.participants or num_clients
    per_seed = 1 if method.needs.pooled_data else chosen
    return training.rounds * training.local_steps * per_seed * num_seeds, per_seed * num_seeds
