"""The command line: parses, calls, prints.

Commands import torch lazily, so that --help and usage errors are fast.
"""

from pfedbayes.cli.app import main

__all__ = ["main"]
