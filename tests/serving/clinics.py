"""A table of patients of several hospitals, and runs that learn from it."""

import numpy as np
import pandas

from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment

SHORT = [
    "method.name=pfedbayes", "method.zeta=1", "method.eta_personal=0.01",
    "training.rounds=30", "training.evaluate_every=10", "training.local_steps=10", "evaluation.alone=false",
]  # fmt: skip


def clinics(size=450, sites=("north", "south", "east"), seed=0):
    """Who is ill depends on age and sex, with some noise, and a little on the site."""
    rng = np.random.default_rng(seed)
    age, sex = rng.integers(20, 90, size), rng.choice(["m", "f"], size)
    site = rng.choice(sites, size)
    risk = (age - 55) / 6 + 2 * (sex == "m") + (site == sites[0]) + rng.logistic(0, 0.5, size)
    columns = {"patient": [f"p{k}" for k in range(size)], "age": age, "sex": sex, "hospital": site}
    cost = 100.0 * age + rng.normal(0, 200, size)
    return pandas.DataFrame(columns | {"outcome": np.where(risk > 0, "ill", "well"), "cost": cost})


def train(folder, target, ignore, **others):
    data = [f"data.path={folder / 'clinics.csv'}", f"data.target={target}", "data.client_column=hospital"]
    changes = [f"{key.replace('__', '.')}={value}" for key, value in others.items()]
    net = [] if "net__name" in others else ["net.name=mlp", "net.hidden=[21]"]
    experiment = read_experiment(None, [*data, f"data.ignore={ignore}", *SHORT, *net, *changes])
    for _ in execute(experiment, folder / target, [1]):
        pass
