"""The search for settings: what it draws, drops, chooses, and how it goes on after a stop."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from pfedbayes.errors import UserError
from pfedbayes.files.checksums import BLANK, dump_json, seal
from pfedbayes.files.typed import to_json
from pfedbayes.methods import METHODS, FedAvg, Hierarchical, PFedBayes
from pfedbayes.report.tuning import importance, page_of, ranked, verdict
from pfedbayes.runs import TUNING
from pfedbayes.runs.experiment import from_sections
from pfedbayes.sweep.space import SPACES, Range, draw, parse_range, space_of
from pfedbayes.sweep.tuning import Trial, Tuning, _after_stage, read_tuning, tune, tuned
from tests.command_line import SMALL, pfedbayes

SECTIONS = {
    "data": {"name": "blobs", "clients": 3, "examples": 60, "validation": 0.3},
    "method": {"name": "fedavg", "eta": 1e-6},
    "net": {"hidden": [8]},
    "training": {"rounds": 8, "local_steps": 5, "batch_size": 10},
}
SPACE = {"eta": Range(1e-3, 1.0)}


def experiment(**changes):
    return from_sections({name: values | changes.get(name, {}) for name, values in (SECTIONS | changes).items()})


def run(out, count=6, space=SPACE, **changes):
    steps = list(tune(experiment(**changes), out, space, count))
    return steps, read_tuning(out / TUNING)


def search_of(scores, stages=(1, 2, 4)):
    """Return a search whose trials have these scores."""
    trials = [Trial({"eta": 0.1 * (k + 1)}, list(each)) for k, each in enumerate(scores)]
    return Tuning(1, "", "fedavg", {"eta": [0.1, 1.0]}, 10, 0, list(stages), trials)


def finished_search():
    """Return a search that is over: trials 0 to 2 took part in the second stage, 0 and 1 in the last."""
    found = search_of([[3.0] * 3, [1.0] * 3, [2.0] * 2, [3.5], [4.0], [5.0]])
    return dataclasses.replace(found, chosen=1, gain=2.0, error=0.1)


def write_search(folder, found):
    text = dump_json(to_json(found))
    (folder / TUNING).write_text(text)
    return text


def test_the_best_setting_by_validation_rows_is_chosen(tmp_path):
    steps, found = run(tmp_path)
    assert found.stages == [2, 4, 8]
    assert [sum(len(trial.scores) > stage for trial in found.trials) for stage in range(3)] == [6, 3, 2]
    assert steps[0].settings == 6
    last = {k: trial.scores[-1] for k, trial in enumerate(found.trials) if len(trial.scores) == 3}
    assert found.chosen == min(last, key=last.get) != 0
    assert found.gain > found.error > 0
    assert found.gain == pytest.approx(last[0] - last[found.chosen])
    assert tuned(experiment(), found).method == FedAvg(eta=found.trials[found.chosen].values["eta"])


def test_scores_are_those_of_separate_runs(tmp_path):
    from pfedbayes.data import load_shards
    from pfedbayes.runs.experiment import build_federation
    from pfedbayes.runs.joining import row_losses

    _, found = run(tmp_path)
    best = tuned(experiment(), found)
    shards = load_shards(best.data)
    alone = build_federation(best, shards, [best.training.seed])
    for _ in alone.rounds():
        pass
    losses = np.concatenate([row_losses(alone, i, 0, rows) for i, rows in enumerate(shards.validation)])
    assert losses.mean() == pytest.approx(found.trials[found.chosen].scores[-1], rel=1e-4)
    assert len(losses) == found.rows


def test_without_validation_rows_those_that_folds_leave_out_decide(tmp_path):
    _, found = run(tmp_path, data={"validation": 0.0}, evaluation={"folds": 3})
    assert found.folds == 3
    assert found.rows == 3 * round(60 * 0.8) or found.rows > 0
    assert len(ranked(found)) == 2


def test_a_search_goes_on_after_the_last_finished_stage(tmp_path):
    whole = run(tmp_path / "whole")[1]
    steps = tune(experiment(), tmp_path / "cut", SPACE, 6)
    for step in steps:
        if step.tuning.done == 1 and step.round == 3:
            steps.close()
    assert read_tuning(tmp_path / "cut" / TUNING).done == 1
    later, found = run(tmp_path / "cut")
    assert later[0].settings == 3
    assert found.chosen == whole.chosen
    for one, other in zip(found.trials, whole.trials, strict=True):
        assert one.scores == pytest.approx(other.scores, rel=1e-4)
    assert run(tmp_path / "cut")[0] == []  # nothing is left to do


@pytest.mark.parametrize("change", [{"count": 5}, {"space": {"eta": Range(1e-3, 0.5)}}, {"training": {"rounds": 9}}])
def test_another_search_in_the_same_folder_is_refused(tmp_path, change):
    next(tune(experiment(), tmp_path, SPACE, 6))
    run(tmp_path)
    with pytest.raises(UserError, match="is another search"):
        run(tmp_path, **change)


def test_half_of_the_settings_go_on_and_the_given_one_always_does():
    assert search_of([[9], [3], [1], [2], [5], [4], [8], [7]]).alive == [0, 1, 2, 3]
    assert search_of([[9], [3], [1], [None], [5], [4], [8], [7]]).alive == [0, 1, 2, 5]
    assert search_of([[9], [None], [None], [None]]).alive == [0]
    assert search_of([[9, 9], [3, 1], [1, 2], [2, 3], [5], [4], [8], [7]]).alive == [0, 1]
    assert search_of([[], []]).alive == [0, 1]
    assert search_of([[3, 3, 3], [2, 2, 2]]).alive == [0, 1]


@pytest.mark.parametrize(
    ("difference", "chosen"), [([0.1, 0.1, 0.2, 0.1], 1), ([0.5, -0.4, 0.4, -0.45], 0), ([-0.1, -0.2, -0.1, -0.1], 0)]
)
def test_another_setting_is_chosen_only_beyond_a_standard_error(difference, chosen):
    given = np.array([1.0, 2.0, 1.5, 3.0])
    before = search_of([[3.0, 3.0], [2.0, 2.0]])
    after = _after_stage(before, [0, 1], [given, given - difference])
    assert after.chosen == chosen
    if chosen or np.mean(difference) > 0:
        assert after.gain == pytest.approx(np.mean(difference))
        assert after.error == pytest.approx(np.std(difference, ddof=1) / 2)


def test_one_row_has_no_standard_error():
    before = search_of([[3.0, 3.0], [2.0, 2.0]])
    after = _after_stage(before, [0, 1], [np.array([1.0]), np.array([0.5])])
    assert (after.chosen, after.gain, after.error) == (1, 0.5, 0.0)


def test_a_setting_that_diverged_is_dropped(tmp_path):
    _, found = run(tmp_path, count=4, space={"eta": Range(1e10, 1e30)})
    assert [trial.scores for trial in found.trials[1:]] == [[None]] * 3
    assert found.chosen == 0
    assert "diverged" in page_of(found)


def test_an_experiment_that_diverges_itself_is_refused(tmp_path):
    with pytest.raises(UserError, match="itself diverges"):
        run(tmp_path, method={"name": "fedavg", "eta": 1e30})


@pytest.mark.parametrize(
    ("changes", "count", "message"),
    [
        ({"data": {"validation": 0.0}}, 6, "data.validation=0.2, or evaluation.folds=5"),
        ({}, 1, "give at least 2"),
        ({"training": {"server_optimizer": "adam"}}, 6, "server optimizer"),
    ],
)
def test_what_cannot_be_tuned_is_refused(tmp_path, changes, count, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path, count, **changes)


def test_a_damaged_search_is_refused(tmp_path):
    run(tmp_path)
    path = tmp_path / TUNING
    text = path.read_text()
    for damage in (text.replace('"fedavg"', '"ditto"'), text[:-30], "{}", "[]"):
        path.write_text(damage)
        with pytest.raises(UserError):
            read_tuning(path)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"trials": []}, {"stages": []}, {"chosen": 6}, {"chosen": None}, {"chosen": -1},
        {"space": {"eta": [0.1]}}, {"space": {"prox": [0.1, 1.0]}}, {"gain": None}, {"error": None},
        {"chosen": 5}, {"stages": [2, 4]}, {"stages": [2, 4, 8, 16]},
    ],
)  # fmt: skip
def test_a_search_whose_parts_do_not_fit_is_refused(tmp_path, change):
    found = dataclasses.replace(finished_search(), **change)
    write_search(tmp_path, found)
    with pytest.raises(UserError, match=TUNING):
        read_tuning(tmp_path / TUNING)


@pytest.mark.parametrize(
    ("trial", "scores"),
    [(1, []), (1, [1.0]), (1, [1.0, 1.0, 1.0, 1.0]), (4, [4.0, 4.0]), (1, [4.5, 1.0, 1.0]), (1, [1.0, 1.0, None]),
     (0, [3.0, 3.0]), (0, [3.0, 3.0, 3.0, 3.0]), (5, [])],
)  # fmt: skip
def test_a_search_with_scores_of_a_stage_that_a_trial_cannot_have_had_is_refused(tmp_path, trial, scores):
    write_search(tmp_path, finished_search())
    assert read_tuning(tmp_path / TUNING) == finished_search()
    trials = list(finished_search().trials)
    trials[trial] = dataclasses.replace(trials[trial], scores=scores)
    write_search(tmp_path, dataclasses.replace(finished_search(), trials=trials))
    with pytest.raises(UserError, match=TUNING):
        read_tuning(tmp_path / TUNING)


def test_scores_of_a_file_are_finite(tmp_path):
    text = write_search(tmp_path, finished_search())
    for number in ("1e999", "NaN"):
        for old, new in (("[5.0]", f"[{number}]"), ('"error": 0.1', f'"error": {number}')):
            blank = re.sub(r'(?<="checksum": ")\w+', BLANK, text.strip())
            (tmp_path / TUNING).write_text(seal(blank.replace(old, new)))
            with pytest.raises(UserError, match=r"not finite|does not follow|not a JSON number"):
                read_tuning(tmp_path / TUNING)


@pytest.mark.parametrize("change", [{"chosen": 0}, {"gain": 0.1}, {"error": 0.1}])
def test_a_search_that_goes_on_has_chosen_nothing(tmp_path, change):
    begun = search_of([[3.0], [1.0], [2.0]])
    write_search(tmp_path, begun)
    assert read_tuning(tmp_path / TUNING) == begun
    write_search(tmp_path, dataclasses.replace(begun, **change))
    with pytest.raises(UserError, match="does not follow"):
        read_tuning(tmp_path / TUNING)


@pytest.mark.parametrize("target", ["tuning.json", "elsewhere.json", "missing.json"])
def test_a_link_is_no_search(tmp_path, target):
    write_search(tmp_path, finished_search())
    (tmp_path / TUNING).rename(tmp_path / "elsewhere.json")
    (tmp_path / TUNING).symlink_to(target)
    with pytest.raises(UserError, match="symbolic link"):
        run(tmp_path)


def test_a_run_that_tunes_refuses_a_folder_of_other_files_before_the_search(tmp_path):
    (tmp_path / "notes.txt").touch()
    done = pfedbayes("run", *SMALL, "--tune", 2, "--set", "data.validation=0.3", "--out", tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert "holds other files (notes.txt, …)" in done.stderr
    assert not (tmp_path / TUNING).exists()


# Spaces


def test_every_space_is_one_of_numbers_that_the_method_accepts():
    for name, space in SPACES.items():
        method = METHODS[name]()
        assert space_of(name, method) == dict(space)
        for key, values in space.items():
            assert isinstance(getattr(method, key), float)
            assert values.low < values.high


def test_the_documentation_lists_the_spaces():
    page = (Path(__file__).parents[2] / "docs" / "comparing.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \| (`.*`) \|$", page, re.MULTILINE)
    found = {
        name: dict(map(parse_range, (f"method.{text}" for text in re.findall("`(.*?)`", texts))))
        for name, texts in rows
    }
    assert found == {name: dict(space) for name, space in SPACES.items()}


def test_settings_fill_the_space_and_begin_with_the_given_one():
    given = PFedBayes(zeta=3.0)
    found = draw(given, SPACES["pfedbayes"], 65, seed=1)
    assert found[0] == given
    for name, values in SPACES["pfedbayes"].items():
        drawn = np.array([getattr(method, name) for method in found[1:]])
        scaled = np.log(drawn) if values.logarithmic else drawn
        low, high = (math.log(end) if values.logarithmic else end for end in (values.low, values.high))
        counts, _ = np.histogram((scaled - low) / (high - low), bins=8, range=(0, 1))
        assert counts.tolist() == [8] * 8
    assert found == draw(given, SPACES["pfedbayes"], 65, seed=1)
    assert found != draw(given, SPACES["pfedbayes"], 65, seed=2)


def test_ranges():
    assert parse_range("method.zeta=0.01..10") == ("zeta", Range(0.01, 10.0))
    assert Range(0.01, 10.0).logarithmic
    assert not Range(0.5, 1.0).logarithmic
    assert not Range(-4.0, -1.0).logarithmic
    assert Range(0.01, 1.0).at(0.5) == pytest.approx(0.1)
    assert Range(1.0, 3.0).at(0.25) == pytest.approx(1.5)


@pytest.mark.parametrize(
    "text",
    ["", "zeta=1..2", "zeta.method=1..2", "=1..2", "method.zeta=1..1", "method.zeta=0..1e400", "method.zeta=1,2",
     "method.zeta", "method.zeta=1", "method.zeta=2..1", "method.zeta=1..nan", "method.zeta=1..inf",
     "training.rounds=1..2", "method.=1..2", "method.zeta=a..b", "method.zeta=-inf..1"],
)  # fmt: skip
def test_ranges_that_are_not_understood(text):
    with pytest.raises(UserError, match="is not understood"):
        parse_range(text)


@pytest.mark.parametrize(
    ("method", "name", "ranges", "message"),
    [
        (PFedBayes(), "pfedbayes", ["method.zta=1..2"], "method.zta cannot be tuned: did you mean 'zeta'"),
        (PFedBayes(), "pfedbayes", ["method.samples=1..2"], "method.samples cannot be tuned"),
        (PFedBayes(), "pfedbayes", ["method.zeta=-1..2"], "zeta must not be negative"),
        (METHODS["bnfed"](), "bnfed", [], "has no search space"),
    ],
)
def test_spaces_that_cannot_be_searched(method, name, ranges, message):
    with pytest.raises(UserError, match=message):
        space_of(name, method, ranges)


# The page


def test_the_page_says_what_was_chosen_and_what_mattered(tmp_path):
    _, found = run(tmp_path, space={"eta": Range(1e-4, 0.1)})
    page = page_of(found)
    assert verdict(found) in page
    assert importance(found)["eta"] == pytest.approx(-1)  # larger rates learn more in so few rounds
    assert "6 settings of fedavg" in page


def test_rank_correlations_of_ties_and_of_the_diverged():
    scores = [[2.0], [1.0], [None], [1.0]]
    assert importance(search_of(scores))["eta"] == pytest.approx(np.corrcoef([0, 1, 2, 3], [2, 0.5, 3, 0.5])[0, 1])
    assert importance(search_of([[1.0], [1.0]]))["eta"] == 0


def test_the_page_shows_a_given_setting_that_lies_outside_of_a_logarithmic_range():
    trials = [Trial({"rho0": value}, [1.0]) for value in (-2.5, 1.0, 30.0)]
    found = Tuning(1, "", "pfedbayes", {"rho0": [1.0, 30.0]}, 10, 0, [1], trials, 0, 0.0, 0.0)
    assert "rho0 -2.5: 1.0000" in page_of(found)


@pytest.mark.parametrize(
    ("chosen", "gain", "error", "scores", "words"),
    [
        (1, 0.5, 0.1, [[2.0] * 3, [1.5] * 3], "Setting 1 is chosen"),
        (0, 0.1, 0.5, [[2.0] * 3, [1.9] * 3], "no more than chance may do"),
        (0, 0.0, 0.0, [[2.0] * 3, [2.1] * 3], "as given predicts best"),
    ],
)
def test_verdicts(chosen, gain, error, scores, words):
    assert words in verdict(dataclasses.replace(search_of(scores), chosen=chosen, gain=gain, error=error))


# The command line


def test_tune_writes_an_experiment_that_runs(tmp_path):
    arguments = [*SMALL, "--set", "data.validation=0.2", "--settings", "4", "--out", "search"]
    result = pfedbayes("tune", *arguments, "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(found["trials"]) == 4
    assert "round 6/6" in result.stderr
    assert (tmp_path / "search" / "tuning.html").exists()
    again = pfedbayes("run", "search/tuned.toml", "--out", "run", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert pfedbayes("tune", *arguments, cwd=tmp_path).returncode == 0
    refused = pfedbayes("tune", *arguments, "--space", "method.zeta=1..2", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1


def test_run_can_tune_first(tmp_path):
    arguments = [*SMALL, "--set", "data.validation=0.2", "--tune", "4", "--out", "run"]
    result = pfedbayes("run", *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = read_tuning(tmp_path / "run" / TUNING)
    from pfedbayes.runs import read_run

    method = read_run(tmp_path / "run").experiment.method
    assert all(getattr(method, name) == value for name, value in found.trials[found.chosen].values.items())
    assert pfedbayes("verify", "run", cwd=tmp_path).returncode == 0
    more = pfedbayes("run", *arguments, "--resume", "--set", "training.rounds=8", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert read_run(tmp_path / "run").experiment.method == method


def test_tables_are_tuned_by_their_folds(tmp_path):
    rng = np.random.default_rng(0)
    rows = [f"{'abc'[k % 3]},{x:.3f},{int(x + 0.3 * e > 0)}" for k, (x, e) in enumerate(rng.normal(size=(60, 2)))]
    (tmp_path / "t.csv").write_text("\n".join(["site,x,y", *rows]))
    result = pfedbayes(
        "tune", "--data", "t.csv", "--target", "y", "--client-column", "site", "--set", "training.rounds=4",
        "--settings", "3", "--out", "s", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = read_tuning(tmp_path / "s" / TUNING)
    assert found.folds == 5
    assert found.method == "hierarchical"
    assert set(found.space) == set(SPACES["hierarchical"])
    assert all(isinstance(getattr(Hierarchical(), name), float) for name in found.space)
