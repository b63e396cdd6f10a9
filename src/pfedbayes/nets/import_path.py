"""Code of the user's own, given by an import path such as "my_module:MyNet"."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pfedbayes.errors import UserError, nearest


def is_import_path(name: str | None) -> bool:
    """Return whether a name looks like "my_module:MyNet"."""
    return name is not None and ":" in name


def refuse_untrusted(name: str | None, where: Path, trusted: bool, what: str = "network") -> None:
    """Refuse to import the code that a file or folder names, unless the user trusts its author."""
    if is_import_path(name) and not trusted:
        raise UserError(
            f"{where} names code for its {what} ({name!r:.100}), which would run on this machine: if you trust its "
            "author, add --trust-module (in Python trust_module=True)"
        )


def build_module(name: str, shape: tuple[int, ...], outputs: int, settings: Mapping[str, Any]) -> nn.Module:
    """Return the module `MyNet(shape, outputs, **settings)`, imported from the current folder first.

    Check that it maps inputs (n, *shape) to outputs (n, outputs).
    """
    make = find(name, "net.name")
    try:
        module = make(shape, outputs, **settings)
    except Exception as error:
        raise UserError(
            f"net.name={name!r} could not be called with ({shape}, {outputs}{_arguments(settings)}): {_reason(error)}"
        ) from error
    if not isinstance(module, nn.Module):
        raise UserError(f"net.name={name!r} returns a {type(module).__name__}: it must return a torch.nn.Module")
    try:
        with torch.no_grad():
            found = tuple(module(torch.zeros(2, *shape)).shape)
    except Exception as error:
        raise UserError(
            f"net.name={name!r} cannot take inputs of shape (2, {_sizes(shape)}): {_reason(error)}"
        ) from error
    if found != (2, outputs):
        raise UserError(f"net.name={name!r} maps 2 examples to shape {found}: it must be (2, {outputs})")
    return module


def find(name: str, setting: str) -> Any:
    """Return the class or function at an import path; a module in the current folder comes first.

    setting: the setting that holds the name, for messages.
    """
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(
            f"{setting}={name!r}: cannot import {module_name!r} ({_reason(error)}): run in its folder, or install it"
        ) from error
    finally:
        sys.path.remove(here)
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [entry for entry in vars(found) if entry[0] != "_"] if hasattr(found, "__dict__") else []
            raise UserError(f"{setting}={name!r}: {module_name} has no {part!r}: {nearest(part, public)}")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"{setting}={name!r} is not a class or function: name one")
    return found


def _reason(error: Exception) -> str:
    first = (str(error) or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {first}"


def _arguments(settings: Mapping[str, Any]) -> str:
    return "".join(f", {key}={value!r}" for key, value in settings.items())


def _sizes(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
