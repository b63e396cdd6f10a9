"""Summaries that clients send for the fit of the preprocessing."""

import json
from pathlib import Path

from ..trials import Trial, Workshop
from ..values import dumped, mutated


def summary(shop: Workshop) -> Trial:
    """One summary of three is bad. Whatever `combine` accepts, it can be used and written."""
    from pfedbayes.data import DataConfig
    from pfedbayes.data.own.loading import summarise_client
    from pfedbayes.data.own.preprocessing import Preprocessing, combine
    from pfedbayes.data.own.readers import read_table
    from pfedbayes.data.own.summaries import ClientSummary

    rng = shop.rng
    data = shop.bases.path("east.csv")
    target = rng.choice(["outcome", "level", "flag"])
    config = DataConfig(name="files", path=str(data), target=target)
    texts = [summarise_client(config, k, f"client {k}").to_json() for k in range(3)]
    tree, title = json.loads(texts[1]), []
    for _ in range(rng.choice([1, 1, 2])):
        tree, what = mutated(rng, tree)
        title.append(what)
    texts[1] = dumped(tree)

    def fit() -> None:
        fitted = combine([ClientSummary.from_json(text) for text in texts])
        again = Preprocessing.from_json(fitted.to_json(), "the fit")
        again.encode(read_table(Path(data), again.schema))

    return Trial(", ".join(title), [fit])
