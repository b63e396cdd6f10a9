"""Access to the grids of tests/flower, which serve a federation without Flower's processes."""

import sys
import warnings
from pathlib import Path

TESTS = Path(__file__).parents[1]
for folder in (TESTS, TESTS / "flower"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

with warnings.catch_warnings(action="ignore"):  # of the libraries of Flower, about each other
    from grids import CLIENTS, FakeGrid, own_data, run_config, serve, travelled  # type: ignore[import-not-found]

    from federations import model_for  # type: ignore[import-not-found]

__all__ = ["CLIENTS", "FakeGrid", "model_for", "own_data", "run_config", "serve", "travelled"]
