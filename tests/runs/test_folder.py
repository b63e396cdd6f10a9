import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pfedbayes import runs
from pfedbayes.engine.plan import Plan
from pfedbayes.errors import UserError
from pfedbayes.files.checksums import dump_json
from pfedbayes.methods import FedAvg
from pfedbayes.runs import folder
from pfedbayes.runs.schema import UNCHECKED_FORMAT

LINE = '{"round": 1, "seconds": 0.5, "personal": null, "shared": null}\n'
CHECKED_LINE = dump_json(json.loads(LINE))
# run.json without a checksum and the fields that later versions have added.
EARLY = {
    "format": UNCHECKED_FORMAT, "version": "0.1.0", "commit": None, "created": "2026-01-01T12:00:00+00:00",
    "hardware": {"device": "cpu", "cpu": "Some CPU", "cores": 2, "memory_gb": 23, "gpu": None, "torch": "2",
                 "python": "3"},
    "plan": {"over": "vmap", "threads": 2}, "seeds": [1], "clients": ["a", "b"], "train_sizes": [3, 4],
    "test_sizes": [5, 6], "labels": None, "num_params": 7, "task": "classification",
    "method": {"name": "fedavg", "title": "FedAvg", "personal": False, "shared": True, "stochastic": False},
}  # fmt: skip


@pytest.fixture
def writer(tmp_path):
    writer = runs.Writer(tmp_path / "run")
    yield writer
    writer.close()


def test_a_checkpoint_reads_back_to_the_last_bit(writer):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.randn(2, dtype=torch.float64)}
    writer.append(runs.RoundRecord(1, 0.5))
    writer.checkpoint(tensors, round=7, seconds=1.25)
    back = runs.read_checkpoint(writer.folder)
    assert (back.round, back.seconds) == (7, 1.25)
    assert back.log_bytes == len(CHECKED_LINE)
    assert back.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back.tensors[name], tensor)


def test_the_log_is_cut_back_to_the_checkpoint(writer):
    writer.append(runs.RoundRecord(1, 0.5))
    writer.checkpoint({"a": torch.zeros(1)}, round=1, seconds=0.0)
    writer.append(runs.RoundRecord(2, 1.0))
    writer.truncate_log(runs.read_checkpoint(writer.folder).log_bytes)
    assert (writer.folder / runs.LOG).read_text() == CHECKED_LINE


def test_a_folder_has_one_writer(writer):
    with pytest.raises(UserError, match="in use by another run"):
        runs.Writer(writer.folder)


def test_a_killed_writer_leaves_no_lock(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from pfedbayes import runs\n"
        "writer = runs.Writer(Path(sys.argv[1])); writer.append(runs.RoundRecord(1, 0.5))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=False)
    assert killed.returncode == -9
    runs.Writer(tmp_path / "run").close()


def test_a_folder_to_which_nothing_was_written_goes(tmp_path):
    runs.Writer(tmp_path / "run").close()
    assert not (tmp_path / "run").exists()


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(writer, monkeypatch):
    writer.checkpoint({"a": torch.zeros(1)}, round=1, seconds=0.0)
    before = sorted(path.name for path in writer.folder.iterdir())

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"No space left on device.*--resume"):
        writer.write(runs.STATE, b"new")
    assert sorted(path.name for path in writer.folder.iterdir()) == before
    assert runs.read_checkpoint(writer.folder).round == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")  # noqa: PTH110
