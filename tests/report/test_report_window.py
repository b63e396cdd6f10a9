import dataclasses

from pfedbayes.report import render, tables
from pfedbayes.runs import RoundRecord


def with_window(run, first, last):
    training = run.sections["training"] | {"evaluate_window": [first, last]}
    return dataclasses.replace(run, sections=run.sections | {"training": training})


def test_the_window_is_reduced_per_seed_and_then_over_seeds(make_run):
    run = make_run()
    log = [
        RoundRecord(r, 1.0, personal={"mean": {"accuracy": [[a, a], [b, b]]}})
        for r, a, b in ((5, 99.0, 99.0), (7, 80.0, 60.0), (8, 70.0, 90.0))
    ]
    info = dataclasses.replace(run.info, seeds=[1, 2], test_sizes=[3, 3], clients=["a", "b"])
    run = dataclasses.replace(run, rounds=log, info=info, summary=None)
    (row,) = tables.window(with_window(run, 7, 8))
    # seed 1 has 80 then 70, seed 2 has 60 then 90; round 5 lies outside
    assert (row.best.value, row.mean.value, row.last.value) == (85.0, 75.0, 80.0)
    assert tables.window(run) == []


def test_the_page_shows_the_window(make_run):
    assert "picked on the data it is scored on" in render([with_window(make_run(), 1, 10_000)])
