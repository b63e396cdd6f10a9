"""A local web page that shows runs and federations as they train."""

from pfedbayes.board.server import Board, open_board

__all__ = ["Board", "open_board"]
