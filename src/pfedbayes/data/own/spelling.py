"""How people write numbers, and yes or no: units, thousands separators, decimal commas and many spellings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Texts that cannot be an answer in a column of numbers or dates. In a column of text they may be one.
PLACEHOLDERS = {
    "-", "--", "---", "–", "—", ".", "..", "*", "n.a.", "n.d.", "nd", "none", "missing", "unknown", "not available",
    "not applicable", "#value!", "#ref!", "#div/0!",
}  # fmt: skip
YES = {"yes", "y", "true", "t", "1", "ja", "j", "oui", "o", "si", "sí"}
NO = {"no", "n", "false", "f", "0", "nein", "non"}

_CURRENCY = r"[$€£¥₹]|USD|EUR|GBP|CHF|JPY"
_SPACE = " \u00a0\u202f'’"
_WRITTEN = re.compile(
    rf"(?P<sign>[+-]?)\s?(?P<before>{_CURRENCY})?\s?(?P<minus>[+-]?)"
    rf"(?P<body>\d(?:[\d.,{_SPACE}]*\d)?[.,]?|[.,]\d+)(?P<exponent>e[+-]?\d+)?\s?(?P<after>%|{_CURRENCY})?",
    re.ASCII | re.IGNORECASE,
)
_POINT = re.compile(r"\d+(\.\d*)?|\.\d+", re.ASCII)
_POINT_GROUPED = re.compile(r"[1-9]\d{0,2}(,\d{3})+(\.\d+)?", re.ASCII)
_COMMA = re.compile(r"\d+(,\d*)?|,\d+", re.ASCII)
_COMMA_GROUPED = re.compile(r"[1-9]\d{0,2}(\.\d{3})+(,\d+)?", re.ASCII)
_SPACED = re.compile(rf"\d{{1,3}}([{_SPACE}])\d{{3}}(\1\d{{3}})*([.,]\d+)?", re.ASCII)


class Written(NamedTuple):
    """The numbers that texts spell."""

    numbers: list[float | None]
    """None for a text that is not a number."""
    comma: bool
    """Whether a comma separates decimals."""
    units: tuple[str, ...]
    """The units, such as % or €, that stand beside numbers."""


def written_numbers(texts: Sequence[str], comma: bool | None = None) -> Written:
    """Return the numbers that the texts of one column spell, in one convention for all of them.

    A unit is left out: 12% is 12. comma: whether a comma separates decimals, as in 1.234,50. If None, the column
    decides: 1,5 and 1.234,50 need it, and 1,234 alone is a thousand.
    """
    matches = [_WRITTEN.fullmatch(text) for text in texts]
    bodies = [match["body"] if match else None for match in matches]
    if comma is None:
        comma = any(
            body is not None and "," in body and not _POINT_GROUPED.fullmatch(body)
            and (_COMMA.fullmatch(body) or _COMMA_GROUPED.fullmatch(body) or _SPACED.fullmatch(body))
            for body in bodies
        )  # fmt: skip
    numbers: list[float | None] = []
    units = set[str]()
    for match, body in zip(matches, bodies, strict=True):
        plain = _plain(body, comma) if body is not None else None
        if match is None or plain is None or (match["sign"] and match["minus"]) or (match["before"] and match["after"]):
            numbers.append(None)
            continue
        numbers.append(float(match["sign"] + match["minus"] + plain + (match["exponent"] or "")))
        units |= {unit.upper() for unit in (match["before"], match["after"]) if unit}
    return Written(numbers, comma, tuple(sorted(units)))


def _plain(body: str, comma: bool) -> str | None:
    """Return digits with a decimal point; None if they do not follow the convention."""
    if spaced := _SPACED.fullmatch(body):
        body = body.replace(spaced[1], "")
    if comma:
        if _COMMA_GROUPED.fullmatch(body):
            return body.replace(".", "").replace(",", ".")
        if _COMMA.fullmatch(body):
            return body.replace(",", ".")
    elif _POINT_GROUPED.fullmatch(body):
        return body.replace(",", "")
    return body if _POINT.fullmatch(body) else None


def yes_or_no(text: str) -> str | None:
    """Return "yes" or "no" for any of their spellings, and None for another text."""
    folded = text.casefold()
    return "yes" if folded in YES else "no" if folded in NO else None


def unified(values: Iterable[str]) -> set[str]:
    """Return the values of a column, as {"no", "yes"} where they are more than two spellings of yes and no."""
    own = set(values)
    answers = {yes_or_no(value) for value in own}
    return {"no", "yes"} if len(own) > 2 and answers == {"yes", "no"} else own