def test_a_full_disk_is_one_clear_line(writer, monkeypatch):
    monkeypatch.setattr(folder, "open_to_write", lambda _: os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb"))
    with pytest.raises(UserError, match=r"No space left on device.*intact.*--resume"):
        writer.append(runs.RoundRecord(1, 0.5))


def test_an_unwritable_folder_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        runs.Writer(tmp_path / "file" / "run")


def write_folder(folder, info):
    (folder / runs.CONFIG).write_text('[method]\nname = "fedavg"\n[training]\nrounds = 7\n')
    (folder / runs.INFO).write_text(info if isinstance(info, str) else json.dumps(info))
    return folder


def test_an_unfinished_run_reads_without_its_broken_last_line(tmp_path):
    write_folder(tmp_path, EARLY)
    (tmp_path / runs.LOG).write_text(LINE + '{"round": 2')
    run = runs.read_run(tmp_path)
    assert (run.rounds, run.summary, run.journal) == ([runs.RoundRecord(1, 0.5)], None, [])
    assert (run.experiment.method, run.experiment.training.rounds) == (FedAvg(), 7)


def test_a_folder_of_an_early_version_gets_defaults_for_newer_fields(tmp_path):
    info = runs.read_info(write_folder(tmp_path, EARLY))
    assert (info.num_clients, info.class_names, info.source, info.federation) == (None, None, None, None)
    assert (info.plan, info.hardware.processor) == (Plan(threads=2), "Some CPU")


def test_a_run_on_flower_has_a_plan_of_nodes_and_an_experiment_without_data(tmp_path):
    federation = {"id": "a", "settings": {"federation.privacy_delta": 1e-5}, "left": []}
    plan = {"over": "nodes", "dtype": "float32", "wire": "float16"}
    write_folder(tmp_path, EARLY | {"plan": plan, "federation": federation})
    with (tmp_path / runs.CONFIG).open("a") as file:
        file.write('[data]\nname = "the data of 2 nodes"\n[federation]\nclients = 2\n')
    run = runs.read_run(tmp_path)
    assert run.info.plan == runs.NodesPlan("nodes", "float32", "float16")
    assert run.info.federation.privacy_delta == 1e-5
    assert run.experiment.training.rounds == 7


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ('{"format": 99, "version": "9.9"}', "format 99, not 2: read it with pfedbayes 9.9"),
        ("{", "run.json is damaged"),
    ],
)
def test_a_folder_of_another_format_or_damaged_is_named(tmp_path, info, words):
    with pytest.raises(UserError, match=words):
        runs.read_run(write_folder(tmp_path, info))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            runs.INFO,
            {key: value for key, value in EARLY.items() if key != "seeds"},
            "run.json is damaged (seeds is missing)",
        ),
        (runs.INFO, EARLY | {"seeds": "1"}, "run.json is damaged (seeds is '1', not a list)"),
        (runs.INFO, EARLY | {"hardware": {"device": 3}}, "run.json is damaged (hardware.device is 3, not a text)"),
        (runs.SUMMARY, {"rounds": 7, "seconds": None, "estimator": "mean"}, "(seconds is None, not a number)"),
        (
            runs.LOG,
            {"round": 1, "seconds": 0.5, "personal": {"mean": {"nll": [["x"]]}}},
            "rounds.jsonl is damaged (line 1: ",
        ),
        (runs.LOG, {"round": 1, "seconds": 0.5, "personal": {"mean": {"nll": [["x"]]}}}, "personal.mean.nll[0][0]"),
        (runs.JOURNAL, {"round": 1}, "federation.jsonl is damaged (line 1: attempt is missing)"),
    ],
)
def test_a_missing_or_wrong_field_is_named_with_its_file(tmp_path, name, content, words):
    write_folder(tmp_path, EARLY)
    (tmp_path / name).write_text(json.dumps(content) + "\n")
    with pytest.raises(UserError) as caught:
        runs.read_run(tmp_path)
    assert words in str(caught.value)
    assert str(caught.value).endswith("start the run again in a new folder")
    assert "\n" not in str(caught.value)


def test_a_foreign_folder_and_a_damaged_state_are_named(tmp_path):
    for read in (runs.read_run, runs.read_info):
        with pytest.raises(UserError, match="is not a run folder"):
            read(tmp_path)
    (tmp_path / runs.STATE).write_bytes(b"not a state")
    with pytest.raises(UserError, match="is damaged"):
        runs.read_checkpoint(tmp_path)
    assert runs.read_checkpoint(tmp_path / "elsewhere") is None


def whole_folder(writer):
    """A folder in the present format, with a log of one line."""
    write_folder(writer.folder, dump_json(EARLY | {"format": runs.FORMAT}))
    writer.append(runs.RoundRecord(1, 0.5))
    writer.checkpoint({"a": torch.arange(40.0)}, round=1, seconds=0.0)
    writer.write_summary(runs.Summary(rounds=1, seconds=0.5, estimator="mean"))
    return writer.folder


