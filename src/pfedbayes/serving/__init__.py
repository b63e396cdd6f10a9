"""Use the models of a run: predict new rows, give newcomers a model, export a client."""

from pfedbayes.serving.newcomers import join
from pfedbayes.serving.open import open_client

__all__ = ["join", "open_client"]
