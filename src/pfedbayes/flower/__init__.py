"""Federations over several machines, on Flower: the same methods, with each client in its own process.

app = client_app(load_data, make_model)   # on the nodes
app = server_app(make_model)              # beside the SuperLink
"""

from pfedbayes.errors import UserError

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise UserError("flwr is not installed: pip install 'pfedbayes[flower]'") from error

from pfedbayes.flower.node import Node, client_app, load_node
from pfedbayes.flower.server import server_app

__all__ = ["Node", "client_app", "load_node", "server_app"]
