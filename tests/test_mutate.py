"""The script that mutates the source finds its places, leaves the tree alone, and the tests catch what it does."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "mutate.py"
sys.path.insert(0, str(SCRIPT.parent))
import mutate  # noqa: E402
from mutations import mutations  # noqa: E402

TABLE = mutate.read_table()


def run_script(*arguments):
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def changes(text):
    return [each.change for each in mutations("a.py", text.encode())]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a < b", ["< -> <=", "< -> >="]),
        ("a <= b != c", ["<= -> <", "<= -> >", "!= -> =="]),
        ("(a\n + # not this +\n (b)) * c", ["+ -> -", "* -> /"]),
        ("a and not b", ["and -> or", "not b -> (b)"]),
        ("x = 3, 0.5", ["3 -> 2", "3 -> 4", "3, 0.5 -> 0.5, 3", "0.5 -> 1.0"]),
        ("x in (1, y)", ["1 -> 0", "1 -> 2", "in -> not in"]),
        ("x = True", ["True -> False"]),
        ("math.ceil(x)", ["ceil -> floor", "math.ceil(x) -> pass"]),
        ("y = (a + b).abs()", ["+ -> -", ".abs() ->"]),
        ("y = sorted(a)", ["(a) -> (a, reverse=True)"]),
        ("y = [*a, *b]", ["*a, ->", ", *b ->"]),
        ("y = x[:n]", ["n ->"]),
        ("é = 'é' if a else b", ["a -> (not (a))"]),
        ("def f(a: int = 1) -> 'x | y':\n    '''1'''\n    raise E(f'{a + 1}')", ["1 -> 0", "1 -> 2"]),
    ],
)
def test_places_are_found(text, expected):
    assert sorted(changes(text)) == sorted(expected)


def test_every_mutation_replaces_its_piece_alone_and_can_be_compiled():
    found = mutate.all_mutations(TABLE)
    assert len(found) > 3000
    for each in found[::50]:
        content = (mutate.SOURCE / each.file).read_bytes()
        old, line = content[each.start : each.end].decode(), content.splitlines()[each.line - 1]
        assert each.change.split() == [*old.split(), "->", *each.new.split()]
        assert line[each.column - 1 :].startswith(content[each.start : each.end].splitlines()[0])
        changed = each.apply(content)
        end = each.start + len(each.new.encode())
        assert changed[: each.start] + content[each.start : each.end] + changed[end:] == content
        compile(changed, each.file, "exec")


def test_every_file_has_tests_and_every_entry_of_the_table_is_used():
    found = mutate.all_mutations(TABLE)
    assert [file for file in {each.file for each in found} if not mutate.tests_of(TABLE, file)] == []
    assert all(any((ROOT / "tests").glob(name)) for names in TABLE.tests.values() for name in names)
    unused = [entry for entry in TABLE.equivalent if not any(mutate.explains(entry, each) for each in found)]
    assert unused == []
    assert all(entry["reason"] for entry in TABLE.equivalent)


@pytest.mark.parametrize(
    ("entry", "explained"),
    [({"line": "a = 1"}, [True, False]), ({"line": "1"}, [True, True]), ({"line": "b"}, [False, False]),
     ({"change": "1 -> 2"}, [True, True]), ({"change": "1 -> 0", "line": "1"}, [False, False]),
     ({"function": "f"}, [False, False]), ({"file": "b.py"}, [False, False]), ({}, [True, True])],
)  # fmt: skip
def test_an_entry_explains_only_what_lies_in_its_part_of_the_line(entry, explained):
    text = "if b:\n  a = 1 + len('é') + 1"
    found = [each for each in mutations("a.py", text.encode()) if each.change == "1 -> 2"]
    assert [mutate.explains({"file": "a.py"} | entry, each) for each in found] == explained


def test_a_process_that_waits_for_a_core_is_not_late(monkeypatch):
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as sleeper:
        child = object.__new__(mutate.Child)
        child.pid, child._until = sleeper.pid, time.monotonic() - 5
        for seconds, late in ((1000.0, False), (0.0, True)):
            monkeypatch.setattr(mutate, "waited", lambda pid, seconds=seconds: seconds)
            assert child.ended() == child.late == late
        assert child.code == 1


def test_mutations_are_caught_and_the_tree_stays_as_it_is(tmp_path):
    before = subprocess.run(["git", "status", "--short"], capture_output=True, cwd=ROOT, check=False).stdout
    kept = tmp_path / "results.json"
    done = run_script("--only", "maths/stacked.py", "--sample", 3, "--processes", 1, "--results", kept)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\ncaught ") == 3
    assert "100.0 %: 3 of 3 mutations caught, 0 survived" in done.stdout
    assert len(json.loads(kept.read_text())["caught"]) == 3
    assert subprocess.run(["git", "status", "--short"], capture_output=True, cwd=ROOT, check=False).stdout == before


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_at_least_95_per_cent_of_a_sample_are_caught():
    done = run_script("--sample", 200, "--seed", 1)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
