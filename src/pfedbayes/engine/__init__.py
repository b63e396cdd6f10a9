"""Federated training: rounds, plans, and where the states of clients live."""

from pfedbayes.engine.federation import Federation, Training
from pfedbayes.engine.plan import Plan

__all__ = ["Federation", "Plan", "Training"]
