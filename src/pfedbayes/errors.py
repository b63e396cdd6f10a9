"""Errors that the user can fix."""

import difflib
from collections.abc import Iterable, Sequence

LONGEST = 2000  # characters of a message: a long path or value must not hide the cause
MOST_PROBLEMS = 20  # of one message
SPACES = "\u00a0\u202f"  # spaces that print but do not break a line


class UserError(Exception):
    """An error that the user can fix: one line with the cause and the remedy.

    The command line prints it and exits with code 2. It may quote paths and contents of files: characters that do not
    print are escaped, and the middle of a very long message is left out.
    """

    def __init__(self, message: object) -> None:
        super().__init__(printable(shorten(str(message))))


class Problems(UserError):
    """Everything that is wrong with the user's data, so that one attempt shows all of it: a line for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        shown = [printable(shorten(problem)) for problem in self.problems[:MOST_PROBLEMS]]
        more = len(self.problems) - len(shown)
        super().__init__(shown[0])
        if len(self.problems) > 1:
            listed = [f"  {k}. {problem}" for k, problem in enumerate(shown, 1)]
            rest = [f"  … and {more:,} more"] if more else []
            self.args = ("\n".join([f"{len(self.problems)} problems: solve each of them", *listed, *rest]),)


class Diverged(UserError):
    """Training produced NaN or infinity. The state of the last good round is kept."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a hint: the most similar valid name, or all valid names."""
    names = sorted(valid)
    close = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid are {', '.join(names)}"


def printable(text: str) -> str:
    """Return a text in which line breaks, control characters and halves of surrogate pairs are escaped."""
    return "".join(one if one.isprintable() or one in SPACES else ascii(one)[1:-1] for one in text)


def shorten(text: str) -> str:
    """Return a text without the middle of a very long one."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


def one_line(message: object, longest: int = 200) -> str:
    """Return the first line of a message, cut to a length."""
    first = (str(message).splitlines() or [""])[0]
    return printable(first if len(first) <= longest else first[: longest - 1] + "…")
