"""Federations over several machines, on Flower: the same methods, with each client in its own process.

app = client_app(load_data, make_model)   # on the nodes
app = server_app(make_model)              # beside the SuperLink
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pfedbayes.errors import UserError

if TYPE_CHECKING:
    from pfedbayes.flower.node import Node, client_app, load_node
    from pfedbayes.flower.server import server_app

__all__ = ["Node", "client_app", "load_node", "server_app"]


def require_flwr() -> None:
    """Raise UserError if Flower is not installed."""
    try:
        import_module("flwr")
    except ImportError as error:
        raise UserError("flwr is not installed: pip install 'pfedbayes[flower]'") from error


def __getattr__(name: str) -> Any:
    """Import what needs Flower when it is asked for: an app is written without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_flwr()
    return getattr(import_module("pfedbayes.flower.server" if name == "server_app" else "pfedbayes.flower.node"), name)
