import json
import tomllib
from pathlib import Path

import pytest

from pfedbayes.errors import UserError
from pfedbayes.methods import METHODS, FedAvg, PFedBayes
from pfedbayes.runs.config import to_toml
from pfedbayes.runs.experiment import from_sections, read_experiment

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PAPER = sorted(EXPERIMENTS.glob("*_*.toml"))


def test_the_main_job():
    main = read_experiment()
    assert main.method == PFedBayes(zeta=1.0)
    assert (main.data.name, main.data.size, main.training.rounds, main.training.evaluate_every) == (
        "mnist", "small", 200, 10,
    )  # fmt: skip


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_the_papers_settings(path):
    setup = read_experiment(path)
    name, size = path.stem.split("_")
    assert (setup.data.name, setup.data.size) == (name, size)
    assert setup.method == PFedBayes(zeta=10.0, rho0=-2.5, eta_personal=0.001, eta_global=0.001)
    training = setup.training
    assert (training.rounds, training.local_steps, training.batch_size, training.participants) == (800, 20, 100, 10)
    assert (training.train, training.evaluate_window) == ("all", (700, 800))
    assert (setup.net.name, setup.net.init) == (("vgg", "kaiming") if name == "cifar10" else ("mlp", "normal"))


def test_there_is_a_file_for_every_set_and_size():
    assert len(PAPER) == 9


def test_another_method_drops_the_settings_of_the_files_method():
    setup = read_experiment(EXPERIMENTS / "mnist_medium.toml", ["method.name=fedavg", "method.eta=0.1"])
    assert setup.method == FedAvg(eta=0.1)
    assert (setup.training.train, setup.net.init) == ("chosen", "torch")
    assert read_experiment(None, ["method.name=pfedbayes"]).method == PFedBayes(zeta=1.0)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_with_its_defaults(name):
    assert type(read_experiment(None, [f"method.name={name}"]).method) is METHODS[name]


def test_a_resolved_config_reads_back():
    setup = read_experiment(EXPERIMENTS / "cifar10_small.toml")
    sections = {
        section: {key: value for key, value in values.items() if value is not None}
        for section, values in setup.sections().items()
    }
    assert from_sections(sections) == setup


def test_a_config_differs_by_what_it_computes_and_says_how():
    experiment = read_experiment(None, ["training.participants=3", "method.zeta=2.0"])
    config = tomllib.loads(to_toml(experiment.sections()))
    assert experiment.difference(config) is None
    assert (
        read_experiment(None, ["training.participants=3", "method.zeta=2", "training.rounds=7"]).difference(config)
        is None
    )
    assert read_experiment(None, ["training.participants=3"]).difference(config) == "method.zeta was 2.0 and is 1.0"
    assert read_experiment(None, ["method.zeta=2.0"]).difference(config) == "training.participants was 3 and is null"
    assert (
        read_experiment(None, ["method.name=fedavg", "net.init=normal"])
        .difference(config)
        .startswith("method.name was")
    )


def test_what_an_earlier_version_did_not_know_counts_as_its_default():
    config = tomllib.loads(to_toml(read_experiment().sections()))
    del config["training"]["shift"], config["net"]["activation"]
    assert read_experiment().difference(config) is None
    assert read_experiment(None, ["training.shift=2"]).difference(config) == "training.shift was 0 and is 2"
    assert (
        read_experiment(None, ["net.activation=tanh"]).difference(config) == 'net.activation was "relu" and is "tanh"'
    )
    config["method"]["forgotten"] = 3
    assert read_experiment().difference(config) == "method.forgotten was 3 and is null"


def test_the_digest_tells_experiments_apart_but_not_how_they_are_run():
    digest = read_experiment().digest([1])
    assert read_experiment(None, ["execution.over=loop", "training.rounds=7"]).digest([1]) == digest
    assert read_experiment(None, ["method.zeta=2"]).digest([1]) != digest
    assert read_experiment().digest([1, 2]) != digest


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("method.zeta=-1", "zeta must not be negative"),
        ("method.zta=1", "did you mean 'zeta'?"),
        ("training.batch_size=0", "batch_size must be at least 1"),
        ("training.rounds=0", "rounds must be between 1"),
        ("training.evaluate_window=[8, 7]", "first <= last"),
        ("training.participants=0", "participants must be at least 1"),
        ("trainin.rounds=5", "did you mean 'training'?"),
        ("method.name=pfedbays", "did you mean 'pfedbayes'?"),
        ("evaluation.samples=0", "samples must be between 1"),
        ("evaluation.estimators=['mc5']", "estimators must be some of one, mc10, mean, got ['mc5']"),
        ("evaluation.estimators=[]", "estimators must be some of one, mc10, mean, got []"),
        ("evaluation.sampling=outputs", "sampling"),
        ("evaluation.average_every=0", "average_every must be at least 1"),
        ("evaluation.split=validation", "data.validation is 0"),
        ("net.hidden=[0]", "hidden widths must be at least 1"),
        ("execution.threads=0", "threads must be between 1"),
    ],
)
def test_bad_settings_are_named(override, words):
    with pytest.raises(UserError) as caught:
        read_experiment(None, [override])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_average_of_draws_can_be_asked_for_rarely():
    rare = read_experiment(None, ["evaluation.average_every=4", "evaluation.label_prior=true"]).evaluation
    asked = {round: rare.after(round, 10)["estimators"] for round in (1, 4, 8, 9, 10)}
    assert asked == {1: ("one", "mean"), 4: None, 8: None, 9: ("one", "mean"), 10: None}
    assert rare.after(1, 10)["label_prior"]
    always = read_experiment().evaluation
    assert {json.dumps(always.after(round, 10)) for round in range(1, 11)} == {json.dumps(always.after(1, 10))}
    with pytest.raises(UserError, match="nothing to score"):
        read_experiment(None, ["evaluation.average_every=4", "evaluation.estimators=['mc10']"])


def test_bad_sections_are_named():
    with pytest.raises(UserError, match="did you mean 'method'"):
        from_sections({"metod": {}})
    with pytest.raises(UserError, match="as a section"):
        from_sections({"method": "fedavg"})


def test_a_method_that_needs_everybody_gets_everybody():
    assert read_experiment(EXPERIMENTS / "cifar10_small.toml", ["method.name=bnfed"]).training.participants is None
    assert read_experiment(EXPERIMENTS / "cifar10_small.toml", ["method.name=bnfed"]).net.name == "mlp"
