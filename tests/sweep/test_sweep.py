import dataclasses
import json
import subprocess
import sys

import pytest

from pfedbayes import runs
from pfedbayes.errors import UserError
from pfedbayes.runs.execute import Progress
from pfedbayes.sweep import running
from pfedbayes.sweep.cells import parse_part, read_cells, select
from pfedbayes.sweep.results import claim

NAMES = [
    "paper_blobs_small_two-block_pfedbayes",
    "paper_blobs_small_two-block_fedavg",
    "paper_blobs_small_sliding_pfedbayes",
    "paper_blobs_small_sliding_fedavg",
    "paper_blobs_small_two-block_fedavg_method.eta=0.1",
    "paper_blobs_small_two-block_fedavg_method.eta=0.2",
]


def results(path):
    """Records without what differs from run to run."""
    return [{k: v for k, v in record.items() if k != "seconds"} for record in json.loads(path.read_text())["records"]]


def after(rounds):
    """Asks for a stop after so many questions, two of which are asked for the first round of a cell."""
    left = iter(range(rounds))
    return lambda: next(left, None) is None


class TestCells:
    def test_rows_multiply_out_in_order(self, sweep):
        cells = read_cells(sweep.file)
        assert [cell.name for cell in cells] == NAMES
        assert cells[3].experiment.data.labels == "sliding"
        assert cells[5].varied == {"method.eta": 0.2}
        assert cells[5].experiment.method.eta == 0.2
        assert cells[0].seeds == (1, 2)

    def test_the_window_is_the_last_eighth(self, sweep):
        for rounds, window in ((800, (700, 800)), (3, (3, 3)), (1, (1, 1)), (200, (175, 200))):
            sweep.write(f'set.training.rounds = {rounds}\n[[rows]]\nmethod = "fedavg"\n')
            assert read_cells(sweep.file)[0].experiment.training.evaluate_window == window
        sweep.write('set.training.evaluate_window = [2, 3]\n[[rows]]\nmethod = "fedavg"\n')
        assert read_cells(sweep.file)[0].experiment.training.evaluate_window == (2, 3)

    def test_words_choose_whole_parts_first_and_pieces_else(self, sweep):
        cells = read_cells(sweep.file)
        assert [c.name for c in select(cells, ["fedavg sliding"])] == [NAMES[3]]
        assert [c.name for c in select(cells, ["eta=0.1", "pfedbayes two-block"])] == [NAMES[0], NAMES[4]]
        assert NAMES[0] not in [c.name for c in select(cells, ["fedavg"])]

    def test_parts_deal_out_all_cells(self, sweep):
        cells = read_cells(sweep.file)
        parts = [select(cells, (), parse_part(text)) for text in ("1/4", "2/4", "3/4", "4/4")]
        assert sorted(cell.name for part in parts for cell in part) == sorted(NAMES)

    def test_a_preset_brings_the_settings_of_a_method_on_a_data_set(self, sweep):
        (sweep.folder / "tuned.toml").write_text("[blobs.fedavg.method]\neta = 0.3\n[blobs.fedavg.net]\nhidden = [5]\n")
        top = 'base = "tiny.toml"\npreset = "tuned"\npreset_file = "tuned.toml"\n'
        sweep.write(top + '[[rows]]\ndataset = "blobs"\nmethod = "fedavg"\n')
        (cell,) = read_cells(sweep.file)
        assert (cell.experiment.method.eta, cell.experiment.net.hidden) == (0.3, (5,))
        assert cell.name.startswith("tuned_")

    def test_a_cell_without_settings_in_the_preset_fails_alone(self, sweep):
        (sweep.folder / "tuned.toml").write_text("[blobs.fedavg.method]\neta = 0.3\n")
        top = 'base = "tiny.toml"\npreset = "tuned"\npreset_file = "tuned.toml"\n'
        sweep.write(top + '[[rows]]\ndataset = "blobs"\nmethod = ["fedprox", "fedavg"]\n')
        found = sweep()
        ((_, reason),) = found["failed"].items()
        assert "no settings for fedprox on blobs" in reason
        assert len(found["done"]) == 1

    def test_settings_are_what_differs_from_the_defaults(self, sweep):
        settings = read_cells(sweep.file)[4].settings
        assert (settings["method.name"], settings["method.eta"], settings["seeds"]) == ("fedavg", 0.1, [1, 2])
        assert "training.seed" not in settings
        cell = read_cells(sweep.file)[0]
        slower = dataclasses.replace(cell.experiment.execution, over="loop")
        assert dataclasses.replace(cell, experiment=dataclasses.replace(cell.experiment, execution=slower)) != cell
        assert cell.settings == json.loads(json.dumps(cell.settings))

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "describes no cells"),
            ("rows = [1]", "describes no cells"),
            ("[[rows]]\nmethod = []", "a list in its .* is empty"),
            ('[[rows]]\nmethod = "fedavg"\nvary = { method.eta = 1.0 }', "vary is {'method'"),
            ('[[row]]\nmethod = "fedavg"', "did you mean 'rows'"),
            ('[[rows]]\nmethods = "fedavg"', "did you mean 'method'"),
            ('[[rows]]\nmethod = "fedavgg"', "did you mean 'fedavg'"),
            ('[[rows]]\nmethod = "fedavg"\nset.method.etta = 1', "method.etta"),
            ('[[rows]]\nmethod = "fedavg"\nset.methods.eta = 1', "did you mean 'method'"),
            ('[[rows]]\nmethod = "fedavg"\nset.eta = 1', "section.key = value"),
            ('seeds = 0\n[[rows]]\nmethod = "fedavg"', "seeds is 0"),
            ('base = "{dataset}.toml"\n[[rows]]\nmethod = "fedavg"', "cannot be filled in"),
            ('base = "none.toml"\n[[rows]]\nmethod = "fedavg"', "cannot read"),
            ('preset_file = "none.toml"\n[[rows]]\nmethod = "fedavg"', "--choose"),
            ('[[rows]]\nmethod = ["fedavg", "fedavg"]', "twice"),
            ('[[rows]]\ndataset = "regression"\nmethod = "fedavg"', "regression"),
            ('preset_file = 0\n[[rows]]\nmethod = "fedavg"', "preset_file is 0"),
            ('base = 0\n[[rows]]\nmethod = "fedavg"', "base is 0"),
            ('base = "{method:>999999999}"\n[[rows]]\nmethod = "fedavg"', "cannot be filled in"),
            ('base = "{method.__class__}"\n[[rows]]\nmethod = "fedavg"', "cannot be filled in"),
            ('base = "{method!r}"\n[[rows]]\nmethod = "fedavg"', "cannot be filled in"),
            ('[[rows]]\nmethod = "fedavg"\nvary = 0', "vary is 0"),
            ('[[rows]]\nmethod = "fedavg"\nvary = [0]', "section.key = value"),
            ("[[rows]]\nmethod = {}", "method is {}"),
            ("[[rows]]\nmethod = [[1]]", r"method is \[1\]"),
            ('[[rows]]\nmethod = "fedavg"\nvariant = 1', "variant is 1"),
            ('[[rows]]\nmethod = "fedavg"\nvariant = "a\\u0000b"', "variant is"),
            ('seeds = 1000000000\n[[rows]]\nmethod = "fedavg"', "give 1 to 1000 seeds"),
            ('seeds = "x"\n[[rows]]\nmethod = "fedavg"', "seeds is 'x'"),
            ('set = 1\n[[rows]]\nmethod = "fedavg"', "section.key = value"),
            ("rows = " + "[" * 100_000, "is not valid TOML"),
        ],
        ids=lambda value: value[-40:],
    )
    def test_what_is_wrong_in_the_file_is_named(self, sweep, text, words):
        sweep.write(text)
        with pytest.raises(UserError, match="(?s)" + words.replace("(", r"\(")) as caught:
            read_cells(sweep.file)
        assert len(str(caught.value)) < 1000


