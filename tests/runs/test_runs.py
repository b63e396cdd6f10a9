import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pfedbayes import runs
from pfedbayes.errors import UserError
from pfedbayes.runs import folder


@pytest.fixture
def writer(tmp_path):
    writer = runs.Writer(tmp_path / "run")
    yield writer
    writer.close()


def test_a_checkpoint_reads_back_to_the_last_bit(writer):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.randn(2, dtype=torch.float64)}
    writer.append({"round": 1})
    writer.checkpoint(tensors, round=7, seconds=1.25)
    back = runs.read_checkpoint(writer.folder)
    assert (back.round, back.seconds) == (7, 1.25)
    assert back.log_bytes == len('{"round": 1}\n')
    assert back.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back.tensors[name], tensor)


def test_the_log_is_cut_back_to_the_checkpoint(writer):
    writer.append({"round": 1})
    writer.checkpoint({"a": torch.zeros(1)}, round=1, seconds=0.0)
    writer.append({"round": 2})
    writer.truncate_log(runs.read_checkpoint(writer.folder).log_bytes)
    assert (writer.folder / runs.LOG).read_text() == '{"round": 1}\n'


def test_a_folder_has_one_writer(writer):
    with pytest.raises(UserError, match="in use by another run"):
        runs.Writer(writer.folder)


def test_a_killed_writer_leaves_no_lock(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from pfedbayes import runs\n"
        "writer = runs.Writer(Path(sys.argv[1])); writer.append({'round': 1}); os.kill(os.getpid(), signal.SIGKILL)"
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
def test_a_full_disk_is_one_clear_line(writer):
    (writer.folder / runs.LOG).symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"No space left on device.*intact.*--resume"):
        writer.append({"round": 1})


def test_an_unwritable_folder_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        runs.Writer(tmp_path / "file" / "run")


def test_a_file_that_is_no_run_is_named_and_nobody_is_told_to_resume(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to \S+/file/table\.md \(Not a directory\)") as caught:
        runs.write_file(tmp_path / "file" / "table.md", "")
    assert "resume" not in str(caught.value)


@pytest.mark.parametrize("name", ["folder", "."])
def test_a_folder_is_not_written_over(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is a folder: give the name of a file"):
        runs.write_file(Path(name), "")
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def write_folder(folder, info):
    (folder / runs.CONFIG).write_text('[method]\nname = "fedavg"\n')
    (folder / runs.INFO).write_text(info)
    return folder


def test_an_unfinished_run_reads_without_its_broken_last_line(tmp_path):
    write_folder(tmp_path, json.dumps({"format": runs.FORMAT}))
    (tmp_path / runs.LOG).write_text('{"round": 10}\n{"round": 2')
    run = runs.read(tmp_path)
    assert (run.rounds, run.summary) == ([{"round": 10}], None)


@pytest.mark.parametrize(
    ("info", "words"),
    [('{"format": 99, "version": "9.9"}', "format 99"), ("{", "damaged")],
)
def test_a_folder_of_another_format_or_damaged_is_named(tmp_path, info, words):
    with pytest.raises(UserError, match=words):
        runs.read(write_folder(tmp_path, info))


def test_a_foreign_folder_and_a_damaged_state_are_named(tmp_path):
    with pytest.raises(UserError, match="is not a run folder"):
        runs.read(tmp_path)
    (tmp_path / runs.STATE).write_bytes(b"not a state")
    with pytest.raises(UserError, match="is damaged"):
        runs.read_checkpoint(tmp_path)
    assert runs.read_checkpoint(tmp_path / "elsewhere") is None


def test_code_is_told_apart_by_its_files(tmp_path, monkeypatch):
    assert re.fullmatch("[0-9a-f]{16}", runs.describe_code()["source"])
    monkeypatch.setattr(folder, "__file__", str(tmp_path / "runs" / "folder.py"))
    found = set()
    for name, text in (("runs.py", "a"), ("runs.py", "b"), ("other.py", "b")):
        (tmp_path / name).write_text(text)
        found.add(runs.describe_code()["source"])
    assert len(found) == 3
