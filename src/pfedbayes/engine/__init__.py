"""Federated training: rounds, plans, and where clients' states rest."""

from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import Plan
from pfedbayes.engine.training import Training

__all__ = ["Federation", "Plan", "Training"]
