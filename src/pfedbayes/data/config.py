"""The section [data] of an experiment."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pfedbayes.constraints import AtLeastOne, Count, Interval, NonNegative, Seed, check
from pfedbayes.memory import host_memory

Name = Literal["mnist", "fashion-mnist", "cifar10", "blobs", "regression", "files"]
Size = Literal["small", "medium", "large"]
Labels = Literal["two-block", "sliding", "random", "dirichlet", "iid"]
SplitRule = Literal["stratified", "shuffle", "overlap"]
Task = Literal["classification", "regression", "ordinal", "count", "survival"]
Fraction = Annotated[float, Interval(at_least=0, less_than=1)]

PIECES = 6
MAX_PIECES = 32


@dataclass(frozen=True)
class Protocol:
    """The paper's way of dealing one data set."""

    clients: int
    block: int
    """Images that one client takes of one label; the same for all sizes, so that training sets are nested."""
    sizes: dict[Size, tuple[int, int]]
    """Per size, the numbers of training and test images per label of a client."""


DIGITS = Protocol(clients=10, block=1200, sizes={"small": (50, 950), "medium": (200, 800), "large": (900, 300)})
PROTOCOLS: dict[Name, Protocol] = {
    "mnist": DIGITS,
    "fashion-mnist": DIGITS,
    "cifar10": Protocol(clients=20, block=600, sizes={"small": (25, 475), "medium": (100, 400), "large": (450, 150)}),
}
# Settings that apply to one kind of data only.
FILES_ONLY = ("path", "target", "client_column", "split_column", "task", "categories", "ignore", "image_size",
              "pieces", "order", "event", "keep", "missing", "day_first", "drop_missing_target")  # fmt: skip
NOT_FILES = (
    "size", "clients", "labels", "labels_per_client", "train_per_label", "test_per_label", "examples", "alpha", "split",
    "features", "classes", "noise", "dir",
)  # fmt: skip
SYNTHETIC_CLIENTS = 10
SYNTHETIC_EXAMPLES = 200


