import re
from pathlib import Path

from benchmarks import tempering
from pfedbayes.data import DataConfig, load_shards

PAGE = Path(__file__).parents[1] / "docs" / "results" / "tempering.md"
NAMES = ("personal accuracy", "personal nll", "shared accuracy", "shared nll")


def scores(personal, shared):
    return dict(zip(NAMES, (personal, 0.5, shared, 0.7), strict=True))


def test_the_verdict_is_about_all_pairs():
    pairs = [scores(80.0, 60.0)] + [scores(90.0, 60.0)] * (len(tempering.WEIGHTS) - 1)
    found = {("mnist", "small"): [*pairs, scores(95.0, 61.0)]}
    assert re.findall(r"(\d) of 1", tempering.verdict(found)) == ["1", "1"]
    found = {("mnist", "small"): [*pairs[:-1], scores(79.0, 62.0), scores(95.0, 61.0)]}
    assert re.findall(r"(\d) of 1", tempering.verdict(found)) == ["0", "0"]


def test_the_page_says_what_its_table_shows():
    page = PAGE.read_text()
    lines = [line for line in page.splitlines() if line.startswith(("| hierarchical", "| pFedBayes"))]
    found = [dict(zip(NAMES, map(float, line.split("|")[4:8]), strict=True)) for line in lines]
    assert tempering.rows(found) == lines
    assert tempering.verdict({("mnist", "small"): found}) in page


def test_every_pair_and_pfedbayes_are_measured():
    shards = load_shards(DataConfig(name="mnist", size="small", clients=2, train_per_label=5, test_per_label=5))
    found = tempering.measure(shards, 1, 1)
    assert len(found) == len(tempering.WEIGHTS) + 1
    assert all(set(one) == set(NAMES) and 0 <= one["shared accuracy"] <= 100 for one in found)
