"""Networks as functions of their parameters."""

from pfedbayes.nets.model import Batch, Model, Pixels
from pfedbayes.nets.net import Init, Net, WithNoise
from pfedbayes.nets.table import TableNet
from pfedbayes.nets.zoo import cnn, mlp, vgg

__all__ = ["Batch", "Init", "Model", "Net", "Pixels", "TableNet", "WithNoise", "cnn", "mlp", "vgg"]
