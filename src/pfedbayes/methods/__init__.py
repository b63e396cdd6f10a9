"""The federated methods, by the names that configs use."""

from pfedbayes.methods.base import Method
from pfedbayes.methods.fedavg import FedAvg
from pfedbayes.methods.fedprox import FedProx
from pfedbayes.methods.pfedbayes import PFedBayes

METHODS: dict[str, type[Method]] = {
    "pfedbayes": PFedBayes,
    "fedavg": FedAvg,
    "fedprox": FedProx,
}

__all__ = ["METHODS", "FedAvg", "FedProx", "Method", "PFedBayes"]
