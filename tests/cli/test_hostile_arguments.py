"""Arguments that no user means: each is refused in one line with exit code 2, or works."""

import json
import subprocess
import sys

import pytest
import torch

from command_line import SMALL
from pfedbayes import runs, save
from pfedbayes.data import load_shards
from pfedbayes.runs.experiment import build_federation, read_experiment
from pfedbayes.runs.saving import read_preprocessing

LONG = "x" * 5000
QUICK = [*SMALL, "--set", "training.rounds=1"]


@pytest.fixture
def refused(in_process, tmp_path, monkeypatch):
    """`pfedbayes …` that has to end with one line and exit code 2; return the line."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        done = in_process(*arguments)
        assert (done.code, done.out) == (2, ""), done
        assert "Traceback" not in done.err
        *_, line = done.err.splitlines()
        assert line.startswith("pfedbayes: ")
        assert line.isprintable()
        assert len(line) < 2500
        assert sum(one.startswith("pfedbayes: ") for one in done.err.splitlines()) == 1
        return line

    return call


@pytest.fixture
def saved(tmp_path):
    """A folder that pfedbayes.save wrote."""
    experiment = read_experiment(None, ["data.name=blobs", "data.clients=3", "net.hidden=[4]"])
    return save(build_federation(experiment, load_shards(experiment.data), [1], device="cpu"), tmp_path / "saved")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("execution.threads=100000", "threads must be between 1 and 1024"),
        ("execution.threads=2147483648", "threads must be between 1 and 1024"),
        ("training.rounds=1000000000000000000", "rounds must be between 1 and 10000000"),
        (f"training.rounds={'9' * 5000}", "training.rounds is '9999"),
        (f"training.rounds=0x{'f' * 5000}", "give a whole number"),
        ("training.rounds=9223372036854775808", "give a whole number"),
        ("training.local_steps=1000000000", "local_steps must be between"),
        ("net.hidden=[1000000000]", "the network needs at least"),
        ("net.hidden=[1000000000, 1000000000]", "reduce net.hidden"),
        ("data.clients=1000000000", "clients must be between"),
        ("data.examples=1000000000000", "a synthetic set of this size needs"),
        ("data.features=1000000000000", "a synthetic set of this size needs"),
        ("method.samples=1000000000", "samples must be between"),
        ("evaluation.samples=1000000000", "samples must be between"),
        ("net.settings=1", "net.settings are arguments of your own module"),
        ("method.name=[1]", "unknown method [1]"),
        ("method.name={a=1}", "unknown method {'a': 1}"),
        ("method.zeta=inf", "method.zeta is infinite"),
        ("data.path=[1]", "data.path is [1]: give a text"),
        ('data.target="a\\u0000b"', "data.target is"),
        ("data.target=\udcff", "data.target is"),
        ("net.hidden=" + "[" * 100_000, "net.hidden is"),
        ("method.\x1b[31m=1", r"method.\x1b[31m"),
        ("", "empty"),
        ("=", "--set '=' is not understood"),
    ],
    ids=lambda value: value[:30].encode("ascii", "backslashreplace").decode(),
)
def test_settings(refused, setting, words):
    assert words in refused("run", "--set", "data.name=blobs", "--set", setting)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--seeds", "1000000000"], "give 1 to 1000 seeds"),
        (["run", "--data", "~nobody-at-all/x", "--target", "y"], "data.path is '~nobody-at-all/x'"),
        (["run", "--out", ""], "'--out' is empty"),
        (["run", "--data="], "'--data' is empty"),
        (["report", ""], "is empty"),
        (["run", LONG], "File name too long"),
        (["run", "--out", LONG, "--set", "data.name=blobs"], "File name too long"),
        (["report", LONG], "is not a run folder"),
        (["report", "\x1b[31mred\nline"], r"\x1b[31mred\nline is not a run folder"),
        (["report", "\udcff"], r"\udcff is not a run folder"),
        (["report", ":cat:"], ":cat: is not a run folder"),
        (["report", "[bold]x[/]"], "[bold]x[/] is not a run folder"),
        (["predict", LONG, "--input", LONG], "File name too long"),
        (["personalize", "x", "--data", "y", "--zeta", "nan"], "'nan' is not a finite number"),
        (["personalize", "x", "--data", "y", "--zeta", "-1"], "-1.0 is not in the range"),
        (["personalize", "x", "--data", "y", "--steps", "9" * 30], "is not in the range"),
        (["sweep", "x", "--out", "y", "--minutes", "inf"], "'inf' is not a finite number"),
        (["certify", "x", "--draws", "9" * 5000], "is not a valid int"),
        (["paper", "bound", "--bound", "1e400"], "weight_bound must be at most 1e+15"),
        (["paper", "bound", "--zeta", "nan"], "zeta must be at most"),
        (["paper", "bound", "--n", "9" * 40], "n must be at most"),
        (["paper", "bound", "--layers", "9" * 18], "layers must be at most 10000"),
        (["paper", "bound", "--constant", "delta=500"], "delta must be at most 50"),
        (["paper", "bound", "--constant", "C=inf"], "constants.C is infinite"),
        (["\x1b[31m"], r"\x1b[31m"),
        (["run", "--nosuch\udcff"], r"--nosuch\udcff"),
    ],
    ids=lambda value: str(value)[:30].encode("ascii", "backslashreplace").decode(),
)
def test_arguments(refused, arguments, words):
    assert words in refused(*arguments)


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "null", "\udcff", '{"format": 1}'], ids=range(5))
def test_a_run_json_that_is_none(refused, tmp_path, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / runs.CONFIG).write_text("")
    (tmp_path / "run" / runs.INFO).write_bytes(content.encode(errors="surrogateescape"))
    assert "run.json" in refused("report", "run")


@pytest.mark.parametrize(
    "command",
    [["report"], ["uncertainty"], ["certify"], ["paper", "bound"]],
    ids=lambda command: command[0],
)
def test_every_command_says_that_a_saved_federation_is_no_run(refused, saved, tmp_path, command):
    (tmp_path / "new.csv").write_text("a,b\n1,2\n")
    assert str(saved) in refused(*command, saved)


@pytest.mark.parametrize("out", ["/dev/null", "file", "/proc/x", "\udcff\n"])
def test_export_of_all_clients_to_an_odd_place(in_process, tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert in_process("run", *QUICK, "--out", "run").code == 0
    done = in_process("export", "run", "--all", "-o", out)
    assert "Traceback" not in done.err
    if out == "\udcff\n":
        assert done.code == 0
        assert len(done.out.splitlines()) == 4
    else:
        assert done.code == 2
        assert len(done.err.splitlines()) == 1


def test_names_that_look_like_markup_are_printed_as_they_are(in_process, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{name},{k % 7},{'yes' if k % 3 else 'no'}\n" for name in ("[/x]", ":cat:") for k in range(40))
    (tmp_path / "[b]:cat:.csv").write_text("client,a,label\n" + rows)
    done = in_process(
        "run", "--data", "[b]:cat:.csv", "--target", "label", "--client-column", "client",
        "--set", "training.rounds=1", "--set", "data.certify=0.5", "--out", "[i]:dog:",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "[b]:cat: → [i]:dog:" in done.err
    assert "run folder: [i]:dog:" in done.out
    certified = in_process("certify", "[i]:dog:", "--steps", "1", "--draws", "2")
    assert certified.code == 0, certified.err
    assert "[/x]" in certified.out
    assert ":cat:" in certified.out
    assert read_preprocessing("[i]:dog:").target.classes == ("no", "yes")


def test_a_run_folder_whose_name_is_not_text(in_process, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = in_process("run", *QUICK, "--out", "\udcff\x1b", "--json")
    assert done.code == 0, done.err
    assert r"run folder: \udcff\x1b" in done.out
    assert json.loads(done.out.splitlines()[-1])["rounds"] == 1
    assert (tmp_path / "\udcff\x1b" / runs.REPORT).read_text(encoding="utf-8").lower().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("redirect", "code", "words"),
    [("| head -1", 0, ""), (">&-", 0, ""), (">/dev/full", 2, "No space left"), ("2>&-", 0, "")],
)
def test_an_output_that_is_closed_or_full(tmp_path, redirect, code, words):
    line = f"set -o pipefail; {sys.executable} -m pfedbayes methods {redirect}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode in ((0, 1) if "head" in redirect else (code,)), done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert words in done.stderr


def test_a_folder_that_was_deleted(tmp_path):
    (tmp_path / "gone").mkdir()
    line = f"cd gone; rmdir ../gone; {sys.executable} -m pfedbayes data"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("pfedbayes: the current folder does not exist any more")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("value", [LONG, "/dev/null", "\udcff", ":", "~nobody-at-all"], ids=range(5))
def test_nonsense_in_the_environment(in_process, monkeypatch, value):
    for name in ("PFEDBAYES_DATA", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, value)
        done = in_process("data")
        assert done.code in (0, 2), done.err
        assert len(done.err.splitlines()) <= 1


def test_more_threads_than_a_plan_allows_in_the_environment(in_process, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5000)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    assert in_process("run", *QUICK, "--out", "run").code == 0
    assert runs.read_info(tmp_path / "run").plan.threads == 1024
