"""Errors that are the user's to mend."""


class UserError(Exception):
    """Something the user can mend: one line that names the cause and the remedy.

    The command line prints it and exits with 2.
    """


class Diverged(UserError):
    """Training has produced a NaN or an infinity; the state of the last good round is kept."""
