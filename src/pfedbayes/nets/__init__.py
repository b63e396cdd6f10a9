"""Networks as functions of their parameters."""

from pfedbayes.nets.net import Batch, Init, Model, Net, Pixels, WithNoise
from pfedbayes.nets.zoo import cnn, mlp, vgg

__all__ = ["Batch", "Init", "Model", "Net", "Pixels", "WithNoise", "cnn", "mlp", "vgg"]
