"""Searches for settings: their folders, their spaces, and the experiments that they begin with."""

import math
import random
from pathlib import Path

from ..bases import BLOBS, SEARCH, TINY
from ..damage import change, change_json
from ..trials import Trial, Workshop
from ..values import NUMBERS, TEXTS
from .configs import METHODS, SETTINGS, value

COUNTS = ["0", "1", "2", "3", "-1", "5", "1001", "1000000000", "1e9", "2.0", "nan", "", "x", "9" * 5000]
NAMES = [
    "zeta",
    "zeta",
    "rho0",
    "eta_personal",
    "eta_global",
    "prox",
    "eta",
    "spread",
    "confidence",
    "server",
    "name",
    "beta",
]


def tuning(shop: Workshop) -> Trial:
    """A search whose folder is damaged, or whose space, number of settings or experiment is bad."""
    rng, kind = shop.rng, shop.rng.random()
    if kind < 0.5:
        return _folder(shop)
    given, title = ["--settings", "2"], ""
    if kind < 0.8:
        ranges = [space(rng) for _ in range(rng.choice([1, 1, 2]))]
        given += [part for text in ranges for part in ("--space", text)]
        title = f"--space {ranges}"
        if rng.random() < 0.3:
            given += ["--set", f"method.name={rng.choice(METHODS)}"]
    elif kind < 0.9:
        given[1] = title = rng.choice(COUNTS)
    else:
        section = rng.choice(["method", "data", "training", "evaluation"])
        key = rng.choice(SETTINGS[section])
        text = str(value(shop, key)).replace("\0", "")
        given += ["--set", f"{section}.{key}={text}"]
        title = f"--set {section}.{key}={text}"
    command = ["tune", *BLOBS, *TINY, "--set", "data.validation=0.2", *given, "--out", "out"]
    if kind >= 0.8 and rng.random() < 0.3:
        command = ["run", *("--tune" if part == "--settings" else part for part in command[1:])]
    return Trial(title[:300], [command])


def space(rng: random.Random) -> str:
    """Return a range: of the wrong kind, or with ends that are odd."""
    ends = [str(number) for number in NUMBERS if len(str(number)) < 500]
    ends += [rng.choice(TEXTS), "1", "2", "0.1", "1_0", "１", "1e400", " 1", "0x1"]
    name = rng.choice(NAMES) if rng.random() < 0.9 else rng.choice(TEXTS)
    low, high = rng.choice(ends), rng.choice(ends)
    if rng.random() < 0.4:  # a range that may be searched, however odd
        low, high = sorted(rng.sample([number for number in NUMBERS if -1e9 < number < math.inf], 2))
    forms = [f"method.{name}={low}..{high}"] * 8
    forms += [
        f"{name}={low}..{high}",
        f"method.{name}={low}",
        f"method.{name}={low}...{high}",
        f"method.={low}..{high}",
    ]
    forms += [f"training.rounds={low}..{high}", rng.choice(TEXTS), f"method.{name}=..", f"method..{name}=1..2", "=.."]
    return rng.choice(forms).replace("\0", "")


def _folder(shop: Workshop) -> Trial:
    """The folder of a search that is over or was stopped, with a damaged file; then the search goes on."""
    rng = shop.rng
    folder = shop.copy(rng.choice(["tuning", "tuning-begun"]), "tuning")
    path = folder / "tuning.json"
    if rng.random() < 0.1:
        path = rng.choice([path for path in sorted(folder.iterdir()) if path.is_file()])
    title = change_json(rng, path) if path.suffix == ".json" and rng.random() < 0.7 else change(rng, path)
    flag = rng.choice(["tune", "tune", "run"])
    counted = ["--settings" if flag == "tune" else "--tune", "4"]
    return Trial(title, [[flag, *SEARCH, *counted, "--out", str(folder)]], keep_if_refused=[_kept(path)])


def _kept(path: Path) -> Path:
    return path if path.name == "tuning.json" else path.parent / "tuning.json"
