"""Reports: a self-contained HTML page about one run or several, and the rows that tables print."""

from pfedbayes.report.page import render, write
from pfedbayes.report.tables import headline

__all__ = ["headline", "render", "write"]
