"""The names of methods in configs: those of this package, of installed plugins, and import paths.

A plugin is an entry point of the group "pfedbayes.methods". An import path, "my_module:MyMethod", names code: a config
that the user gives may name it, a file or a message may not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pfedbayes.errors import UserError, nearest, one_line
from pfedbayes.evaluation.posthoc import PostHoc
from pfedbayes.methods import METHODS, Method
from pfedbayes.methods.base import About
from pfedbayes.nets.import_path import find, is_import_path
from pfedbayes.runs.config import build

GROUP = "pfedbayes.methods"
SETTING = "method.name"
MakeMethod = Callable[[str, Mapping[str, Any]], Method]
"""Builds a method from its name and its settings in a config."""


@dataclass(frozen=True)
class NotImported(Method):
    """Stands for a method whose code has not been imported. Reports need no more."""

    name: str = ""
    """Its import path."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Its hyper-parameters."""

    about = About("A method that is not imported", "", "nothing")


def make_method(name: str, settings: Mapping[str, Any]) -> Method:
    """Build a method, and import its code if the name is an import path."""
    return build(_class(find(name, SETTING), name) if is_import_path(name) else _known(name), settings, "method")


def make_without_code(name: str, settings: Mapping[str, Any]) -> Method:
    """Build a method that a file names: no code is imported for an import path."""
    return NotImported(name, settings) if is_import_path(name) else make_method(name, settings)


def make_imported(name: str, settings: Mapping[str, Any]) -> Method:
    """Build a method that a message names: an import path must lead to a class that is imported already."""
    if not is_import_path(name):
        return make_method(name, settings)
    module, _, attribute = name.partition(":")
    if not hasattr(sys.modules.get(module), attribute):
        raise UserError(
            f"{SETTING}={name!r:.100} is not imported, and a message may not have code imported: import {module} in "
            "the app's task.py, on the server and on all nodes"
        )
    return build(_class(getattr(sys.modules[module], attribute), name), settings, "method")


def method_name(method: Method) -> str:
    """Return the name of a method in configs; of a posterior around a method, the name of that method."""
    method = method.method if isinstance(method, PostHoc) else method
    cls = type(method)
    if isinstance(method, NotImported):
        return method.name
    for name, known in METHODS.items():
        if cls is known:
            return name
    path = f"{cls.__module__}:{cls.__qualname__}"
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise UserError(
            f"{cls.__name__} is defined in a script or a function, so no config can name it: move it to a module of "
            "its own"
        )
    return next((plugin.name for plugin in plugins().values() if plugin.value == path), path)


def plugins() -> dict[str, EntryPoint]:
    """Return the entry points of installed methods by name. They do not replace methods of this package."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in METHODS}


def all_methods() -> dict[str, type[Method]]:
    """Return the methods of this package and of plugins by name."""
    return METHODS | {name: _known(name) for name in plugins()}


def _known(name: str) -> type[Method]:
    """Return a method of this package or of a plugin."""
    if name in METHODS:
        return METHODS[name]
    installed = plugins()
    if name not in installed:
        raise UserError(
            f"unknown method {one_line(repr(name))}: {nearest(name, [*METHODS, *installed])}; write a method of your "
            "own as my_module:MyMethod"
        )
    return _class(find(installed[name].value, SETTING), name)


def _class(found: Any, name: str) -> type[Method]:
    """Return a class of methods; refuse anything else."""
    frozen = isinstance(found, type) and issubclass(found, Method) and found.__dict__.get("__dataclass_params__")
    if not frozen or not frozen.frozen or not isinstance(getattr(found, "about", None), About):
        raise UserError(
            f"{SETTING}={name!r:.100} is not a method: name a frozen dataclass that extends pfedbayes.Method and sets "
            "`about`"
        )
    method: type[Method] = found
    return method
