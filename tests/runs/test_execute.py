import json

import pytest
import torch
from blobs import BLOBS, same_bits

import pfedbayes
from pfedbayes import runs
from pfedbayes.data import load_shards
from pfedbayes.engine.backend.local_training import LocalTraining
from pfedbayes.errors import UserError
from pfedbayes.files.checksums import dump_json
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
    (cut / runs.INFO).write_text(dump_json(info | {"digest": "of other sections"}))
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


def begun(folder, overrides=(), rounds=3):
    """A run that was stopped after some rounds of many."""
    steps = execute(
        read_experiment(None, [*BLOBS, "training.rounds=6", "training.evaluate_every=1", *overrides]), folder, [1]
    )
    for _ in range(rounds):
        next(steps)
    steps.close()
    return folder


def finish(folder, overrides=()):
    experiment = read_experiment(None, [*BLOBS, "training.rounds=6", "training.evaluate_every=1", *overrides])
    return list(execute(experiment, folder, [1], resume=True))


@pytest.mark.parametrize("damage", ["missing", "short", "other bytes"])
def test_a_resume_without_its_log_changes_nothing(tmp_path, damage):
    folder = begun(tmp_path / "run")
    finish(folder)
    log = (folder / runs.LOG).read_bytes()
    if damage == "missing":
        (folder / runs.LOG).unlink()
    else:
        (folder / runs.LOG).write_bytes(log[:-40] if damage == "short" else b"\0" * len(log))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match=r"rounds\.jsonl is damaged .*put back the file of this run"):
        finish(folder, ["training.rounds=7"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("garbage", [b"garbage\n", b"\xff\xfe\0\n{", b"[" * 5000 + b"\n", b"null\n"])
def test_garbage_after_the_last_checkpoint_is_cut_off(tmp_path, garbage):
    whole = begun(tmp_path / "whole", rounds=6)
    folder = begun(tmp_path / "run")
    with (folder / runs.LOG).open("ab") as log:
        log.write(garbage)
    finish(folder)
    assert same_bits(pfedbayes.load(folder), pfedbayes.load(whole))
    assert [record.round for record in runs.read_run(folder).rounds] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("resting", ["host", "file"])
def test_a_finished_run_keeps_its_result_while_it_is_extended(tmp_path, resting):
    more = ["data.validation=0.2", "training.train=chosen", f"execution.resting={resting}"]
    folder, untouched = tmp_path / "run", tmp_path / "untouched"
    rows = load_shards(read_experiment(None, BLOBS).data).x[:5]

    def answers(name):
        client = pfedbayes.open_client(name, "client 0")
        return client.outputs(3)(rows)

    for name in (folder, untouched):
        finish(begun(name, more), more)
    before, summary = answers(folder), (folder / runs.SUMMARY).read_bytes()
    longer = read_experiment(None, [*BLOBS, "training.evaluate_every=1", *more, "training.rounds=9",
                                    "execution.checkpoint_seconds=0"])  # fmt: skip
    for _ in range(2):  # stopped twice
        steps = execute(longer, folder, [1], resume=True)
        next(steps)
        steps.close()
        assert (folder / runs.SUMMARY).read_bytes() == summary
        assert torch.equal(answers(folder), before)
        assert runs.read_run(folder).rounds[-1].round == runs.read_run(folder).summary.rounds == 6
    list(execute(longer, folder, [1], resume=True))
    assert runs.read_run(folder).summary.rounds == 9
    assert not (folder / runs.FINISHED).exists()
    assert not torch.equal(answers(folder), before)
    list(execute(longer, untouched, [1], resume=True))
    assert torch.equal(answers(folder), answers(untouched))


def test_a_resume_by_other_versions_is_recorded_and_said(tmp_path, caplog):
    folder = begun(tmp_path / "run")
    info = json.loads((folder / runs.INFO).read_text())
    info["version"], info["hardware"]["torch"] = "0.0.1", "1.0"
    (folder / runs.INFO).write_text(dump_json(info))
    finish(folder)
    assert "torch" in caplog.text
    assert "instead of 0.0.1" in caplog.text
    after = runs.read_info(folder)
    assert (after.version, after.hardware.torch) == ("0.0.1", "1.0")
    (change,) = after.resumed
    assert (change.after_round, change.version, change.hardware.torch) == (3, pfedbayes.__version__, torch.__version__)
    caplog.clear()
    finish(folder, ["training.rounds=7"])
    assert not caplog.messages
    assert runs.read_info(folder).resumed == [change]
