"""Personalised Bayesian federated learning: the method pFedBayes, its peers, and what one needs to use them.

shards = pfedbayes.Shards.from_arrays(train=[(x1, y1), (x2, y2)], test=[...])
model = pfedbayes.Model(pfedbayes.Net(my_module), pfedbayes.Classification())
federation = pfedbayes.Federation(shards, model, pfedbayes.PFedBayes(zeta=1.0))
for round in federation.rounds(100): ...
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pfedbayes.data import DataConfig, Preprocessing, Shards, load_shards, read_inputs, shards_from_tables
    from pfedbayes.engine.federation import Federation
    from pfedbayes.engine.plan import Plan
    from pfedbayes.engine.training import Training
    from pfedbayes.errors import Diverged, UserError
    from pfedbayes.maths.likelihoods import Classification, Regression
    from pfedbayes.methods import METHODS, Method
    from pfedbayes.methods.pfedbayes import PFedBayes
    from pfedbayes.nets import Model, Net, WithNoise, mlp, vgg
    from pfedbayes.runs.saving import load, read_preprocessing, save
    from pfedbayes.serving import join, open_client

__version__ = "0.1.0"
__all__ = [
    "METHODS", "Classification", "DataConfig", "Diverged", "Federation", "Method", "Model", "Net", "PFedBayes",
    "Plan", "Preprocessing", "Regression", "Shards", "Training", "UserError", "WithNoise", "join", "load",
    "load_shards", "mlp", "open_client", "read_inputs", "read_preprocessing", "save", "shards_from_tables", "vgg",
]  # fmt: skip

_HOME = {
    "data": ("DataConfig", "Preprocessing", "Shards", "load_shards", "read_inputs", "shards_from_tables"),
    "engine": ("Federation", "Plan", "Training"),
    "errors": ("Diverged", "UserError"),
    "runs.saving": ("load", "read_preprocessing", "save"),
    "maths.likelihoods": ("Classification", "Regression"),
    "methods": ("METHODS", "Method", "PFedBayes"),
    "nets": ("Model", "Net", "WithNoise", "mlp", "vgg"),
    "serving": ("join", "open_client"),
}


def __getattr__(name: str) -> Any:
    """Public names are loaded when first used, so that the command line can answer before torch is there.

    The other methods are in `METHODS` and in `pfedbayes.methods`.
    """
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"pfedbayes.{module}"), name)
    raise AttributeError(f"module 'pfedbayes' has no attribute {name!r}")
