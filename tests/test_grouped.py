"""The page on grouped data shows what was measured, and its code runs."""

import json
import re
from pathlib import Path

import numpy as np
import pandas
import pytest

from benchmarks import grouped
from benchmarks.silos.scores import NotFitted
from pfedbayes.runs import experiment

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "grouped.md"


@pytest.fixture
def few_rounds(monkeypatch):
    short = {"rounds": 2, "local_steps": 2, "evaluate_every": 2}
    monkeypatch.setitem(experiment.OWN_TABLES, "training", short)
    monkeypatch.setitem(experiment.OWN_TABLES, "evaluation", {"samples": 5, "folds": 2})


def test_the_page_shows_what_was_measured():
    records = json.loads((ROOT / "docs" / "results" / "grouped.json").read_text())
    assert list(records) == ["heart", "school"]
    assert grouped.tables_of(records) in PAGE.read_text()


def test_the_code_of_the_page_runs(few_rounds, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    exec(compile(text.replace("rounds=20", "rounds=2"), "page", "exec"), {"__name__": "page"})  # noqa: S102
    assert len(capsys.readouterr().out.splitlines()) >= 6


@pytest.mark.parametrize("target", ["ill", "cost"])
def test_a_comparison_goes_on_where_it_stopped(target, few_rounds, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x, site = rng.normal(size=60), rng.choice(["north", "south"], 60)
    columns = {"x": x, "site": site, "ill": np.where(x > 0, "yes", "no"), "cost": x + rng.normal(size=60)}
    frame = pandas.DataFrame(columns).drop(columns="cost" if target == "ill" else "ill")
    frame.to_csv(tmp_path / "clinics.csv", index=False)
    saved, fitted = [], []
    own = grouped.rival

    def rival(name, split):
        fitted.append(name)
        if name == "mixed intercepts":
            raise NotFitted("it did not converge")
        return own(name, split)

    monkeypatch.setattr(grouped, "rival", rival)
    records = {}
    where = [f"{tmp_path / 'clinics.csv'}:{target}:site"]
    grouped.compare(where, 1, saved.append, records)
    assert len(saved) == 5
    assert len(fitted) == 4
    grouped.compare(where, 1, saved.append, records)
    assert len(fitted) == 4
    text = grouped.tables_of(records)
    assert "| clinics: 2 groups, 60 rows | NLL |" in text
    assert "random intercepts | – | – |" in text
    scores = records["clinics"]["models"][next(iter(grouped.names_of(records["clinics"]["task"])))][0]
    assert 0 < scores["nll"] < 3
    assert f"{scores['nll']:.3f}" in text
