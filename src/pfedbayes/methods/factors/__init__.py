"""Methods whose posterior is a product of a prior and one factor per client."""

from pfedbayes.methods.factors.fedep import FedEP
from pfedbayes.methods.factors.fedsep import FedSEP
from pfedbayes.methods.factors.pvi import PVI

__all__ = ["PVI", "FedEP", "FedSEP"]
