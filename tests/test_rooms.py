"""Who may import whom. A module that is new has to be given its place here."""

import ast
import graphlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pfedbayes

ROOT = Path(pfedbayes.__file__).parent

# Each layer may import from those below it; parts of one layer that are listed apart may not import each other.
LAYERS: list[list[set[str]]] = [
    [{"constraints", "errors", "memory"}],
    [{"files"}],
    [{"maths"}],
    [{"nets"}],
    [{"methods"}, {"data"}],
    [{"evaluation"}],
    [{"engine"}],
    [{"trust"}],
    [{"runs"}],
    [{"serving"}],
    [{"flower"}, {"report", "sweep"}, {"sklearn"}],
    [{"paper"}, {"board"}],
    [{"cli"}],
]
CORE = set().union(*(part for layer in LAYERS[:7] for part in layer))
PLACE = {name: (level, k) for level, layer in enumerate(LAYERS) for k, part in enumerate(layer) for name in part}
ENTRANCES = {"__init__", "__main__"}  # they hand names on and hold no code of their own
# What a method may use: nothing that reads or writes.
FOR_METHODS = {
    "__future__", "collections", "contextlib", "copy", "dataclasses", "enum", "functools", "itertools", "math",
    "typing", "warnings", "numpy", "scipy", "torch",
}  # fmt: skip

MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}


def imports(path: Path, at_once: bool = False) -> set[str]:
    """Full names of what a file imports, inside functions too unless `at_once`; `from a import b` counts as a.b."""
    names = set()
    tree = ast.parse(path.read_text())
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_imports(module: str) -> set[str]:
    """Modules of the package that a module imports, without the package's name."""
    found = set()
    for name in imports(MODULES[module]):
        first, *rest = name.split(".")
        if first == "pfedbayes":
            paths = [rest[:end] for end in range(len(rest), -1, -1)]
            names = [".".join(tail) for path in paths for tail in (path, [*path, "__init__"])]
            found.add(next(name for name in names if name in MODULES))
    return found


def foreign_imports(module: str, at_once: bool = False) -> set[str]:
    """Packages of others that a module imports."""
    return {top(name) for name in imports(MODULES[module], at_once)} - {"pfedbayes"}


def top(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def test_every_module_has_a_place():
    assert {top(module) for module in MODULES} - ENTRANCES - PLACE.keys() == set()


@pytest.mark.parametrize("module", [module for module in MODULES if top(module) not in ENTRANCES])
def test_imports_point_downwards(module):
    level, part = PLACE[top(module)]
    for imported in own_imports(module):
        # The package itself hands on names of all layers: only what lies above the core may ask it.
        other_level, other_part = PLACE.get(top(imported), (PLACE["engine"][0], None))
        assert other_level < level or (other_level, other_part) == (level, part), f"{module} imports {imported}"


def test_there_are_no_cycles():
    inner = MODULES.keys() - ENTRANCES
    graph = {module: own_imports(module) & inner - {module} for module in inner}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", [m for m in MODULES if top(m) == "methods" and not m.endswith("__init__")])
def test_methods_know_neither_each_other_nor_the_outside(module):
    siblings = {name for name in own_imports(module) if name.rpartition(".")[0] == module.rpartition(".")[0]}
    own = siblings if module.count(".") > 1 else set()  # a method may be a folder
    assert {name for name in own_imports(module) if top(name) == "methods"} <= {"methods.base"} | own
    assert foreign_imports(module) <= FOR_METHODS
    calls = {node.id for node in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(node, ast.Name)}
    assert not calls & {"open", "print", "input", "exec", "eval"}


@pytest.mark.parametrize("module", [module for module in MODULES if top(module) in CORE])
def test_core_is_imported_with_torch_and_numpy_alone(module):
    assert foreign_imports(module, at_once=True) <= set(sys.stdlib_module_names) | {"torch", "numpy"}


def test_core_runs_where_nothing_else_is_installed():
    script = f"""
        import sys

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {{"typer", "rich", "safetensors", "jinja2", "scipy", "pydantic", "tomli_w"}}:
                    raise ImportError(name)

        sys.meta_path.insert(0, Refuse())
        import importlib
        for name in {sorted(CORE)}:
            importlib.import_module(f"pfedbayes.{{name}}")
        import torch
        from pfedbayes import Classification, Federation, Model, Net, PFedBayes, Shards, Training, mlp
        data = [(torch.randn(n, 2), torch.arange(n) % 2) for n in (5, 9)]
        model = Model(Net(mlp([2, 3, 2])), Classification())
        federation = Federation(Shards.from_arrays(data, data), model, PFedBayes(), Training(rounds=1, local_steps=2))
        assert list(federation.rounds()) == [1]
        assert federation.evaluate()["personal"]
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_lists_its_public_names():
    listed = set(dir(pfedbayes))
    assert set(pfedbayes.__all__) <= listed
    assert {method.__name__ for method in pfedbayes.METHODS.values()} <= set(pfedbayes.__all__)
    assert set(pfedbayes.__all__) == {name for names in pfedbayes._HOME.values() for name in names}
    assert all(getattr(pfedbayes, name) is not None for name in pfedbayes.__all__)
