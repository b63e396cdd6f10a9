"""Options of a prediction, of which some are odd or do not go together."""

from ..trials import Trial, Workshop
from ..values import NUMBERS, TEXTS

# Where rows to predict lie, and what names the client.
MODELS = {
    "table": ["new.csv", "--client", "north"], "ordinal": ["new.csv", "--client", "south"],
    "regression": ["new.csv", "--client", "west"], "times": ["new-times.csv", "--client", "north"],
    "arrays": ["new.npz", "--client", "1"], "image-run": ["new.png", "--client", "north"],
    "blobs": ["blobs.csv", "--client", "client 0"], "north.safetensors": ["new.csv"],
    "times.safetensors": ["new-times.csv"], "ordinal.safetensors": ["new.csv"],
    "table/newcomers/east.safetensors": ["new.csv"],
}  # fmt: skip
WORDS = {
    "--model": ["personal", "joined", "alone", "gated", "shared", "both"],
    "--sets": ["lac", "aps", "raps", "all"],
    "--intervals": ["normalised", "quantile", "both"],
    "--at": ["1", "0.5,1", "1,1", "", ",", "0", "-1", "nan", "inf", "1e400", "1;2", "1,,2", "1," * 3000],
}
SHARES = ["--error", "--abstain-at", "--coverage", "--others"]
FLAGS = ["--raw", "--class-conditional", "--json", "--shared"]


def options(shop: Workshop) -> Trial:
    """A prediction from good files, with one to four options."""
    rng = shop.rng
    name = rng.choice([*MODELS, "table", "table", "times"])
    rows, *client = MODELS[name]
    given: list[str] = []
    for option in rng.sample([*WORDS, *SHARES, *FLAGS, "--samples"], rng.randint(1, 4)):
        given.append(option)
        if option in WORDS:
            given.append(rng.choice([*WORDS[option], *WORDS[option], rng.choice(TEXTS)]))
        elif option in SHARES:
            given.append(rng.choice(["0.1", "0.05", "0.5", "0.9", str(rng.choice(NUMBERS))[:4400], rng.choice(TEXTS)]))
        elif option == "--samples":
            given.append(str(rng.choice([1, 2, 100, *(number for number in NUMBERS if number < 1 or number > 10**6)])))
    given = [text.replace("\0", "") for text in given]
    path = shop.bases.path(name)
    command = ["predict", str(path), *client, "--input", str(shop.bases.path(rows)), *given]
    return Trial(f"{name}: {given}"[:300], [command], keep=[path])
