"""Exported files and newcomers' files from a stranger: metadata that would run, write or shadow something."""

import json
import random
from pathlib import Path
from typing import Any

from ..damage import change, change_tensors, split_tensors, tensors_file
from ..trials import Command, Trial, Workshop
from ..values import TEXTS, some

FILES = {"north.safetensors": "new.csv", "shared.safetensors": "new.csv", "arrays.safetensors": "new.npz",
         "images.safetensors": "new.png", "times.safetensors": "new-times.csv",
         "ordinal.safetensors": "new.csv"}  # fmt: skip


def export(shop: Workshop) -> Trial:
    """A file with hostile or broken metadata, used alone or as a newcomer of a run."""
    rng = shop.rng
    name = rng.choice(list(FILES))
    newcomer = rng.random() < 0.2
    if newcomer:
        name, run = "north.safetensors", shop.copy("table")
        path = run / "newcomers" / f"{rng.choice(['north', 'far', 'east', 'SOUTH', ' '])}.safetensors"
        shop.bases.copy(name, path)
    else:
        path = shop.copy(name)
    rows = str(shop.bases.path(FILES[name]))
    how = rng.choice([_hostile] * 5 + [change_tensors] * 4 + [change])
    title = how(rng, path)
    if newcomer:
        return Trial(f"newcomer {path.name}: {title}", [["predict", str(run), "--client", path.stem, "--input", rows]])
    commands: list[Command] = [
        ["predict", str(path), "--input", rows], ["predict", str(path), "--input", rows, "-o", "out.csv"],
        ["export", str(path)], ["export", str(path), "-o", "out.safetensors"], ["export", str(path), "--shared"],
        ["predict", str(path), "--input", rows, "--json"],
    ]  # fmt: skip
    return Trial(f"{name}: {title}", [rng.choice(commands)], keep_if_refused=[path])


def _hostile(rng: random.Random, path: Path) -> str:
    """Change the metadata as somebody would who means harm."""
    canary = str(Path.cwd().parent / "canary")
    header, body = split_tensors(path.read_bytes())
    about = json.loads(header["__metadata__"]["client"])
    what = rng.choice(list(ATTACKS))
    ATTACKS[what](rng, about, header, canary)
    header["__metadata__"]["client"] = json.dumps(about)
    path.write_bytes(tensors_file(rng, header, body))
    return what


def _runs(rng: random.Random, about: Any, header: Any, canary: str) -> None:
    about["layers"] = None
    shell = ["sh", "-c", f"touch {canary}"]
    if rng.random() < 0.4:
        about["module"], about["preprocessing"]["shape"] = {"name": "subprocess:Popen"}, shell
        return
    about["module"] = rng.choice([
        {"name": "subprocess:Popen"}, {"name": "subprocess:run"}, {"name": "os:system"}, {"name": "builtins:exec"},
        {"name": "shutil:rmtree"}, {"name": "subprocess:Popen", "args": shell}, {"name": "builtins:open", "mode": "w"},
        {"name": "pathlib:Path.touch"}, {"name": "runpy:run_path"}, {"name": "antigravity:x"}, {"name": "os.path:join"},
        {"name": "torch:load"}, {"name": "code"}, {"name": "mlp"}, {"name": "mlp", "hidden": shell}, "subprocess:Popen",
    ])  # fmt: skip
    about["preprocessing"]["shape"] = rng.choice(
        [shell, [canary], canary, [f"touch {canary}"], [1], [], [-1], [10**12]]
    )


def _layers(rng: random.Random, about: Any, header: Any, canary: str) -> None:
    about["layers"] = rng.choice([
        [["Linear", {"in_features": 10**9, "out_features": 10**9}]],
        [["Linear", {"in_features": -1, "out_features": 2}]],
        [["Linear", {"in_features": "a", "out_features": 2}]], [["Linear", {}]], [["Linear"]], ["Linear"], [[]], [],
        "x", {},
        [["Conv2d", {"in_channels": 1, "out_channels": 1, "kernel_size": 0}]], [["Bilinear", {}]], [["forward", {}]],
        [["Conv2d", {"in_channels": 1, "out_channels": 3, "kernel_size": 99, "padding": 10**6}]],
        [["MaxPool2d", {"kernel_size": 0}]], [["Flatten", {"start_dim": 99, "end_dim": -99}]],
        [["ReLU", {"inplace": True}]],
        [["LayerNorm", {"normalized_shape": [10**6, 10**6]}]], [["GroupNorm", {"num_groups": 0, "num_channels": 4}]],
        about["layers"][:1], about["layers"] * 2, about["layers"] * 300 if about["layers"] else [],
        [["GELU", {"approximate": "x"}]],
        [["Linear", {"in_features": 4, "out_features": 3, "device": "meta"}]],
        [["Linear", {"in_features": True, "out_features": 3.5, "bias": "no"}]],
    ])  # fmt: skip


def _names(rng: random.Random, about: Any, header: Any, canary: str) -> None:
    about["client"] = rng.choice([*TEXTS, "../escaped", canary, "a" * 300, 7, None, ["x"], {"x": 1}, True])
    about["which"] = rng.choice(["personal", "personal", "shared", "x", None, 3])


def _statements(rng: random.Random, about: Any, header: Any, canary: str) -> None:
    about[rng.choice(["notes", "statements"])] = rng.choice(
        [[rng.choice(TEXTS)], [1], [None], "text", 5, None, ["x"] * 10**5]
    )


def _numbers(rng: random.Random, about: Any, header: Any, canary: str) -> None:
    about[rng.choice(["seed", "draws", "sigma_eps", "pixels", "learned_noise", "task", "format", "parameters"])] = some(
        rng
    )


def _columns(rng: random.Random, about: Any, header: Any, canary: str) -> None:
    preprocessing = about["preprocessing"]
    inputs, target = preprocessing["inputs"], preprocessing["target"]
    column = rng.choice(inputs) if inputs else {}
    field = rng.choice(["name", "kind", "mean", "deviation", "indicator", "categories", "edges", "centres"])
    kind = rng.random()
    if kind < 0.5 and column:
        column[field] = rng.choice([some(rng), 0, -1, "number", "category", ["a", "a"], [1], ["a"] * 1000, [0, 1, 2]])
    elif kind < 0.8:
        target[rng.choice(list(target))] = rng.choice(
            [some(rng), 0, [], ["a"], ["a", "a"], [1, 2], ["a"] * 5000, "regression"]
        )
    else:
        preprocessing[rng.choice(list(preprocessing))] = some(rng)


def _tensors(rng: random.Random, about: Any, header: Any, canary: str) -> None:
    names = [name for name in header if name != "__metadata__"]
    one, other = rng.choice(names), rng.choice(names)
    changes = {
        "swap": lambda: header.update({one: header[other], other: header[one]}),
        "gone": lambda: header.pop(one),
        "type": lambda: header[one].update(dtype=rng.choice(["I32", "F16", "BOOL", "U8", "F8_E4M3", "X", 7, "F64"])),
        "shape": lambda: header[one].update(
            shape=rng.choice([[], [0], [-1], [10**12], [1, *header[one]["shape"]], ["a"], None])
        ),
        "place": lambda: header[one].update(data_offsets=rng.choice([[0, 0], [0, 10**15], [-1, 4], [4, 0], [0], "x"])),
        "many": lambda: header.update(
            {f"t{k}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for k in range(2000)}
        ),
    }
    rng.choice(list(changes.values()))()


ATTACKS = {
    "a module to run": _runs, "layers": _layers, "names": _names, "statements": _statements, "numbers": _numbers,
    "columns": _columns, "tensors": _tensors,
}  # fmt: skip
