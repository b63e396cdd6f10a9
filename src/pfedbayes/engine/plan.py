"""How a run is executed: device, precision, clients together or in turn, compiled or not."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass, replace
from typing import Literal

import torch

from pfedbayes.engine.population import Resting
from pfedbayes.errors import UserError
from pfedbayes.memory import keep_freed_memory
from pfedbayes.methods.base import Method
from pfedbayes.nets import Model
from pfedbayes.nets.convolutions import Convolutions

Over = Literal["vmap", "loop"]
Noise = Literal["torch", "philox"]
Precision = Literal["full", "tf32", "bf16"]
Dtype = Literal["float32", "float64"]


@dataclass(frozen=True)
class Plan:
    """How a run is executed. Results agree to rounding across plans and to the last bit within one.

    over: clients trained together ("vmap") or one after another ("loop"); chunk: at most so many together. compile:
    local steps are compiled (clients together only). graph: a GPU replays the R steps of a round as one launch.
    noise: which generator draws the weight noise of training, see `streams`; other numbers, the same distribution.
    convolutions: torch's own, or as matrix products, which is faster for many networks on a GPU.
    precision of matrix products on a GPU: "tf32" rounds their inputs to 10 bits, "bf16" runs the network in bfloat16.
    resting: where the states of clients lie between rounds; the federation decides if it is None.
    """

    device: str = "cpu"
    over: Over = "vmap"
    chunk: int | None = None
    threads: int | None = None
    dtype: Dtype = "float32"
    compile: bool = False
    graph: bool = False
    noise: Noise = "torch"
    precision: Precision = "full"
    convolutions: Convolutions = "native"
    resting: Resting | None = None

    def __post_init__(self) -> None:
        if self.graph and (self.device, self.over, self.noise) != ("cuda", "vmap", "philox"):
            raise UserError(
                "execution.graph replays clients together on a GPU, with their own noise: it goes with "
                "--device cuda, execution.over=vmap and execution.noise=philox"
            )
        if self.compile and self.over == "loop":
            raise UserError("execution.compile compiles clients together: set execution.over=vmap too, or leave it out")

    def words(self) -> list[str]:
        """What stands out in it, for people."""
        switches = {"compiled": self.compile, "replayed": self.graph, self.precision: self.precision != "full"}
        return [self.device, self.over, *(word for word, on in switches.items() if on)]

    def on(self, device: str) -> Plan:
        """The plan without what only its own device has, if it is to be another one."""
        if device == self.device:
            return self
        threads = None if device == "cuda" else torch.get_num_threads()
        return replace(self, device=device, threads=threads, graph=False, precision="full", convolutions="native")

    def activate(self) -> None:
        """Set torch's global switches: threads, and on a GPU deterministic kernels and the precision of products.
        Where a CPU trains many clients, their states take much memory that is freed every round: it is kept."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.device == "cpu" and self.chunk:
            keep_freed_memory()
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.allow_tf32 = self.precision == "tf32"
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")

    def fit(self, model: Model) -> Model:
        """The model as this plan computes it."""
        net = model.net.fitted(self.convolutions, contiguous=self.compile and self.device == "cuda")
        return model._replace(net=net, half=self.precision == "bf16")


def choose_device(device: str) -> str:
    """Turn "auto" into what there is; refuse what is no device, and a GPU that is not there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise UserError(f"there is no device {device!r}: use --device auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("a GPU was asked for (--device cuda) but torch sees none: use --device cpu or --device auto")
    return device


def has_compiler(device: str) -> bool:
    """Whether torch.compile has what it needs: a C++ compiler for a CPU, Triton for a GPU."""
    if device == "cuda":
        return importlib.util.find_spec("triton") is not None
    return shutil.which(os.environ.get("CXX", "g++")) is not None


# Compiling takes up to half a minute; it pays for itself after about so many parameters updated.
WORTH_COMPILING = 3 * 10**9
# A CPU works on so many parameters at a time: more do not stay in its caches, fewer do not keep it busy.
TOGETHER = 2**20
# And on so many whole training sets, where a batch is one: more take memory that has to be found anew every round.
WHOLE_SETS = 5


def is_long(model: Model, client_steps: int) -> bool:
    """Whether a run is long enough to look for the fastest way first."""
    return client_steps * model.net.num_params > WORTH_COMPILING


def choose_plan(
    model: Model,
    method: Method,
    device: str = "auto",
    dtype: Dtype = "float32",
    client_steps: int = 0,
    at_once: int = 1,
    over: Over | None = None,
) -> Plan:
    """vmap where the method allows it, but for convolutions on a CPU, unless it was measured to be faster there.
    Convolutions on a GPU in TF32, which gains time and was not seen to change accuracies (`benchmarks.precision`), if
    the method bears it.

    client_steps: how many local steps of single clients are ahead; long runs are compiled where they can be. at_once:
    how many clients train in a round. over: what has been measured to be faster, see `Federation.faster_over`.
    """
    device = choose_device(device)
    on_gpu = device == "cuda"
    images_on_cpu, images_on_gpu = (model.net.convolutional and on_gpu == gpu for gpu in (False, True))
    together = over == "vmap" if over else not method.needs.loop and not images_on_cpu
    one_shape = together and not method.needs.eager
    long = is_long(model, client_steps)
    most = min(max(1, TOGETHER // model.net.num_params), WHOLE_SETS if method.needs.full_batch else at_once)
    return Plan(
        device=device,
        over="vmap" if together else "loop",
        chunk=None if on_gpu or not together else _chunk(at_once, most),
        threads=None if on_gpu else torch.get_num_threads(),
        dtype=dtype,
        compile=one_shape and long and not images_on_cpu and has_compiler(device),
        graph=one_shape and on_gpu,
        noise="philox" if on_gpu and together else "torch",  # for one client's few numbers it launches too much
        precision="tf32" if images_on_gpu and dtype == "float32" and not method.needs.full_precision else "full",
        convolutions="matmul" if images_on_gpu else "native",
    )


def _chunk(count: int, most: int) -> int | None:
    """Clients at a time, of `count`: at most so many, and in chunks of one size if there is a size near that."""
    if count <= most:
        return None
    return next((size for size in range(most, most // 2, -1) if count % size == 0), most)
