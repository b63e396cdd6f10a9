"""The benchmark measures, refuses to time what does not compute the same, and makes its page from the raw results."""

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import __main__ as bench
from benchmarks import limits, sections
from benchmarks.ours import EAGER
from benchmarks.page import render, rows
from benchmarks.products import Products
from benchmarks.race import Contender, Disagreement, Failed, Section, Turns, Worker, gap, race, require_same
from benchmarks.work import Examples, Work
from pfedbayes.engine.federation import Federation
from pfedbayes.errors import UserError
from pfedbayes.nets import mlp

ONCE = Turns(repeats=2, warm_up=1, rounds=1)
TINY = sections.Amount(ONCE, local_steps=1, clients=(2,))
SMALL = Work("fedavg", "cpu", local_steps=2, batch_size=5)


def quiet(text):
    pass


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(bench, "QUICK", TINY)
    monkeypatch.setattr(limits, "measure", lambda device: limits.Limits(1e11, 1e11, 1e10))


def test_a_section_is_measured_and_written_and_leaves_the_others_alone(tiny, tmp_path, capsys):
    page = tmp_path / "speed.md"
    kept = {"title": "Kept", "note": "From before.", "rows": [row("old", [1.0])]} | stamp()
    before = {"pfedbayes": kept, "seeds": kept}
    (tmp_path / "speed_cpu.json").write_text(json.dumps(before))
    bench.main(["--device", "cpu", "--quick", "--only", "scale", "--out", str(page)])

    raw = json.loads((tmp_path / "speed_cpu.json").read_text())
    assert list(raw) == ["pfedbayes", "seeds", "scale"]
    assert raw["pfedbayes"] == before["pfedbayes"]
    (measured,) = raw["scale"]["rows"]
    assert measured["client_steps"] == 2 * TINY.local_steps
    assert len(measured["seconds"]) == 2
    assert min(measured["seconds"]) > 0
    assert measured["memory_mb"] > 10
    printed = capsys.readouterr().out
    assert "2 clients, 2 a round" in printed
    text = page.read_text()
    assert printed.strip() in text
    assert "| old: 3 rounds in 3.0 s | 1 |" in text

    raw["scale"]["title"] = "Another title"
    (tmp_path / "speed_cpu.json").write_text(json.dumps(raw))
    bench.main(["--render", "--out", str(page)])
    assert page.read_text() == text.replace("### Number of clients", "### Another title")


def stamp():
    machine = {"cpu": "a CPU", "cores": 2, "memory_gb": 4, "gpu": None, "torch": "2.13", "python": "3.11"}
    rates = {"flops": 1e9, "flops_tf32": 1e9, "bytes": 1e9}
    return {"machine": machine, "limits": rates, "date": "today", "commit": None, "quick": False, "load": 0.0}


def row(name, seconds, **others):
    blank = {"client_steps": 10, "floor": 0.5, "gap": None, "memory_mb": 100.0, "rounds_per_turn": 3}
    return {"name": name, "seconds": seconds} | blank | others


def test_the_page_keeps_the_devices_apart(tmp_path):
    for device in ("cpu", "cuda"):
        section = {"title": f"Speed of {device}", "note": "n", "rows": [row("x", [1.0])]} | stamp()
        (tmp_path / f"speed_{device}.json").write_text(json.dumps({"seeds": section}))
    both = render(tmp_path, "speed")
    assert both.index("## On the CPU") < both.index("Speed of cpu") < both.index("## On the GPU")
    (tmp_path / "speed_cuda.json").unlink()
    assert both.startswith(render(tmp_path, "speed"))


def test_the_page_opens_with_the_fastest_other_implementation(tmp_path):
    rows_of_section = [
        row("ours, default plan", [1.0]), row("slow", [5.0]), row("fast", [3.0]), row("matrix products alone", [0.5])
    ]  # fmt: skip
    section = {"title": "FedAvg", "note": "n", "rows": rows_of_section} | stamp()
    (tmp_path / "speed_cpu.json").write_text(json.dumps({"fedavg": section}))
    page = render(tmp_path, "speed")
    assert page.index("| CPU | FedAvg | 1 | fast | 3.00 |") < page.index("## On the CPU")


