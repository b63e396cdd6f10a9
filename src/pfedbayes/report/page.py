"""What pages are made of: tables and templates."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined

from pfedbayes.report.charts import Figure


@dataclass(frozen=True)
class Table:
    """A table with a caption; notes, then figures, stand between the caption and the rows."""

    caption: str
    heads: list[str]
    """Heads of the columns, without that of the first one."""
    blocks: list[tuple[str, list[tuple[str, list[str]]]]]
    """Titled blocks of rows (head, cells)."""
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    """Figures by the names of their files."""


def environment() -> Environment:
    """Return the templates of this folder."""

    def read_template(name: str) -> str:
        return resources.files(__package__).joinpath(name).read_text("utf-8")

    return Environment(
        loader=FunctionLoader(read_template),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
