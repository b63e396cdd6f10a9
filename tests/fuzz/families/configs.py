"""Configs: TOML files and --set."""

import tomllib
from typing import Any

from ..bases import BASE, BLOBS, TINY
from ..damage import change_bytes, change_kind, toml
from ..trials import Trial, Workshop
from ..values import NUMBERS, TEXTS, dumped, mutated, some

SETTINGS: dict[str, list[str]] = {
    "data": ["name", "size", "clients", "labels", "labels_per_client", "train_per_label", "test_per_label", "examples",
             "alpha", "test_fraction", "split", "seed", "validation", "certify", "features", "classes", "noise", "dir",
             "path", "target", "client_column", "split_column", "task", "categories", "ignore", "image_size"],
    "net": ["name", "hidden", "activation", "head", "norm", "init", "sigma_eps", "settings"],
    "method": ["name", "zeta", "lr", "personal_lr", "server", "sigma", "sigma_init", "beta"],
    "training": ["rounds", "local_steps", "batch_size", "participants", "seed", "evaluate_every", "evaluate_window",
                 "patience", "train", "server_optimizer", "server_rate", "flip", "shift"],
    "evaluation": ["samples", "label_prior", "split", "estimators", "sampling", "clients", "average_every"],
    "execution": ["over", "chunk", "threads", "dtype", "compile", "graph", "noise", "precision", "convolutions",
                  "resting", "checkpoint_seconds"],
}  # fmt: skip
# Where a large number is a wish for long work, and no mistake.
WORK = {"rounds", "local_steps", "samples", "patience"}
METHODS = ["pfedbayes", "fedavg", "fedprox", "pfedme", "perfedavg", "bnfed", "heurfedamp", "pfedgp", "ditto", "fedrep"]
WORDS = ["blobs", "regression", "mnist", "files", "small", "iid", "dirichlet", "random", "loop", "vmap", "file", "host",
         "float16", "bfloat16", "tf32", "pairs", "activations", "momentum", "adam", "chosen", "all", "torch", "vgg",
         "cnn"]  # fmt: skip


def value(shop: Workshop, key: str) -> Any:
    """Return a value for a setting: of any kind, or of the right kind and extreme."""
    rng, kind = shop.rng, shop.rng.random()
    if kind < 0.5:
        chosen = some(rng)
    elif kind < 0.7:
        chosen = rng.choice(NUMBERS)
    elif kind < 0.85:
        chosen = rng.choice([*WORDS, *METHODS])
    else:
        chosen = [rng.choice([*NUMBERS, *TEXTS]) for _ in range(rng.randrange(4))]
    if key == "compile":  # to compile takes half a minute
        return False if chosen is True else chosen
    if key in WORK and isinstance(chosen, int | float) and chosen > 100:
        return 3
    return chosen


def _finish(shop: Workshop) -> list[str]:
    """Return how a run goes on: mostly not at all."""
    return ["--dry-run"] if shop.rng.random() < 0.9 else ["--out", "out"]


def config(shop: Workshop) -> Trial:
    """A TOML file with one or two wrong settings, or of wrong structure, or damaged."""
    rng = shop.rng
    path, kind = shop.folder / "experiment.toml", shop.rng.random()
    tree: Any = tomllib.loads(BASE)
    if kind < 0.6:
        titles = []
        for _ in range(rng.choice([1, 1, 2])):
            section = rng.choice(list(SETTINGS))
            key = rng.choice(SETTINGS[section]) if rng.random() < 0.95 else rng.choice(TEXTS)
            tree.setdefault(section, {})[key] = chosen = value(shop, key)
            titles.append(f"{section}.{key} = {str(chosen)[:60]!r}")
        path.write_bytes(toml(tree))
        title = ", ".join(titles)
    elif kind < 0.8:
        tree, title = mutated(rng, tree)
        path.write_bytes(toml(tree))
    else:
        path.write_text(BASE)
        title = (change_bytes if rng.random() < 0.8 else change_kind)(rng, path)
    small = [] if kind < 0.6 else [*BLOBS, "--set", "execution.compile=false"]  # nothing at all stands for MNIST
    return Trial(title, [["run", str(path), "--device", "cpu", *small, *_finish(shop)]])


def override(shop: Workshop) -> Trial:
    """--set with a wrong value or key."""
    rng = shop.rng
    texts = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        section = rng.choice(list(SETTINGS)) if rng.random() < 0.97 else rng.choice(TEXTS)
        key = rng.choice(SETTINGS.get(section, [""])) if rng.random() < 0.95 else rng.choice(TEXTS)
        chosen = value(shop, key)
        text = chosen if isinstance(chosen, str) and not chosen.startswith("@") else dumped(chosen)
        texts.append(
            rng.choice([f"{section}.{key}={text}"] * 12 + [f"{section}{key}", f"{section}.{key}", "=", f"={text}"])
        )
    texts = [text.replace("\x00", "") for text in texts]  # no command line can hold one
    given = [part for text in texts for part in ("--set", text)]
    return Trial(f"--set {texts}"[:300], [["run", *BLOBS, *TINY, *given, *_finish(shop)]])
