"""What runs on the nodes."""

from federation.task import load_data, make_model
from pfedbayes.flower import client_app

app = client_app(load_data, make_model)
