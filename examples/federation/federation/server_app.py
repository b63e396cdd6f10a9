"""What runs beside the SuperLink."""

from federation.task import make_model
from pfedbayes.flower import server_app

app = server_app(make_model)
