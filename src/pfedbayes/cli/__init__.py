"""The command line: parses, calls, prints.

Heavy imports (torch) stand inside the commands, so that --help and errors of usage answer at once.
"""

from pfedbayes.cli.app import main

__all__ = ["main"]
