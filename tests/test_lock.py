"""Dependencies are installed by hash: the locked files are complete, fit pyproject.toml and name no server."""

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import lock

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIN = re.compile(r"^([\w.-]+)==(\S+)(?: ; ([^\\\n]+?))?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", re.MULTILINE)


def pins(name):
    """Versions that a locked file allows, by package; several only if their markers differ."""
    found = {}
    for package, version, *_ in PIN.findall((lock.FOLDER / f"{name}.txt").read_text()):
        found.setdefault(canonicalize_name(package), set()).add(version)
    return found


def torch_pin():
    return Requirement((lock.FOLDER / "torch.txt").read_text().strip())


@pytest.mark.parametrize("name", lock.EXTRAS)
def test_a_locked_file_holds_pins_with_hashes_and_nothing_else(name):
    header, _, text = (lock.FOLDER / f"{name}.txt").read_text().partition("\n")
    assert header + "\n" == lock.HEADER
    assert PIN.sub("", text) == ""
    assert len(pins(name)) > 15


@pytest.mark.parametrize(("name", "extras"), lock.EXTRAS.items())
def test_pins_satisfy_pyproject(name, extras):
    optional = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]]
    asked += [text for extra in extras for text in optional[extra]]
    locked = pins(name) | {"torch": {next(iter(torch_pin().specifier)).version}}
    for requirement in map(Requirement, asked):
        versions = locked[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in versions), requirement


@pytest.mark.parametrize("name", ["run", "dev"])
def test_what_locked_packages_need_is_locked(name):
    """They are installed with --no-deps, so nothing else would bring it."""
    locked = pins(name)
    for package in [*locked, "torch"]:
        try:
            distribution = metadata.distribution(package)
        except metadata.PackageNotFoundError:  # of another platform
            continue
        for requirement in map(Requirement, distribution.requires or []):
            here = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if here and not lock.OF_A_TORCH_BUILD.match(f"{requirement.name}=="):
                versions = locked[canonicalize_name(requirement.name)]
                assert any(requirement.specifier.contains(version) for version in versions), package


def test_the_tools_and_the_package_share_versions():
    assert pins("run").items() <= pins("dev").items()


def test_torch_is_pinned_without_a_build():
    (specifier,) = torch_pin().specifier
    assert (torch_pin().name, specifier.operator) == ("torch", "==")
    assert "+" not in specifier.version


def test_make_installs_nothing_else_without_hashes(tmp_path):
    venv = tmp_path / "venv"
    command = ["make", "--dry-run", f"VENV={venv}", f"{venv}/installed-dev", f"{venv}-bench/installed"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installs = [line.split(" install ")[1] for line in printed.splitlines() if " install " in line]
    allowed = r"(--requirement requirements/torch\.txt|--no-build-isolation --editable \.|.*--require-hashes .*)"
    start = r"--quiet --disable-pip-version-check (--no-deps )?"
    assert len(installs) == 9
    assert [line for line in installs if not re.fullmatch(start + allowed, line)] == []
    assert sum("--require-hashes" in line for line in installs) == 3


@pytest.mark.parametrize("path", ["Makefile", "pyproject.toml", ".ci/run", "scripts/lock.py", "requirements/torch.txt"])
def test_no_server_or_folder_of_packages_is_named(path):
    assert re.findall(r"index-url|find-links|trusted-host|\w+://", (ROOT / path).read_text()) == []
