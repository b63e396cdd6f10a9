import dataclasses

from pfedbayes.report import render, tables


def test_the_window_is_reduced_per_seed_and_then_over_seeds(make_run):
    run = make_run()
    log = [
        {"round": r, "seconds": 1.0, "shared": None, "personal": {"mean": {"accuracy": [[a, a], [b, b]]}}}
        for r, a, b in ((5, 99.0, 99.0), (7, 80.0, 60.0), (8, 70.0, 90.0))
    ]
    info = {**run.info, "seeds": [1, 2], "test_sizes": [3, 3], "clients": ["a", "b"]}
    config = {**run.config, "training": {**run.config["training"], "evaluate_window": [7, 8]}}
    changed = dataclasses.replace(run, rounds=log, info=info, config=config, summary=None)
    (row,) = tables.window(changed)
    # seed 1 has 80 then 70, seed 2 has 60 then 90; round 5 lies outside
    assert (row.best.value, row.mean.value, row.last.value) == (85.0, 75.0, 80.0)
    assert tables.window(dataclasses.replace(changed, config=run.config)) == []


def test_the_page_shows_the_window(make_run):
    run = make_run()
    config = {**run.config, "training": {**run.config["training"], "evaluate_window": [1, 10_000]}}
    assert "picked on the data it is scored on" in render([dataclasses.replace(run, config=config)])
