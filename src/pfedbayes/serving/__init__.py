"""Using the models of a run: asking one client's about new rows, giving newcomers one, carrying one elsewhere."""

from pfedbayes.serving.newcomers import join
from pfedbayes.serving.opening import open_client

__all__ = ["join", "open_client"]
