"""Reports: a self-contained HTML page about one run or several, and the rows that tables print."""

from pfedbayes.report.page import figures, render, write
from pfedbayes.report.tables import headline

__all__ = ["figures", "headline", "render", "write"]
