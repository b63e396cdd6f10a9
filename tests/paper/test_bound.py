"""The command `pfedbayes paper bound`: the setting of an experiment or a run, its table and its sentences."""

import dataclasses
import json
import re
import sys
import warnings
from pathlib import Path

import pytest

from federations import make_shards
from pfedbayes.errors import UserError
from pfedbayes.methods import PFedBayes
from pfedbayes.paper import theory
from pfedbayes.paper.bound import _case, explain, read_case, terms
from pfedbayes.paper.theory import Constants, Setting

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def command(monkeypatch, capsys, *arguments):
    """Run the command line in this process; return its exit code, output and errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # typer's, of click
        from pfedbayes import cli
    monkeypatch.setattr(sys, "argv", ["pfedbayes", "paper", "bound", *map(str, arguments)])
    with pytest.raises(SystemExit) as done:
        cli.main()
    captured = capsys.readouterr()
    return done.value.code or 0, captured.out, captured.err


def experiment_file(tmp_path, text):
    path = tmp_path / "experiment.toml"
    path.write_text(text)
    return path


REGRESSION = """
[data]
name = "regression"
clients = 3
examples = 50
features = 2
[net]
hidden = [6, 6]
[method]
name = "pfedbayes"
zeta = 3.0
"""


class TestCase:
    def test_without_a_source_it_is_the_papers_medium_mnist_as_the_file_says_it(self):
        from_file = read_case(EXPERIMENTS / "mnist_medium.toml")
        assert read_case(None).setting == from_file.setting == Setting()
        assert any("regression" in note for note in from_file.notes)

    def test_an_experiment_gives_sizes_net_and_zeta(self, tmp_path):
        case = read_case(experiment_file(tmp_path, REGRESSION))
        assert case.setting == Setting(size=40, layers=2, width=6, inputs=2, outputs=1, zeta=3.0)
        assert case.notes == ()

    def test_a_run_folder_gives_the_same(self, tmp_path):
        from pfedbayes.runs.execute import execute
        from pfedbayes.runs.experiment import read_experiment

        path = experiment_file(tmp_path, REGRESSION + "[training]\nrounds = 1\nlocal_steps = 1\n")
        for _ in execute(read_experiment(path), tmp_path / "run", [1]):
            pass
        assert read_case(tmp_path / "run") == read_case(path)

    def test_a_federation_kept_from_python_does_not_know_its_data(self, tmp_path):
        from federations import trained
        from pfedbayes.methods import PFedBayes
        from pfedbayes.runs.saving import save

        save(trained(PFedBayes()), tmp_path / "kept")
        with pytest.raises(UserError, match="no data and no net"):
            read_case(tmp_path / "kept")

    def test_what_the_theorem_assumes_otherwise_is_said(self, tmp_path):
        text = """
            [data]
            name = "blobs"
            clients = 4
            examples = 60
            labels = "dirichlet"
            [net]
            hidden = [8, 5]
            [method]
            zeta = 0.5
        """
        case = read_case(experiment_file(tmp_path, text))
        assert (case.setting.width, case.setting.layers, case.setting.zeta) == (8, 2, 1.0)
        smallest = int(re.search(r"clients have (\d+) to", case.notes[0]).group(1))
        assert case.setting.size == smallest
        assert all(word in " ".join(case.notes) for word in ("widths [8, 5]", "regression", "instead of 0.5"))

    def test_two_sizes_and_two_widths_are_enough_for_a_note(self):
        shards = make_shards(sizes=(20, 30, 20), test_sizes=(5, 5, 5))
        assert _case(shards, (8, 8), PFedBayes()).notes[0].startswith("clients have 20 to 30 examples")
        case = _case(make_shards(sizes=(20, 20), test_sizes=(5, 5)), (8, 5), PFedBayes(zeta=1.0))
        assert case.setting == Setting(size=20, layers=2, width=8, inputs=3, outputs=3, zeta=1.0)
        assert [note.split(";")[0].split(" for ")[0] for note in case.notes] == [
            "the hidden layers have widths [8, 5]", "the theorem is about regression",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ('[method]\nname = "fedavg"', "trains fedavg"),
            ('[data]\nname = "cifar10"', "'vgg'"),
            ('[data]\nname = "blobs"\n[net]\nhidden = []', "hidden layers"),
        ],
    )
    def test_what_it_is_not_about_is_refused(self, tmp_path, text, words):
        with pytest.raises(UserError, match=words):
            read_case(experiment_file(tmp_path, text))


def test_the_table_holds_every_quantity_of_section_3_in_the_papers_order():
    s = Setting(5000, 2, 9, 3, 2, 1.5, 4.0, 2.0, 2.5, Constants(C=0.5, delta=2.0))
    table = terms(s)
    assert [(term.letter, term.equation) for term in table] == [
        ("T", ""), ("A", "(10)"), ("σ_n", "(9)"), ("r_n", "(11)"), ("ξ_n", "(21)"), ("ε_n²", "(13)"),
        ("Lemma 1", "(18)"), ("Lemma 2", "(19)"), ("Theorem 1", "(20)"), ("T", "Sec. 3"), ("", "(25)"), ("", "(22)"),
    ]  # fmt: skip
    assert {term.name: term.value for term in table} == {
        "num_params": s.num_params,
        "scale_a": theory.scale_a(s),
        "sigma_n": theory.sigma_n_squared(s) ** 0.5,
        "r_n": theory.r_n(s),
        "xi_n": theory.xi_n(s),
        "epsilon_n_squared": theory.epsilon_n(s) ** 2,
        "lemma1": theory.lemma1(s, 0.0),
        "lemma2": theory.lemma2(s),
        "theorem1": theory.theorem1(s),
        "chosen_num_params": theory.chosen_num_params(s),
        "minimax_rate": theory.minimax_rate(s),
        "convergence_rate": theory.convergence_rate(s),
    }
    exponent = -2 * s.smoothness / (2 * s.smoothness + s.d)
    assert f"n^{exponent:.3g}" in table[10].meaning


class TestExplain:
    def test_vacuous_and_from_where_it_is_not(self):
        told = " ".join(explain(Setting()))
        assert "vacuous" in told
        assert f"from n = {theory.useful_size(Setting()):.3g}" in told

    def test_not_vacuous(self):
        s = dataclasses.replace(Setting(), size=theory.useful_size(Setting()))
        told = " ".join(explain(s))
        assert "not vacuous" in told
        assert f"at most {theory.theorem1(s):.3g}" in told

    def test_never(self):
        s = Setting(dimension=1e4, zeta=1.5, constants=Constants(C_0=2))
        told = " ".join(explain(s))
        assert "stays vacuous for every n" in told
        assert f"the approximation error alone contributes {theory.xi_n(s) / 1.5:.3g}" in told

    def test_constants_that_were_given_are_named(self):
        assert "1 for all" in explain(Setting())[-1]
        assert "C_prime = 2" in explain(Setting(constants=Constants(C_prime=2)))[-1]

    def test_assumption_3_is_checked(self):
        """Where r_n is positive, sigma_n^2 > B^2 takes a small B and far more parameters than examples."""
        s = Setting(size=2, width=100, inputs=1, outputs=10**6, weight_bound=0.05)
        assert "Assumption 3 does not hold" in " ".join(explain(s))
        assert "Assumption 3" not in " ".join(explain(dataclasses.replace(s, size=10**6)))
        # sigma_n^2 between B^2 and B, and between B^3 and B^2.
        for outputs, holds in ((1000, False), (10, True)):
            told = " ".join(explain(dataclasses.replace(s, outputs=outputs)))
            assert ("Assumption 3" not in told) == holds


class TestCommand:
    def test_the_table_and_the_sentences(self, monkeypatch, capsys):
        code, out, _ = command(monkeypatch, capsys)
        assert code == 0
        assert all(word in out for word in ("σ_n", "79,510", "Theorem 1", "(20)", "vacuous", "per client"))

    def test_json_holds_what_the_formulas_say(self, monkeypatch, capsys):
        options = ("--n", 5000, "--layers", 2, "--width", 9, "--inputs", 3, "--outputs", 2, "--bound", 1.5)
        more = ("--zeta", 4, "--beta", 2, "--d", 2.5, "--constant", "C=0.5", "--constant", "delta=2", "--json")
        code, out, _ = command(monkeypatch, capsys, *options, *more)
        assert code == 0
        result = json.loads(out)
        s = Setting(5000, 2, 9, 3, 2, 1.5, 4.0, 2.0, 2.5, Constants(C=0.5, delta=2.0))
        assert result["terms"]["theorem1"] == theory.theorem1(s)
        assert result["terms"]["chosen_num_params"] == theory.chosen_num_params(s)
        assert result["useful_size"] == theory.useful_size(s)
        assert result["vacuous"] is (theory.theorem1(s) >= 1)
        assert result["setting"] == dataclasses.asdict(s)

    def test_options_go_before_the_file(self, monkeypatch, capsys, tmp_path):
        path = experiment_file(tmp_path, REGRESSION)
        result = json.loads(command(monkeypatch, capsys, path, "--n", 77, "--json")[1])
        assert (result["setting"]["size"], result["setting"]["zeta"]) == (77, 3.0)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--n", 1], "n must be at least 2"),
            (["--zeta", 0.5], "zeta of at least 1"),
            (["--constant", "Cprime=2"], "did you mean 'C_prime'?"),
            (["--constant", "C=big"], "give a number"),
            (["--constant", "C"], "write NAME=VALUE"),
            (["--constant", "C=-1"], "C must be positive"),
            (["--bound", 0], "B times the width M"),
            (["missing.toml"], "missing.toml"),
            ([EXPERIMENTS], "not a run folder"),
        ],
    )
    def test_bad_input_is_one_line_with_exit_code_2(self, monkeypatch, capsys, arguments, words):
        code, _, err = command(monkeypatch, capsys, *arguments)
        assert code == 2
        (line,) = err.strip().splitlines()
        assert line.startswith("pfedbayes: ")
        assert words in line
