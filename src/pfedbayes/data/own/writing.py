"""How the cells of tables are written, so that new rows are read in the same way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pfedbayes.data.own.dates import DateColumn


@dataclass(frozen=True)
class Writing:
    """How the cells of tables are written."""

    dates: tuple[DateColumn, ...] = ()
    """The columns of dates."""
    decimal_comma: tuple[str, ...] = ()
    """Columns of numbers in which a comma separates decimals."""
    missing: tuple[str, ...] = ()
    """Texts that mean a missing value, besides the usual ones."""

    def date(self, name: str) -> DateColumn | None:
        """Return the column of dates of this name, if there is one."""
        return next((column for column in self.dates if column.name == name), None)

    def sources(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the columns of a file from which these columns of a table are made, in their order."""
        of_part = {part: column.name for column in self.dates for part in column.parts}
        return tuple(dict.fromkeys(of_part.get(name, name) for name in names))

    @property
    def parts(self) -> set[str]:
        """Columns of a table that stand for dates."""
        return {part for column in self.dates for part in column.parts}

    @staticmethod
    def of_all(writings: Sequence[Writing]) -> Writing:
        """Return how several tables are written. If they differ in the order of day and month, it is not known."""
        found: dict[str, set[bool]] = {}
        for column in (column for writing in writings for column in writing.dates):
            found.setdefault(column.name, set()).update(() if column.day_first is None else (column.day_first,))
        dates = (DateColumn(name, next(iter(own)) if len(own) == 1 else None) for name, own in sorted(found.items()))
        return Writing(
            tuple(dates),
            tuple(sorted({name for writing in writings for name in writing.decimal_comma})),
            tuple(sorted({text for writing in writings for text in writing.missing})),
        )