def test_the_page_of_the_repository_is_made_from_its_raw_results():
    assert bench.PAGE.read_text() == render(bench.PAGE.parent, "speed")


def test_ratios_are_turn_by_turn_and_per_client_step():
    # The machine is slow in the second and third turn; a is always twice as slow as the first.
    first = row("first", [1.0, 10.0, 10.0])
    a = row("a", [2.0, 20.0, 20.0])
    b = row("b", [2.0, 20.0, 25.0], client_steps=20, gap=2e-6)
    lines = rows([first, a, b, {"name": "c", "absent": "not installed"}])
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["first", "10", "1", "1.00", "", "100", "5%"]
    assert cells[1][3] == "2.00 (2.00–2.00)"
    assert cells[2][2:5] == ["1", "1.00 (1.00–1.25)", "2e-06"]
    assert cells[3] == ["c", "not installed", "", "", "", "", ""]


def test_a_ratio_can_be_to_another_row_than_the_first():
    small = [row("small", [1.0]), row("small, wide", [2.0], client_steps=50)]
    large = [row("large", [10.0]), row("large, wide", [25.0], client_steps=50, beside="large")]
    absent = [{"name": "nobody", "absent": "not installed"}, row("x", [1.0], beside="nobody")]
    ratios = [line.split("|")[4].strip() for line in rows([*small, *large, *absent])]
    assert ratios == ["1.00", "0.40", "10.00", "0.50", "", ""]
    with pytest.raises(ValueError, match="not in the table"):
        Section("", "", [Contender("x", "ours", SMALL, beside="nobody")], ONCE)


