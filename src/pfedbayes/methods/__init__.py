"""The federated methods, by the names that configs use."""

from pfedbayes.methods.apfl import APFL
from pfedbayes.methods.base import Method
from pfedbayes.methods.bnfed import BNFed
from pfedbayes.methods.ditto import Ditto
from pfedbayes.methods.fedala import FedALA
from pfedbayes.methods.fedavg import FedAvg
from pfedbayes.methods.fedavg_ft import FedAvgFT
from pfedbayes.methods.fedbabu import FedBABU
from pfedbayes.methods.fedper import FedPer
from pfedbayes.methods.fedprox import FedProx
from pfedbayes.methods.fedrep import FedRep
from pfedbayes.methods.fedrod import FedRoD
from pfedbayes.methods.heurfedamp import HeurFedAMP
from pfedbayes.methods.hierarchical import Hierarchical
from pfedbayes.methods.knnper import KNNPer
from pfedbayes.methods.local import Local
from pfedbayes.methods.perfedavg import PerFedAvg
from pfedbayes.methods.pfedbayes import PFedBayes
from pfedbayes.methods.pfedgp import PFedGP
from pfedbayes.methods.pfedme import PFedMe
from pfedbayes.methods.pooled import Pooled
from pfedbayes.methods.scaffold import Scaffold

METHODS: dict[str, type[Method]] = {
    "pfedbayes": PFedBayes,
    "hierarchical": Hierarchical,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "bnfed": BNFed,
    "perfedavg": PerFedAvg,
    "pfedme": PFedMe,
    "heurfedamp": HeurFedAMP,
    "pfedgp": PFedGP,
    "local": Local,
    "pooled": Pooled,
    "fedavg-ft": FedAvgFT,
    "ditto": Ditto,
    "fedper": FedPer,
    "fedrep": FedRep,
    "scaffold": Scaffold,
    "apfl": APFL,
    "fedbabu": FedBABU,
    "fedrod": FedRoD,
    "knnper": KNNPer,
    "fedala": FedALA,
}

__all__ = [
    "APFL", "METHODS", "BNFed", "Ditto", "FedALA", "FedAvg", "FedAvgFT", "FedBABU", "FedPer", "FedProx", "FedRep",
    "FedRoD", "HeurFedAMP", "Hierarchical", "KNNPer", "Local", "Method", "PFedBayes", "PFedGP", "PFedMe", "PerFedAvg",
    "Pooled", "Scaffold",
]  # fmt: skip
