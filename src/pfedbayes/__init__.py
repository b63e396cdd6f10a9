"""Personalised Bayesian federated learning: pFedBayes, the methods it is compared with, and tools to use them.

shards = pfedbayes.Shards.from_arrays(train=[(x1, y1), (x2, y2)], test=[...])
model = pfedbayes.Model(pfedbayes.Net(my_module), pfedbayes.Classification())
federation = pfedbayes.Federation(shards, model, pfedbayes.PFedBayes(zeta=1.0))
for record in federation.rounds(100, evaluate="test"): ...
pandas.DataFrame(records) takes the records of all rounds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pfedbayes.data import DataConfig, Preprocessing, Shards, load_shards, read_inputs, shards_from_tables
    from pfedbayes.engine import Federation, Plan, Training
    from pfedbayes.errors import Diverged, UserError
    from pfedbayes.maths.likelihoods import Classification, Regression
    from pfedbayes.methods import (
        APFL,
        FOLA,
        METHODS,
        PVI,
        BNFed,
        Ditto,
        FedALA,
        FedAvg,
        FedAvgFT,
        FedBABU,
        FedBE,
        FedEP,
        FedIvon,
        FedPA,
        FedPer,
        FedPop,
        FedProx,
        FedRep,
        FedRoD,
        FedSEP,
        HeurFedAMP,
        Hierarchical,
        KNNPer,
        Local,
        Method,
        PerFedAvg,
        PFedBayes,
        PFedGP,
        PFedMe,
        PFedVEM,
        Pooled,
        Scaffold,
    )
    from pfedbayes.nets import Model, Net, WithNoise, cnn, mlp, vgg
    from pfedbayes.runs.experiment import table_model
    from pfedbayes.runs.saving import load, read_preprocessing, save
    from pfedbayes.serving import join, open_client

__version__ = "0.1.0"
__all__ = [
    "APFL",
    "FOLA",
    "METHODS",
    "PVI",
    "BNFed",
    "Classification",
    "DataConfig",
    "Ditto",
    "Diverged",
    "FedALA",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedBE",
    "FedEP",
    "FedIvon",
    "FedPA",
    "FedPer",
    "FedPop",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSEP",
    "Federation",
    "HeurFedAMP",
    "Hierarchical",
    "KNNPer",
    "Local",
    "Method",
    "Model",
    "Net",
    "PFedBayes",
    "PFedGP",
    "PFedMe",
    "PFedVEM",
    "PerFedAvg",
    "Plan",
    "Pooled",
    "Preprocessing",
    "Regression",
    "Scaffold",
    "Shards",
    "Training",
    "UserError",
    "WithNoise",
    "cnn",
    "join",
    "load",
    "load_shards",
    "mlp",
    "open_client",
    "read_inputs",
    "read_preprocessing",
    "save",
    "shards_from_tables",
    "table_model",
    "vgg",
]

_HOME = {
    "data": ("DataConfig", "Preprocessing", "Shards", "load_shards", "read_inputs", "shards_from_tables"),
    "engine": ("Federation", "Plan", "Training"),
    "errors": ("Diverged", "UserError"),
    "maths.likelihoods": ("Classification", "Regression"),
    "methods": (
        "METHODS", "Method", "PFedBayes", "FedAvg", "FedProx", "BNFed", "PerFedAvg", "PFedMe", "HeurFedAMP",
        "Hierarchical", "PFedGP", "Local", "Pooled", "FedAvgFT", "Ditto", "FedPer", "FedRep",
        "Scaffold", "APFL", "FedBABU", "FedRoD", "KNNPer", "FedALA", "PVI", "FedEP", "FedSEP", "FedIvon", "PFedVEM",
        "FedPA", "FOLA", "FedBE", "FedPop",
    ),
    "nets": ("Model", "Net", "WithNoise", "cnn", "mlp", "vgg"),
    "runs.experiment": ("table_model",),
    "runs.saving": ("load", "read_preprocessing", "save"),
    "serving": ("join", "open_client"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that `pfedbayes --help` answers without torch."""
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"pfedbayes.{module}"), name)
    raise AttributeError(f"module 'pfedbayes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