class TestRunning:
    def test_names_longer_than_a_file_system_allows(self, sweep):
        same = (
            "method.eta_personal = 0.0005, method.eta_global = 0.0005, method.beta = 0.5, method.personal_steps = 2, "
            'method.server = "barycentre", method.prior = "fixed", method.noise_std = 0.5, method.rho0 = -3.0, '
            'method.samples = 2, training.server_optimizer = "momentum", '
        )
        vary = f"[{{ {same}method.zeta = 0.1 }}, {{ {same}method.zeta = 0.2 }}]"
        sweep.write(f'base = "tiny.toml"\n[[rows]]\nmethod = "pfedbayes"\nvary = {vary}\n')
        assert min(len(cell.name) for cell in read_cells(sweep.file)) > 255
        assert not sweep(stopped=after(3))["done"]
        (begun,) = (sweep.out / "runs").iterdir()
        assert runs.read_checkpoint(begun).round > 0
        assert len(sweep()["done"]) == 2
        assert list((sweep.out / "runs").iterdir()) == []
        before = sorted((sweep.out / "cells").iterdir())
        assert len(before) == 2
        (sweep.folder / "tiny.toml").write_text(
            (sweep.folder / "tiny.toml").read_text().replace("rounds = 4", "rounds = 3")
        )
        with pytest.raises(UserError, match="--redo"):
            sweep()
        assert len(sweep(redo=True)["done"]) == 2
        assert sorted((sweep.out / "cells").iterdir()) == before

    def test_cells_leave_their_scores_and_nothing_else_and_are_done_once(self, sweep, monkeypatch):
        found = sweep(results=sweep.folder / "all.json")
        assert (found["done"], found["missing"], found["failed"]) == (NAMES, [], {})
        assert sorted(path.stem for path in (sweep.out / "cells").iterdir()) == sorted(NAMES)
        assert list((sweep.out / "runs").iterdir()) == []
        assert "cell 6 of 6" in sweep.said
        records = results(sweep.folder / "all.json")
        assert {(r["cell"], r["seed"]) for r in records} == {(name, seed) for name in NAMES for seed in (1, 2)}
        monkeypatch.setattr(running, "execute", None)
        assert sweep(results=sweep.folder / "all.json")["done"] == NAMES
        assert results(sweep.folder / "all.json") == records

    def test_interrupted_anywhere_it_gives_the_same_results(self, sweep):
        whole, pieces = sweep.folder / "whole.json", sweep.folder / "pieces.json"
        sweep(results=whole)
        sweep.out = sweep.folder / "again"
        calls = 0
        while sweep(results=pieces, stopped=after(3))["missing"]:
            calls += 1
            assert calls < 50
        assert calls > len(NAMES)  # some were stopped in the middle of a cell
        assert results(pieces) == results(whole)

    def test_time_that_is_up_leaves_a_checkpoint(self, sweep, monkeypatch):
        clock = iter(range(10**6))
        monkeypatch.setattr(running.time, "monotonic", lambda: next(clock))
        sweep.write(sweep.text.replace("seeds = 2", "set.training.rounds = 400"))
        found = sweep(minutes=1)  # a second passes whenever somebody looks at the clock
        assert found["missing"] == NAMES
        assert 0 < runs.read_checkpoint(sweep.out / "runs" / NAMES[0]).round < 400
        assert not any((sweep.out / "runs" / name).exists() for name in NAMES[1:])

    def test_parts_of_several_machines_merge_to_the_whole(self, sweep):
        whole, merged = sweep.folder / "whole.json", sweep.folder / "merged.json"
        sweep(results=whole)
        files = []
        for number in (1, 2, 3):
            files.append(sweep.folder / f"part{number}.json")
            sweep(part=f"{number}/3", out=sweep.folder / f"part{number}", results=files[-1])
        empty = sweep.folder / "empty"
        found = sweep(out=empty, collect=True, imports=tuple(files[:2]), results=merged)
        assert set(found["missing"]) == set(NAMES[2::3])
        assert all(f"missing: {name}" in sweep.said for name in NAMES[2::3])
        assert sweep(out=empty, collect=True, imports=(files[2],), results=merged)["missing"] == []
        assert merged.read_text().splitlines()[1].startswith('{"preset": "paper"')
        assert results(merged) == results(whole)

    def test_cells_known_from_a_file_are_not_run(self, sweep, monkeypatch):
        known = sweep.folder / "known.json"
        sweep(results=known)
        monkeypatch.setattr(running, "execute", None)
        assert sweep(out=sweep.folder / "new", imports=(known,))["done"] == NAMES

    def test_results_of_other_settings_are_refused_by_name_and_redone_on_demand(self, sweep):
        sweep(["fedavg sliding"])
        before = results(sweep.out / "cells" / f"{NAMES[3]}.json")
        sweep.write(sweep.text.replace("seeds = 2", "seeds = 2\nset.training.local_steps = 3"))
        with pytest.raises(UserError, match=rf"{NAMES[3]} .*training.local_steps was 2 and is 3.*--redo"):
            sweep(["fedavg"])
        sweep(["fedavg sliding"], redo=True)
        assert results(sweep.out / "cells" / f"{NAMES[3]}.json") != before

    def test_seeds_that_a_cell_is_given_later_are_run_alone(self, sweep, monkeypatch):
        whole, grown, begun = sweep.folder / "whole.json", sweep.folder / "grown.json", []
        real = running.execute

        def watched(experiment, folder, seeds, *others):
            begun.append(seeds)
            return real(experiment, folder, seeds, *others)

        monkeypatch.setattr(running, "execute", watched)
        sweep(["fedavg"], results=grown)
        sweep.write(sweep.text.replace("seeds = 2", "seeds = 4"))
        names = sweep(["fedavg"], results=grown, stopped=after(3))["missing"]
        assert len(names) == 4
        sweep(["fedavg"], results=grown)
        assert set(begun[4:]) == {(3, 4)}
        sweep(["fedavg"], results=whole, out=sweep.folder / "at once")
        assert [(r["cell"], r["seed"], r["variant"]) for r in results(grown)] == [
            (r["cell"], r["seed"], r["variant"]) for r in results(whole)
        ]
        for one, other in zip(results(grown), results(whole), strict=True):
            assert one["shared"]["mean"] == pytest.approx(other["shared"]["mean"], abs=0.01)
        # A file of the new seeds alone, from another machine, takes nothing away.
        fresh = [r for r in json.loads(grown.read_text())["records"] if r["seed"] > 2]
        (sweep.folder / "fresh.json").write_text(json.dumps(fresh))
        sweep(["fedavg"], out=sweep.folder / "new", collect=True, imports=(sweep.folder / "fresh.json",), results=grown)
        assert len(results(grown)) == len(results(whole))
        sweep.write(sweep.text.replace("seeds = 2", "seeds = 3"))
        with pytest.raises(UserError, match=r"seeds was \[1, 2, 3, 4\] and is \[1, 2, 3\].*--redo"):
            sweep(["fedavg"])

    def test_new_seeds_of_other_settings_are_not_mixed_with_the_old(self, sweep):
        sweep(["fedavg sliding"])
        sweep.write(sweep.text.replace("seeds = 2", "seeds = 3\nset.training.local_steps = 3"))
        with pytest.raises(UserError, match=r"training.local_steps was 2 and is 3.*--redo"):
            sweep(["fedavg sliding"])

    def test_a_cell_that_was_made_again_elsewhere_takes_the_place_of_the_old_one(self, sweep):
        known, again = sweep.folder / "known.json", sweep.folder / "again.json"
        sweep(["fedavg sliding"], results=known)
        sweep.write(sweep.text.replace("seeds = 2", "seeds = 1\nset.training.local_steps = 3"))
        sweep(["fedavg sliding"], results=again, out=sweep.folder / "elsewhere")
        sweep(["fedavg sliding"], results=known, out=sweep.folder / "new", imports=(again,), collect=True)
        assert results(known) == results(again)

    def test_a_changed_cell_under_way_is_not_mixed_either(self, sweep):
        sweep(["fedavg sliding"], stopped=after(3))
        sweep.write(sweep.text.replace("seeds = 2", "seeds = 2\nset.training.local_steps = 3"))
        found = sweep(["fedavg sliding"])
        assert "another config (training.local_steps was 2 and is 3)" in found["failed"][NAMES[3]]
        assert sweep.said.count(f"failed:  {NAMES[3]}") == 2  # at once, and in the end
        assert sweep(["fedavg sliding"], redo=True)["failed"] == {}

    def test_one_that_fails_does_not_stop_the_others(self, sweep):
        sweep.write(sweep.text + '[[rows]]\nmethod = "fedavg"\nvary = [{ method.eta = 1e30 }]\n')
        for _ in range(2):  # a divergence is a result, and is told again
            found = sweep(["fedavg"], results=sweep.folder / "all.json")
            ((name, reason),) = found["failed"].items()
            assert name.endswith("1e+30")
            assert "non-finite" in reason
            assert f"failed:  {name}: {reason}" in sweep.said
            assert len(found["done"]) == 5
        (one, other) = (r for r in results(sweep.folder / "all.json") if "diverged" in r)
        assert (one["personal"], one["shared"], one["seed"], other["seed"]) == (None, None, 1, 2)

    def test_a_bug_or_a_lack_of_memory_in_one_cell_is_one_line(self, sweep, monkeypatch, capsys):
        real = running.execute

        def broken(experiment, folder, *others):
            if folder.name == NAMES[0]:
                raise MemoryError("no room\nsecond line")
            return real(experiment, folder, *others)

        monkeypatch.setattr(running, "execute", broken)
        found = sweep()
        assert found["failed"] == {NAMES[0]: "MemoryError: no room"}
        assert (found["done"], found["missing"]) == (NAMES[1:], NAMES[:1])
        assert "Traceback" in capsys.readouterr().err

    def test_a_dry_run_lists_the_cells_and_writes_nothing(self, sweep, capsys):
        sweep(["fedavg sliding"])
        sweep(["pfedbayes sliding"], stopped=after(3))
        before = sorted(sweep.out.rglob("*"))
        sweep(dry_run=True)
        listed = capsys.readouterr().out.splitlines()
        assert [line.rpartition(": ")[2].split()[0] for line in listed] == ["to", "to", "started", "done", "to", "to"]
        assert sorted(sweep.out.rglob("*")) == before

    def test_a_part_without_cells_says_so(self, sweep):
        for options in ({}, {"dry_run": True}):
            found = sweep(part="7/8", **options)
            assert (found["done"], found["missing"], found["failed"]) == ([], [], {})
            assert sweep.said.startswith("part 7/8 is empty: there are more parts than cells\n")
        assert sweep(part="6/8", dry_run=True)["missing"] == NAMES[5:]
        assert sweep.said == ""

    def test_time_left_is_that_of_cells_of_its_kind(self, sweep):
        cells = read_cells(sweep.file)
        known = {
            "x": [{"cell": "x", "seed": s, "seconds": 30.0, "method": "fedavg", "dataset": "blobs"} for s in (1, 2)]
        }
        left = running._TimeLeft(cells[0], 1, 3, [cells[1], cells[2]], known)
        left.after(Progress(1, 5, 1.0, None))
        status = left.after(Progress(2, 5, 10.0, None))
        assert status.cell_left < 1
        # One FedAvg as known, and one pFedBayes as the present one.
        assert status.sweep_left == pytest.approx(60 + 10, abs=2)