@dataclass(frozen=True)
class DataConfig:
    """Which data to use, and how to deal them to the clients.

    The number of examples comes from the first of these that is given: train_per_label with test_per_label; examples,
    split by test_fraction; size.

    For "files" (docs/own_data.md) only test_fraction, validation, certify, seed and the fields from `path` on apply.
    """

    name: Name = "mnist"
    """A published image set, one of the synthetic sets "blobs" and "regression", or "files"."""
    size: Size | None = "small"
    """The paper's size of the data sets."""
    clients: Count | None = None
    """Number of clients; None for the paper's number."""
    labels: Labels = "two-block"
    """Which labels a client holds. "two-block", "sliding" and "random" give it labels_per_client labels with the same
    number of images each; "dirichlet" and "iid" deal out the whole pool."""
    labels_per_client: Count = 5
    train_per_label: AtLeastOne[int] | None = None
    """Training images of each label of a client."""
    test_per_label: NonNegative[int] | None = None
    """Test images of each label of a client."""
    examples: Annotated[int, Interval(at_least=2)] | None = None
    """Examples per client, training and test together; for "dirichlet" on average."""
    alpha: Annotated[float, Interval(more_than=0, less_than=math.inf)] = 0.5
    """Concentration of "dirichlet"."""
    test_fraction: Fraction = 0.2
    """Share of each client's examples for test."""
    split: SplitRule = "stratified"
    """"stratified" has exact counts per label. "shuffle" splits in file order without stratification, probably as the
    authors did. "overlap" lets every client draw from all images, so that clients are tested on images that others
    train on; this flatters a shared model and serves to explain published results."""
    seed: Seed = 1
    validation: Fraction = 0.0
    """Share of each client's training data that is held out."""
    certify: Fraction = 0.0
    """Share of the remaining training data that is withheld from the federation, for `pfedbayes certify`."""
    features: AtLeastOne[int] = 4
    """Number of features of a synthetic set."""
    classes: Annotated[int, Interval(at_least=2, at_most=10**6)] = 10
    """Number of classes of "blobs"."""
    noise: Annotated[float, Interval(at_least=0, less_than=math.inf)] = 0.5
    """Standard deviation of the noise of a synthetic set."""
    dir: str | None = None
    """First folder to search for a published set; --data-dir takes precedence."""
    path: str | None = None
    """A file with a client column, a folder with one file per client, or a folder client/class/image."""
    target: str | None = None
    """The column to predict."""
    client_column: str | None = None
    """The column with the client of each row."""
    split_column: str | None = None
    """A column that assigns each row to "train", "validation" or "test", instead of the two fractions."""
    task: Task | None = None
    """Classification or regression is inferred from the target if not given, and survival from `event`; a count and an
    order are not."""
    event: str | None = None
    """For survival, the column that says whether the event happened at the time in `target` (1) or had not happened by
    then (0)."""
    order: tuple[str, ...] = ()
    """The classes of an ordinal target, lowest first; numbers need none."""
    categories: tuple[str, ...] = ()
    """Columns of numbers that are categories."""
    ignore: tuple[str, ...] = ()
    """Columns to leave out."""
    keep: tuple[str, ...] = ()
    """Columns to use although they look like identifiers."""
    missing: tuple[str, ...] = ()
    """Texts that mean a missing value, besides empty cells, NA, N/A, NaN, null and ?."""
    day_first: bool | None = None
    """Whether 3/4/2020 is the third of April, where no row of the column tells."""
    drop_missing_target: bool = False
    """Leave out the rows without a target."""
    image_size: tuple[int, int] | None = None
    """Height and width to which images are resized."""
    pieces: Annotated[int, Interval(at_least=0, at_most=MAX_PIECES)] = PIECES
    """Bins of the piecewise-linear encoding of a column of numbers; 0 for no such encoding."""

    def __post_init__(self) -> None:
        check(self)
        for key, choices in (("name", Name), ("size", Size), ("labels", Labels), ("split", SplitRule), ("task", Task)):
            value = getattr(self, key)
            if value not in get_args(choices) and not (value is None and key in ("size", "task")):
                listed = ", ".join(f'"{choice}"' for choice in get_args(choices))
                raise ValueError(f"{key} must be one of {listed}, got {value!r}")
        if (self.name == "files") != (self.path is not None):
            raise ValueError('path (--data) and name = "files" belong together: give both or neither')
        defaults = {field.name: field.default for field in fields(self)}
        if self.name != "files" and (given := [key for key in FILES_ONLY if getattr(self, key) != defaults[key]]):
            raise ValueError(f"{given[0]} applies only to your own files: give their path too (--data)")
        if self.event is not None and self.task not in (None, "survival"):
            raise ValueError(f"event (--event) makes the task survival, but task is {self.task}: leave one of them out")
        if self.task == "survival" and self.event is None:
            raise ValueError("survival needs the column that says whether the event happened: give event (--event)")
        if self.event is not None and self.event in (self.target, self.client_column, self.split_column):
            raise ValueError(f"event is {self.event!r}, which is another column already: name the column of events")
        if self.image_size is not None and min(self.image_size) < 1:
            raise ValueError(f"image_size must be height and width of at least 1, got {list(self.image_size)}")
        if self.pieces == 1:
            raise ValueError("pieces = 1 is a straight line, which a network has anyway: give 0 or at least 2")
        if self.name != "files":
            self._check_counts()

    def _check_counts(self) -> None:
        if self.name not in PROTOCOLS and (needed := self._synthetic_bytes) > host_memory():
            raise ValueError(
                f"a synthetic set of this size needs {needed / 1e9:,.0f} GB of memory, and this machine has "
                f"{host_memory() / 1e9:,.0f} GB: give fewer clients, examples, features or classes"
            )
        if (self.train_per_label is None) != (self.test_per_label is None):
            raise ValueError("train_per_label and test_per_label belong together: give both or neither")
        if self.train_per_label is not None and self.examples is not None:
            raise ValueError("train_per_label and examples both set the number of images: give one of them")
        if self.name == "regression" and self.split != "stratified":
            raise ValueError(f'name = "regression" has no labels for split = "{self.split}": leave split out')
        if self.split == "overlap" and (self.validation or self.certify):
            raise ValueError(
                'split = "overlap" lets clients train on the held-out data of others: leave validation and certify at 0'
            )
        if not self.by_label:
            if self.train_per_label is not None:
                raise ValueError(f'labels = "{self.labels}" has no train_per_label: give examples and test_fraction')
            if self.split != "stratified":
                raise ValueError(f'labels = "{self.labels}" does not go with split = "{self.split}": leave split out')
        elif self.name != "regression":
            train, _, _ = self.per_label
            if train < 1:
                raise ValueError(
                    f"examples = {self.examples_per_client} leaves no training example for each of "
                    f"{self.labels_per_client} labels: give more examples or a smaller test_fraction"
                )

    def section(self) -> dict[str, Any]:
        """Return the settings that apply to this kind of data, as in a config file."""
        without = NOT_FILES if self.name == "files" else FILES_ONLY
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in without}

    @property
    def title(self) -> str:
        """A short name of the data."""
        if self.path is not None:
            return Path(self.path).stem
        return " ".join(filter(None, [self.name, self.size]))

    @property
    def by_label(self) -> bool:
        """Whether clients are dealt fixed numbers of images per label."""
        return self.labels not in ("dirichlet", "iid")

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        if self.clients is not None:
            return self.clients
        return PROTOCOLS[self.name].clients if self.name in PROTOCOLS else SYNTHETIC_CLIENTS

    @property
    def examples_per_client(self) -> int | None:
        """Examples of a client, training and test together; None for all that there are."""
        if self.examples is None and self.name not in PROTOCOLS:
            return SYNTHETIC_EXAMPLES
        return self.examples

    @property
    def _synthetic_bytes(self) -> int:
        """Memory of a synthetic set while it is made: its features and their noise, in double precision."""
        of_labels = self.labels_per_client * ((self.train_per_label or 0) + (self.test_per_label or 0))
        examples = self.examples or of_labels or SYNTHETIC_EXAMPLES
        return 16 * self.features * examples * (self.num_clients + self.classes // self.labels_per_client)

    @property
    def per_label(self) -> tuple[int, int, int]:
        """Training images, test images, and size of the block they are taken from, of each label of a client."""
        if self.train_per_label is not None and self.test_per_label is not None:
            return self.train_per_label, self.test_per_label, self.train_per_label + self.test_per_label
        if self.examples_per_client is not None:
            block = self.examples_per_client // self.labels_per_client
            test = rounded(self.test_fraction * block)
            return block - test, test, block
        if self.size is None:
            raise ValueError(
                "the number of images is not set: give size, examples, or train_per_label with test_per_label"
            )
        protocol = PROTOCOLS[self.name]
        return *protocol.sizes[self.size], protocol.block


def rounded(number: float) -> int:
    """Round to the nearest integer, halves upwards."""
    return math.floor(number + 0.5)
