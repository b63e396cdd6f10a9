"""What the section [data] of an experiment says."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

Name = Literal["mnist", "fashion-mnist", "cifar10", "blobs", "regression", "files"]
Size = Literal["small", "medium", "large"]
Labels = Literal["two-block", "sliding", "random", "dirichlet", "iid"]
Split = Literal["stratified", "shuffle", "overlap"]
Task = Literal["classification", "regression"]


@dataclass(frozen=True)
class Protocol:
    """The paper's way of dealing one set: clients, and per size the (train, test) images of each label of a client.

    A block is what one client takes of one label; it is the same for all sizes, so that training sets are nested.
    """

    clients: int
    block: int
    sizes: dict[Size, tuple[int, int]]


DIGITS = Protocol(clients=10, block=1200, sizes={"small": (50, 950), "medium": (200, 800), "large": (900, 300)})
PROTOCOLS: dict[Name, Protocol] = {
    "mnist": DIGITS,
    "fashion-mnist": DIGITS,
    "cifar10": Protocol(clients=20, block=600, sizes={"small": (25, 475), "medium": (100, 400), "large": (450, 150)}),
}
# Settings that count for one kind of data alone.
OF_FILES = ("path", "target", "client_column", "split_column", "task", "categories", "ignore", "image_size")
OF_OTHERS = (
    "size", "clients", "labels", "labels_per_client", "train_per_label", "test_per_label", "examples", "alpha", "split",
    "features", "classes", "noise", "dir",
)  # fmt: skip
SYNTHETIC_CLIENTS = 10
SYNTHETIC_EXAMPLES = 200


@dataclass(frozen=True)
class DataConfig:
    """Which data, and how they are dealt to the clients.

    name: a published set of images, one of two synthetic sets, "blobs" (classification) and "regression", or "files".
    labels: which labels a client holds. "two-block", "sliding" and "random" give it labels_per_client of them and
      the same number of images of each; "dirichlet" (with alpha) and "iid" deal out the whole pool.
    How many images, from strongest to weakest: train_per_label with test_per_label; examples, the number per
      client for training and test together (for "dirichlet" on average), cut by test_fraction; size, the paper's.
    split: "stratified" has exact counts; "shuffle" is the unstratified cut in file order, probably the authors' own;
      "overlap" lets every client draw from all images, so that one is tested on what others train on. That flatters
      a shared model, and is there to explain published figures.
    validation: the fraction of each client's training data that is held out.
    certify: the fraction of what then is left that the federation never sees, for `pfedbayes certify`.
    features, classes and noise (a standard deviation) are for the synthetic sets.
    dir: where to look first for the files of a published set; --data-dir goes before it.

    For "files", one's own data (docs/own_data.md), of the above only test_fraction, validation and seed count, and:
    path: a file with a client_column, a folder with a file per client, or a folder client/class/image.
    target: the column to be predicted; task: inferred from it if not given.
    split_column: says of each row whether it is for "train", "validation" or "test", instead of the two fractions.
    categories: columns to be taken as categories although they hold numbers; ignore: columns to be left out.
    image_size: height and width to which images are brought.
    """

    name: Name = "mnist"
    size: Size | None = "small"
    clients: int | None = None  # None: the paper's number
    labels: Labels = "two-block"
    labels_per_client: int = 5
    train_per_label: int | None = None
    test_per_label: int | None = None
    examples: int | None = None
    alpha: float = 0.5
    test_fraction: float = 0.2
    split: Split = "stratified"
    seed: int = 1
    validation: float = 0.0
    certify: float = 0.0
    features: int = 4
    classes: int = 10
    noise: float = 0.5
    dir: str | None = None
    path: str | None = None
    target: str | None = None
    client_column: str | None = None
    split_column: str | None = None
    task: Task | None = None
    categories: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    image_size: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for key, choices in (("name", Name), ("labels", Labels), ("split", Split)):
            _check(getattr(self, key) in get_args(choices), key, getattr(self, key), _either(choices))
        _check(self.size is None or self.size in get_args(Size), "size", self.size, _either(Size))
        for key, least in (
            ("clients", 1),
            ("labels_per_client", 1),
            ("train_per_label", 1),
            ("test_per_label", 0),
            ("examples", 2),
            ("features", 1),
            ("classes", 2),
        ):
            value = getattr(self, key)
            _check(value is None or value >= least, key, value, f"at least {least}")
        _check(0 <= self.seed < 2**63, "seed", self.seed, "between 0 and 2**63 - 1")
        _check(0 < self.alpha < math.inf, "alpha", self.alpha, "positive")
        _check(0 <= self.noise < math.inf, "noise", self.noise, "0 or more")
        for key in ("test_fraction", "validation", "certify"):
            _check(0 <= getattr(self, key) < 1, key, getattr(self, key), "at least 0 and less than 1")
        _check(self.task is None or self.task in get_args(Task), "task", self.task, _either(Task))
        if (self.name == "files") != (self.path is not None):
            raise ValueError('path (--data) and name = "files" belong together: give both or neither')
        if self.name != "files" and (given := [key for key in OF_FILES if getattr(self, key)]):
            raise ValueError(f"{given[0]} is for files of one's own: give their path too (--data)")
        if self.image_size is not None and min(self.image_size) < 1:
            raise ValueError(f"image_size = {list(self.image_size)}: must be height and width, at least 1 each")
        if self.name != "files":
            self._check_counts()

    def _check_counts(self) -> None:
        if (self.train_per_label is None) != (self.test_per_label is None):
            raise ValueError("train_per_label and test_per_label belong together: give both or neither")
        if self.train_per_label is not None and self.examples is not None:
            raise ValueError("train_per_label and examples both say how many images there are: give one of them")
        if self.name == "regression" and self.split != "stratified":
            raise ValueError(f'name = "regression" has no labels to go by with split = "{self.split}": leave split out')
        if self.split == "overlap" and (self.validation or self.certify):
            raise ValueError(
                'split = "overlap" lets clients train on what others hold out: leave validation and certify at 0'
            )
        if not self.by_label:
            if self.train_per_label is not None:
                raise ValueError(f'labels = "{self.labels}" takes examples and test_fraction, not train_per_label')
            if self.split != "stratified":
                raise ValueError(f'labels = "{self.labels}" cannot go with split = "{self.split}": leave split out')
        elif self.name != "regression":
            train, _, _ = self.per_label
            if train < 1:
                raise ValueError(
                    f"examples = {self.examples_per_client} leaves no training example for each of "
                    f"{self.labels_per_client} labels: give more examples or a smaller test_fraction"
                )

    def section(self) -> dict[str, Any]:
        """Plain values, as in a config: those that count for this kind of data."""
        without = OF_OTHERS if self.name == "files" else OF_FILES
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in without}

    @property
    def title(self) -> str:
        """What to call the data."""
        if self.path is not None:
            return Path(self.path).stem
        return " ".join(filter(None, [self.name, self.size]))

    @property
    def by_label(self) -> bool:
        """Whether a client is dealt fixed numbers of images of its own labels."""
        return self.labels not in ("dirichlet", "iid")

    @property
    def num_clients(self) -> int:
        if self.clients is not None:
            return self.clients
        return PROTOCOLS[self.name].clients if self.name in PROTOCOLS else SYNTHETIC_CLIENTS

    @property
    def examples_per_client(self) -> int | None:
        """Examples of a client, training and test together; None: as many as there are."""
        if self.examples is None and self.name not in PROTOCOLS:
            return SYNTHETIC_EXAMPLES
        return self.examples

    @property
    def per_label(self) -> tuple[int, int, int]:
        """Of each label of a client: images to train on, images to test on, and the block both are taken from."""
        if self.train_per_label is not None and self.test_per_label is not None:
            return self.train_per_label, self.test_per_label, self.train_per_label + self.test_per_label
        if self.examples_per_client is not None:
            block = self.examples_per_client // self.labels_per_client
            test = rounded(self.test_fraction * block)
            return block - test, test, block
        if self.size is None:
            raise ValueError("how many images? Give size, or examples, or train_per_label with test_per_label")
        protocol = PROTOCOLS[self.name]
        return *protocol.sizes[self.size], protocol.block


def rounded(number: float) -> int:
    """The nearest whole number, halves upwards."""
    return math.floor(number + 0.5)


def _either(choices: object) -> str:
    return "one of " + ", ".join(f'"{choice}"' for choice in get_args(choices))


def _check(holds: bool, key: str, value: object, must_be: str) -> None:
    if not holds:
        raise ValueError(f"{key} = {value!r}: must be {must_be}")
