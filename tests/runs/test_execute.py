import json

import pytest
import torch
from blobs import BLOBS, same_bits

import pfedbayes
from pfedbayes import runs
from pfedbayes.engine.backend.local_training import LocalTraining
from pfedbayes.errors import UserError
from pfedbayes.methods import METHODS
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_into_a_folder_and_comes_back(tmp_path, name):
    experiment = read_experiment(None, [*BLOBS, f"method.name={name}", "evaluation.label_prior=true"])
    steps = list(execute(experiment, tmp_path / "run", [1, 2]))
    assert [step.round for step in steps] == [1, 2, 3, 4]
    record = steps[-1].record
    assert {which for which in ("personal", "shared") if record.scores(which)} == {
        which for which in ("personal", "shared") if getattr(METHODS[name].about, which)
    }
    back = pfedbayes.load(tmp_path / "run")
    assert back.round == 4
    again = back.evaluate(label_prior=True)
    for which in back.models():
        assert again[which] == record.scores(which)


def test_a_cheap_course_is_recorded_and_the_end_is_looked_at_by_the_headline_estimator(tmp_path):
    cheap = ["evaluation.estimators=['mean']", "evaluation.sampling=activations"]
    steps = list(execute(read_experiment(None, [*BLOBS, *cheap]), tmp_path / "run", [1, 2]))
    assert list(steps[-1].record.personal) == list(steps[-1].record.shared) == ["mean"]
    run = runs.read_run(tmp_path / "run")
    assert run.summary.estimator == "mc10"
    counted = [sum(run.summary.reliability[which].count) for which in ("personal", "shared")]
    assert counted == [2 * sum(run.info.test_sizes)] * 2  # two seeds
    spreads = [example.personal.spread for example in run.summary.examples]
    assert spreads
    assert all(max(spread) > 0 for spread in spreads)


def test_a_run_of_an_earlier_version_that_lacked_an_option_is_resumed_and_another_config_is_named(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    list(execute(read_experiment(None, BLOBS), whole, [1]))
    begun = execute(read_experiment(None, BLOBS), cut, [1])
    next(begun)
    begun.close()
    settings = (cut / runs.CONFIG).read_text()
    assert "shift = 0\n" in settings
    (cut / runs.CONFIG).write_text(settings.replace("shift = 0\n", ""))
    info = json.loads((cut / runs.INFO).read_text())
    (cut / runs.INFO).write_text(json.dumps(info | {"digest": "of other sections"}))
    for others, seeds, how in (
        (["training.shift=1"], [1], "training.shift was 0 and is 1"),
        ([], [1, 2], r"seeds were \[1\] and are \[1, 2\]"),
    ):
        with pytest.raises(UserError, match=rf"was made by another config \({how}\): give another --out"):
            list(execute(read_experiment(None, BLOBS + others), cut, seeds, resume=True))
    list(execute(read_experiment(None, BLOBS), cut, [1], resume=True))
    assert same_bits(pfedbayes.load(cut), pfedbayes.load(whole))


def test_smaller_chunks_are_recorded_for_a_resumed_run(tmp_path, monkeypatch):
    train = LocalTraining.__call__

    def small_memory(self, clients, received, shard, work):
        if len(work.weight) > 2:
            raise torch.OutOfMemoryError
        return train(self, clients, received, shard, work)

    monkeypatch.setattr(LocalTraining, "__call__", small_memory)
    list(execute(read_experiment(None, BLOBS), tmp_path / "run", [1]))
    assert runs.read_run(tmp_path / "run").info.plan.chunk == 2