@pytest.mark.parametrize("name", [runs.INFO, runs.LOG, runs.SUMMARY, runs.STATE])
def test_every_flipped_bit_is_noticed(writer, name):
    path = whole_folder(writer) / name
    content = path.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 150)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1 << position % 8]) + content[position + 1 :])
        if name == runs.LOG and path.read_bytes()[-1:] != b"\n":
            continue  # a last line without an end was cut short by a kill, which is no damage
        if path.read_bytes().split() == content.split():
            continue  # another kind of white space
        with pytest.raises(UserError, match=name) as caught:
            runs.read_checkpoint(writer.folder) if name == runs.STATE else runs.read_run(writer.folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [runs.INFO, runs.LOG, runs.SUMMARY])
def test_a_checksum_may_not_be_missing(writer, name):
    path = whole_folder(writer) / name
    content = json.loads(path.read_text())
    del content["checksum"]
    path.write_text(json.dumps(content) + "\n")
    with pytest.raises(UserError, match="its checksum is missing"):
        runs.read_run(writer.folder)


def test_a_folder_without_checksums_is_read_with_a_note(tmp_path, caplog):
    runs.read_info(write_folder(tmp_path, EARLY))
    runs.read_info(tmp_path)
    (note,) = caplog.messages
    assert "earlier version, without checksums" in note


@pytest.mark.parametrize("name", [runs.CONFIG, runs.INFO, runs.LOG, runs.SUMMARY, runs.STATE])
def test_links_inside_a_folder_are_not_followed(writer, tmp_path, name):
    path = whole_folder(writer) / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{name}.*symbolic link"):
        runs.read_checkpoint(writer.folder) if name == runs.STATE else runs.read_run(writer.folder)


def test_a_folder_may_itself_be_a_link(writer, tmp_path):
    whole_folder(writer)
    (tmp_path / "link").symlink_to(writer.folder)
    assert runs.read_run(tmp_path / "link").summary.rounds == 1


def test_a_linked_lock_or_log_is_not_written_to(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(victim)
    with pytest.raises(UserError, match="cannot write to"):
        runs.Writer(tmp_path / "run")
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / runs.LOG).symlink_to(victim)
    writer = runs.Writer(tmp_path / "run")
    with pytest.raises(UserError, match="cannot write to"):
        writer.append(runs.RoundRecord(1, 0.5))
    writer.close()
    assert victim.read_text() == "precious"


def test_a_pipe_is_not_written_to(writer, tmp_path):
    os.mkfifo(writer.folder / runs.LOG)
    with pytest.raises(UserError, match="cannot write to"):
        writer.append(runs.RoundRecord(1, 0.5))
    (tmp_path / "other").mkdir()
    os.mkfifo(tmp_path / "other" / ".lock")
    with pytest.raises(UserError, match="cannot write to"):
        runs.Writer(tmp_path / "other")


def test_a_result_that_cannot_be_cleared_away_is_one_line(writer, monkeypatch):
    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(UserError, match="Input/output error"):
        writer.write_summary(runs.Summary(rounds=1, seconds=0.5, estimator="mean"))


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_refused_without_waiting(writer, make):
    (whole_folder(writer) / runs.SUMMARY).unlink()
    make(writer.folder / runs.SUMMARY)
    with pytest.raises(UserError, match=f"{runs.SUMMARY} \\(it is not a file"):
        runs.read_run(writer.folder)


@pytest.mark.parametrize("content", ["[]", "7", '"text"', "[" * 100_000, '{"a":' * 100_000, "9" * 5000, "NaN", ""])
def test_other_json_is_one_clear_line(writer, content):
    (whole_folder(writer) / runs.INFO).write_text(content)
    with pytest.raises(UserError, match=r"run\.json is damaged \(") as caught:
        runs.read_info(writer.folder)
    assert len(str(caught.value)) < 600


def test_a_log_is_never_longer_than_it_was(writer):
    whole_folder(writer)
    with pytest.raises(UserError, match="shorter than the last checkpoint says"):
        writer.truncate_log(10_000)
    assert b"\0" not in (writer.folder / runs.LOG).read_bytes()
