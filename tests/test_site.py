"""The documentation site builds without warnings, loads nothing from other servers, and agrees with code and runs."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from html import unescape
from pathlib import Path

import pytest

import pfedbayes
from benchmarks import choosing
from pfedbayes.methods import METHODS

ROOT = Path(__file__).parents[1]


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


examples = load_script("write_examples")
notebooks = load_script("notebooks")
posterior = load_script("draw_posterior")


def build(folder):
    """Build the site as `make docs` does."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build(tmp_path_factory.mktemp("site"))


def text_of(page):
    return unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_pages_load_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?([^\" >]+)", page.read_text())
        assert not [url for url in loaded if re.match(r"(?:https?:)?//", url)], page.name


def test_the_page_of_methods_has_every_method_with_every_setting(site):
    text = text_of(site / "methods.html")
    for name, method in METHODS.items():
        assert name in text
        assert method.about.learns in text
        for field in dataclasses.fields(method):
            assert re.search(rf"^{field.name}\n{re.escape(json.dumps(field.default))}$", text, re.MULTILINE), field.name


def test_the_page_of_the_api_explains_every_public_name(site):
    page = (site / "api.html").read_text()
    for name in pfedbayes.__all__:
        assert f'id="pfedbayes.{name}"' in page, name


@pytest.mark.parametrize("path", sorted(notebooks.FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_site_shows_notebooks_with_what_they_print(site, path):
    text = text_of(site / "tutorials" / f"{path.stem}.html")
    assert (site / "tutorials" / path.name).read_text() == path.read_text()
    for cell in notebooks.read(path)["cells"]:
        for output in cell.get("outputs", []):
            assert "".join(output["text"]).splitlines()[-1].strip() in text


def test_the_picture_of_posteriors_is_what_was_computed():
    found = json.loads((posterior.FOLDER / "posterior.json").read_text())
    assert (posterior.FOLDER / "posterior.svg").read_text() == posterior.draw(found)
    again = posterior.compute()
    for old, new in zip([*found["clients"], found["shared"]], [*again["clients"], again["shared"]], strict=True):
        assert new["mean"] == pytest.approx(old["mean"], abs=0.02)
        assert new["deviation"] == pytest.approx(old["deviation"], abs=0.02)


def test_the_picture_shows_what_the_landing_page_says():
    few, _, many = json.loads((posterior.FOLDER / "posterior.json").read_text())["clients"]
    shared = json.loads((posterior.FOLDER / "posterior.json").read_text())["shared"]
    for k in range(2):
        assert min(few["alone"][k], shared["mean"][k]) < few["mean"][k] < max(few["alone"][k], shared["mean"][k])
        assert abs(many["mean"][k] - many["alone"][k]) < 0.03
        assert few["deviation"][k] > 2 * many["deviation"][k]


@pytest.mark.parametrize("name", examples.NAMES)
def test_pages_of_examples_are_what_their_runs_left(name):
    written = examples.render(name, json.loads((examples.FOLDER / f"{name}.json").read_text()))
    for file, content in written.items():
        assert (examples.FOLDER / file).read_text() == content, f"{file}: run `make examples ARGS=--no-run`"
    there = {path.name: path.read_text() for path in examples.FOLDER.glob(f"{name}*")}
    assert there.keys() - {f"{name}.json"} == written.keys()
    assert not [file for file, content in there.items() if tempfile.gettempdir() in content]


def test_pages_of_examples_show_output_between_commands_and_little_of_the_progress():
    output = "a\nround 1/9 x\nround 2/9 x\nround 3/9 x\nround 9/9 x\nb \n$ two\nc\n"
    assert examples.commands(output) == [
        {"line": "", "output": "a\nround 1/9 x\n…\nround 9/9 x\nb"},
        {"line": "two", "output": "c"},
    ]


def test_the_page_on_the_prior_is_what_was_measured():
    folder = ROOT / "docs" / "results"
    measured, table1 = (json.loads((folder / f"{name}.json").read_text()) for name in ("choosing", "table1"))
    assert (folder / "choosing.md").read_text() == choosing.render(measured, table1)


def test_the_advice_on_the_prior_quotes_what_was_measured():
    advice, *measured = (
        (ROOT / "docs" / name).read_text()
        for name in ("choosing.md", "results/choosing.md", "results/table2.md", "results/tuning.md")
    )
    quoted = re.findall(r"(?<![\d.])\d+\.\d{2,}(?!\d)", advice)
    assert len(quoted) > 20
    known = {number for page in measured for number in re.findall(r"\d+\.\d+", page)}
    assert set(quoted) <= known