def test_a_loader_gives_the_same_batches():
    examples = Examples(SMALL, SMALL.shards(), 1)
    cut, loaded = (list(examples.batches(2, loader)) for loader in (False, True))
    assert len(cut) == len(loaded) == SMALL.local_steps
    for one, other in zip(cut, loaded, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_contenders_that_compute_the_same_come_to_the_same_models():
    contenders = [
        Contender("ours", "ours", SMALL, {"plan": {}}),
        Contender("plain", "plain", SMALL, same=True),
        Contender("loader", "plain", SMALL, {"loader": True}, same=True),
        Contender("nobody", "plain", SMALL, needs="no_such_package"),
    ]
    ours, plain, loader, nobody = race(Section("", "", contenders, ONCE), quiet)
    assert 0 < plain["gap"] < 1e-4
    assert loader["gap"] == plain["gap"]
    assert ours["gap"] is None
    assert nobody == {"name": "nobody", "absent": "not installed"}


def test_naive_loops_come_to_the_same_models():
    work = dataclasses.replace(SMALL, method="pfedbayes")
    contenders = [Contender("ours", "ours", work, {"plan": {}}), Contender("naive", "naive", work, same=True)]
    assert 0 < race(Section("", "", contenders, ONCE), quiet)[1]["gap"] < 1e-2


def test_another_algorithm_is_not_timed_as_the_same():
    other = dataclasses.replace(SMALL, local_steps=3)
    contenders = [Contender("ours", "ours", SMALL, {"plan": {}}), Contender("other", "plain", other, same=True)]
    with pytest.raises(Disagreement, match="other differs by"):
        race(Section("", "", contenders, ONCE), quiet)


def test_a_contender_that_breaks_says_why():
    broken = Contender("broken", "ours", SMALL, {"plan": {"over": "neither"}, "nonsense": 1})
    with pytest.raises(Failed, match=r"broken: TypeError.*nonsense"):
        race(Section("", "", [broken], ONCE), quiet)
    peer = dataclasses.replace(broken, needs="torch")
    good = Contender("ours", "ours", SMALL, {"plan": {}})
    results = race(Section("", "", [good, peer], ONCE), quiet)
    assert results[1]["absent"].startswith("failed: broken: TypeError")


def test_who_is_not_on_turn_is_stopped(tmp_path):
    def state() -> str:
        time.sleep(0.1)
        return Path(f"/proc/{worker._process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    with Worker(Contender("plain", "plain", SMALL), tmp_path) as worker:
        worker.hear()
        worker.rest()
        assert state() == "T"
        with worker.on_turn():
            assert state() != "T"
            assert worker.train(1) > 0
        assert state() == "T"
    assert worker._process.returncode == 0


def test_a_nan_is_no_agreement():
    start, end = np.zeros(3), np.ones(3)
    assert gap(end * 1.1, end, start) == pytest.approx(0.1)
    with pytest.raises(Disagreement):
        require_same(Contender("nan", "plain", SMALL), gap(np.full(3, np.nan), end, start), tf32=True)


def test_the_floor_counts_products_and_state():
    work = Work("pfedbayes", "cpu")
    weights, params = 784 * 100 + 100 * 10, sum(weight.numel() for weight in mlp([784, 100, 10]).parameters())
    forward, gradient, inputs = 2 * 100 * weights, 2 * 100 * weights, 2 * 100 * 100 * 10
    assert limits.step_flops(work) == forward + gradient + inputs
    assert limits.step_bytes(work) == 4 * params * 28
    assert limits.step_bytes(dataclasses.replace(work, method="fedavg")) == 4 * params * 4
    rates = limits.Limits(1e9, 2e9, 1e9)
    products, state = 200 * limits.step_flops(work) / 1e9, 200 * limits.step_bytes(work) / 1e9
    assert limits.floor(work, rates, tf32=False) == pytest.approx(products + state)
    assert limits.floor(work, rates, tf32=True) == pytest.approx(products / 2 + state)


def test_products_alone_are_those_of_a_round_and_of_an_evaluation():
    with FlopCounterMode(display=False) as counter:
        Products(SMALL).train(3)
    assert counter.get_total_flops() == 3 * SMALL.client_steps * limits.step_flops(SMALL)
    examples = sum(len(rows) for rows in SMALL.shards().test)
    with FlopCounterMode(display=False) as counter:
        Products(SMALL, "mean").train(1)
    assert counter.get_total_flops() == pytest.approx(2 * examples * 2 * (784 * 100 + 100 * 10), rel=0.02)


def test_the_limits_are_the_best_that_was_seen():
    measured = limits.measure("cpu")
    assert measured.flops == measured.flops_tf32 > 1e9
    assert measured.bytes > 1e8
    assert limits.best([limits.Limits(1, 5, 3), limits.Limits(2, 4, 3)]) == limits.Limits(2, 5, 3)


def test_every_section_has_work_that_can_be_built():
    for make in sections.SECTIONS.values():
        made = make("cpu", sections.FULL)
        names = [contender.name for contender in made.contenders]
        assert len(set(names)) == len(names) > 0


def test_long_runs_are_for_a_gpu():
    assert "long" not in sections.chosen("cpu", sections.FULL, only=[], full=False)
    assert "long" in sections.chosen("cuda", sections.FULL, only=[], full=True)
    with pytest.raises(UserError, match="need a GPU"):
        sections.chosen("cpu", sections.FULL, only=["long"], full=False)


def test_plans_that_come_to_the_same_are_raced_once(monkeypatch):
    work = Work("fedavg", "cpu")
    monkeypatch.setattr(
        sections, "PLANS", {"default plan": {}, "again": {"over": "vmap"}, "loop": {"over": "loop", **EAGER}}
    )
    names = [contender.name for contender in sections.by_plans(work, ["default plan", "again", "loop"])]
    assert names[1:] == ["ours, loop"]
    assert names[0].startswith("ours, default plan (vmap")


def test_many_clients_and_images_train():
    for work in (
        Work("pfedbayes", "cpu", data="many", clients=5, chosen=2, local_steps=1),
        Work("pfedbayes", "cpu", data="images", clients=2, local_steps=1, batch_size=3),
    ):
        federation = Federation(work.shards(), work.model(), work.rule(), work.training())
        federation.train_round()
        assert federation.round == 1
