"""The federated methods, by the names that configs use."""

from pfedbayes.methods.apfl import APFL
from pfedbayes.methods.base import Method
from pfedbayes.methods.bnfed import BNFed
from pfedbayes.methods.ditto import Ditto
from pfedbayes.methods.factors import PVI, FedEP, FedSEP
from pfedbayes.methods.fedala import FedALA
from pfedbayes.methods.fedavg import FedAvg
from pfedbayes.methods.fedavg_ft import FedAvgFT
from pfedbayes.methods.fedbabu import FedBABU
from pfedbayes.methods.fedbe import FedBE
from pfedbayes.methods.fedivon import FedIvon
from pfedbayes.methods.fedpa import FedPA
from pfedbayes.methods.fedper import FedPer
from pfedbayes.methods.fedpop import FedPop
from pfedbayes.methods.fedprox import FedProx
from pfedbayes.methods.fedrep import FedRep
from pfedbayes.methods.fedrod import FedRoD
from pfedbayes.methods.fola import FOLA
from pfedbayes.methods.heurfedamp import HeurFedAMP
from pfedbayes.methods.hierarchical import Hierarchical
from pfedbayes.methods.knnper import KNNPer
from pfedbayes.methods.local import Local
from pfedbayes.methods.perfedavg import PerFedAvg
from pfedbayes.methods.pfedbayes import PFedBayes
from pfedbayes.methods.pfedgp import PFedGP
from pfedbayes.methods.pfedme import PFedMe
from pfedbayes.methods.pfedvem import PFedVEM
from pfedbayes.methods.pooled import Pooled
from pfedbayes.methods.scaffold import Scaffold

METHODS: dict[str, type[Method]] = {
    "pfedbayes": PFedBayes,
    "hierarchical": Hierarchical,
    "pvi": PVI,
    "fedep": FedEP,
    "fedsep": FedSEP,
    "fedivon": FedIvon,
    "pfedvem": PFedVEM,
    "fedpa": FedPA,
    "fola": FOLA,
    "fedbe": FedBE,
    "fedpop": FedPop,
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
    "APFL",
    "FOLA",
    "METHODS",
    "PVI",
    "BNFed",
    "Ditto",
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
    "HeurFedAMP",
    "Hierarchical",
    "KNNPer",
    "Local",
    "Method",
    "PFedBayes",
    "PFedGP",
    "PFedMe",
    "PFedVEM",
    "PerFedAvg",
    "Pooled",
    "Scaffold",
]
