"""Reports: a self-contained HTML page about one run or several, and the rows that tables print."""

from pfedbayes.report.figures import all_figures
from pfedbayes.report.render import render, write
from pfedbayes.report.tables import headline

__all__ = ["all_figures", "headline", "render", "write"]
