"""A page of results: a few sentences, a table that sums up, and the details folded below."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pfedbayes.report.page import Table

NOTE = "Written by `pfedbayes paper results` from the JSON files beside it; do not edit."


@dataclass(frozen=True)
class Page:
    """One page of results."""

    title: str
    lead: list[str]
    """The conclusion, in about three sentences."""
    tables: list[Table]
    notes: list[str] = field(default_factory=list)
    """How to read the tables, and their limits."""
    opened: int = 1
    """The number of tables that are shown; the others are folded."""


def markdown(page: Page) -> str:
    """Return the page in Markdown."""
    parts = [f"# {page.title}", " ".join(page.lead)]
    for number, table in enumerate(page.tables):
        parts += [f"## {table.caption}", *table.notes]
        for name, figure in table.figures.items():
            # A lower-case alternative text is not taken for a heading.
            parts.append(f"![{figure.title[0].lower()}{figure.title[1:]}]({name}.svg)")
        rows = list(_blocks(table))
        folded = ['<details markdown="1">\n<summary>Show</summary>', *rows, "</details>"]
        parts += rows if number < page.opened else folded
    if page.notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in page.notes)]
    return "\n\n".join([*parts, NOTE]) + "\n"


def _blocks(table: Table) -> Iterator[str]:
    for block, rows in table.blocks:
        lines = [
            f"| {' | '.join(['', *table.heads])} |",
            f"|{'---|' * (len(table.heads) + 1)}",
            *(f"| {' | '.join([head, *cells])} |" for head, cells in rows),
        ]
        if block:
            yield f"### {block}"
        yield "\n".join(lines)
