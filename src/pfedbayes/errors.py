"""Errors that the user can mend."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend: one line that names the cause and the remedy.

    The command line prints it and exits with 2.
    """


class Diverged(UserError):
    """Training has produced a NaN or an infinity; the state of the last good round is kept."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a hint at the name that may have been meant."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid are {', '.join(names)}"
