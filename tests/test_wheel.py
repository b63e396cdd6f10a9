"""The paths of the documentation work from the wheel, in an empty folder with a new virtual environment."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDED = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")
SHORT = ["--set", "training.rounds=3", "--set", "training.evaluate_every=3"]  # appended to commands that train


def commands(page, heading):
    """Yield the commands of a section of a page, in their order."""
    text = (ROOT / page).read_text().split(f"\n## {heading}\n", maxsplit=1)[1].split("\n## ", maxsplit=1)[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    yield from (shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines())


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


class Installed:
    """A virtual environment with the wheel, which sees the dependencies of this one, and an empty folder."""

    def __init__(self, folder):
        self.folder, self.home = folder / "empty", folder / "venv"
        self.folder.mkdir()
        source = folder / "source"
        shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
        for name in NEEDED:
            shutil.copy(ROOT / name, source / name)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        offline = ["--no-deps", "--no-index"]
        run([*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", folder, source], folder)
        run([sys.executable, "-m", "venv", "--without-pip", self.home], folder)
        own = Path(sysconfig.get_path("purelib", "venv", {"base": str(self.home), "platbase": str(self.home)}))
        (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (wheel,) = folder.glob("pfedbayes-*.whl")
        run([*pip, "--python", self.home / "bin" / "python", "install", *offline, wheel], folder)

    def __call__(self, *command, folder=None):
        """Run a command of the virtual environment."""
        name, *arguments = map(str, command)
        return run([self.home / "bin" / name, *arguments], folder or self.folder)


def run(command, folder):
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = kept | {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "HOME": str(folder)}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_commands_of_a_section_are_found():
    found = commands("README.md", "Three commands")
    assert [command[:2] for command in found] == [["pfedbayes", "run"], ["pfedbayes", "run"], ["pfedbayes", "predict"]]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_wheel_is_used_and_not_the_checkout(installed):
    place = installed("python", "-c", "import pfedbayes; print(pfedbayes.__file__)").strip()
    assert Path(place).is_relative_to(installed.home)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_commands_of_the_readme_work(installed):
    (installed.folder / "examples").mkdir()
    table = (ROOT / "examples" / "heart.csv").read_text().splitlines()
    (installed.folder / "examples" / "heart.csv").write_text("\n".join(table) + "\n")
    rows = [line.rsplit(",", 2)[0] for line in (table[0], *[line for line in table if ",va," in line][:5])]
    (installed.folder / "new.csv").write_text("\n".join(rows) + "\n")
    for command in commands("README.md", "Three commands"):
        installed(*command, *(SHORT if command[1] == "run" else []))
    assert (installed.folder / "runs" / "heart" / "report.html").is_file()
    assert len((installed.folder / "predicted.csv").read_text().splitlines()) == len(rows)
    installed("pfedbayes", "report", "runs/heart", "runs/mnist_small-fedavg")
    (code,) = blocks("README.md")
    assert "50" in installed("python", "-c", code)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_estimators_of_the_page_work(installed):
    (installed.folder / "examples").mkdir(exist_ok=True)
    shutil.copy(ROOT / "examples" / "heart.csv", installed.folder / "examples")
    text = "\n".join(blocks("docs/grouped.md"))
    text = text.replace("PersonalizedClassifier()", "PersonalizedClassifier(rounds=3)").replace("rounds=20", "rounds=3")
    assert "cleveland" in installed("python", "-c", text)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_app_of_the_federation_guide_starts(installed):
    installed(*next(commands("docs/federation.md", "One machine")))
    app = installed.folder / "app"
    assert {path.name for path in app.iterdir()} == {"README.md", "federation", "pyproject.toml"}
    parts = "import federation.client_app, federation.server_app; from federation.task import load_data"
    assert "Shards(1 clients" in installed("python", "-c", f"{parts}; print(load_data(0, 3))", folder=app)