class TestWorkers:
    """Several workers that share a folder."""

    def test_each_cell_is_run_once_and_none_is_called_failed(self, sweep, monkeypatch):
        begun, inner = [], {}
        real = running.execute

        def watched(experiment, folder, *others):
            begun.append(folder.name)
            return real(experiment, folder, *others)

        def other_worker_meanwhile():
            if len(begun) == 1 and not inner:  # this worker is in the middle of its first cell
                inner["found"] = None
                inner["found"] = sweep(results=sweep.folder / "all.json")
                inner["said"] = sweep.said
            return False

        monkeypatch.setattr(running, "execute", watched)
        found = sweep(results=sweep.folder / "all.json", stopped=other_worker_meanwhile)
        assert begun == NAMES
        assert inner["found"]["held"] == inner["found"]["missing"] == NAMES[:1]
        assert (inner["found"]["failed"], inner["found"]["done"]) == ({}, NAMES[1:])
        assert "5 of 6 cells done, 1 held" in inner["said"]
        assert f"held:    {NAMES[0]}: another worker is running it" in inner["said"]
        assert (found["done"], found["held"], found["failed"]) == (NAMES, [], {})
        assert {record["cell"] for record in results(sweep.folder / "all.json")} == set(NAMES)
        assert list((sweep.out / "runs").iterdir()) == []

    def test_a_cell_that_another_worker_has_finished_is_taken_from_it(self, sweep, monkeypatch):
        with claim(sweep.out, NAMES[0]):
            found = sweep()
        assert (found["missing"], found["held"]) == (NAMES[:1], NAMES[:1])
        known = sweep()  # free again
        assert (known["done"], known["held"]) == (NAMES, [])
        monkeypatch.setattr(running, "execute", None)
        outcome = running.run(read_cells(sweep.file), sweep.out, {}, "cpu")  # starts without knowing any result
        assert (outcome.failed, sorted(outcome.results)) == ({}, sorted(NAMES))

    def test_what_another_worker_holds_is_not_deleted_to_do_it_again(self, sweep):
        sweep(["fedavg sliding"], stopped=after(3))
        folder = sweep.out / "runs" / NAMES[3]
        sweep.write(sweep.text.replace("seeds = 2", "seeds = 2\nset.training.local_steps = 3"))
        with claim(sweep.out, NAMES[3]):
            found = sweep(["fedavg sliding"], redo=True)
        assert found["held"] == [NAMES[3]]
        assert folder.exists()
        assert sweep(["fedavg sliding"], redo=True)["done"] == [NAMES[3]]


