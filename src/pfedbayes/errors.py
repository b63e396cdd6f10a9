"""Errors that the user can fix."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error that the user can fix: one line with the cause and the remedy.

    The command line prints it and exits with code 2.
    """


class Diverged(UserError):
    """Training produced NaN or infinity. The state of the last good round is kept."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a hint: the most similar valid name, or all valid names."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid are {', '.join(names)}"
