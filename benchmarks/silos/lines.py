"""A table as lines of text, which needs no pandas."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Lines:
    """The cells of a table."""

    header: list[str]
    rows: list[list[str]]

    @classmethod
    def read(cls, text: str) -> Lines:
        """Read the text of a CSV file."""
        header, *rows = csv.reader(io.StringIO(text, newline=""))
        return cls(header, rows)

    def column(self, name: str) -> list[str]:
        """Return the cells of a column."""
        place = self.header.index(name)
        return [row[place] for row in self.rows]

    def text(
        self,
        rows: Iterable[int] | None = None,
        added: Mapping[str, Sequence[str]] | None = None,
        without: Collection[str] = (),
    ) -> str:
        """Return the text of a CSV file.

        rows: numbers of the rows to keep, in their order; None for all. added: further columns with a cell for each row
        of the table. without: columns to leave out.
        """
        added = added or {}
        kept = [k for k, name in enumerate(self.header) if name not in without]
        out = io.StringIO(newline="")
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*(self.header[k] for k in kept), *added])
        for number in range(len(self.rows)) if rows is None else rows:
            writer.writerow([*(self.rows[number][k] for k in kept), *(column[number] for column in added.values())])
        return out.getvalue()

    def write(
        self,
        path: Path,
        rows: Iterable[int] | None = None,
        added: Mapping[str, Sequence[str]] | None = None,
        without: Collection[str] = (),
    ) -> None:
        """Write a CSV file, see `text`."""
        path.write_text(self.text(rows, added, without), newline="")