def test_the_command_line_speaks_json_and_in_exit_codes(sweep):
    def pfedbayes(*arguments):
        command = [sys.executable, "-m", "pfedbayes", "sweep", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=sweep.folder)

    done = pfedbayes("sweep.toml", "--out", "out", "--collect")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "--results FILE" in done.stderr
    sweep.write('base = "tiny.toml"\n[[rows]]\nmethod = ["fedavg", "fedprox"]\nset.method.eta = 1e30\n')
    done = pfedbayes("sweep.toml", "--out", "out", "--only", "fedavg", "--json")
    assert done.returncode == 1, done.stderr
    (name,) = json.loads(done.stdout.splitlines()[-1])["failed"]
    assert name == NAMES[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"part": "0/2"}, "--part"),
        ({"part": f"1/{'9' * 5000}"}, "--part"),
        ({"part": "²/3"}, "--part"),
        ({"only": ["nothing"]}, "no cell matches nothing"),
        ({"only": [""]}, "--only is empty"),
        ({"only": ["fedavg", " "]}, "--only is empty"),
        ({"imports": ["missing.json"]}, "cannot read"),
        ({"imports": ["tiny.toml"]}, "does not hold the results"),
        ({"device": "tpu"}, "no device"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_options_are_named(sweep, arguments, words):
    if "imports" in arguments:
        arguments = {"imports": tuple(sweep.folder / name for name in arguments["imports"])}
    with pytest.raises(UserError, match=words):
        sweep(**arguments)


@pytest.mark.parametrize("content", ["{}", "[1]", '[{"cell": "x", "seed": 1}]'])
def test_a_file_that_holds_no_results_is_neither_taken_in_nor_written_over(sweep, content):
    wrong, kept = sweep.folder / "wrong.json", sweep.folder / "kept.json"
    wrong.write_text(content)
    for options in ({"results": wrong}, {"results": kept, "imports": (wrong,)}):
        with pytest.raises(UserError, match=r"wrong.json does not hold the results of a sweep \("):
            sweep(collect=True, **options)
    assert wrong.read_text() == content
    assert not kept.exists()
