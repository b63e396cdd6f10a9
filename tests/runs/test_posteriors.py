"""evaluation.posterior: runs, resumed runs, and settings that do not go together."""

import pytest
import torch
from blobs import BLOBS, same_bits

import pfedbayes
from pfedbayes import runs
from pfedbayes.data import load_shards
from pfedbayes.errors import UserError
from pfedbayes.evaluation.posterior import trained_model
from pfedbayes.report import write
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import build_federation, read_experiment
from pfedbayes.serving import open_client
from pfedbayes.serving.export import export

HELD_OUT = [*BLOBS, "data.validation=0.25", "evaluation.samples=4"]


def config(method, posterior, *others):
    return read_experiment(None, [*HELD_OUT, f"method.name={method}", f"evaluation.posterior={posterior}", *others])


@pytest.mark.parametrize("posterior", ["laplace", "swag", "ensemble"])
@pytest.mark.parametrize("method", ["fedavg", "fedrep", "scaffold", "apfl"])
def test_runs_come_back_and_serve_their_draws(tmp_path, method, posterior):
    folder, experiment = tmp_path / "run", config(method, posterior, "evaluation.swag_start=1")
    last = list(execute(experiment, folder, [1, 2]))[-1]
    headline = "ensemble" if posterior == "ensemble" else "mc4"
    run = runs.read_run(folder)
    assert run.summary.estimator == headline
    assert run.info.method.name == method
    assert run.info.method.title.endswith({"laplace": ", Laplace", "swag": ", SWAG"}.get(posterior, ", ensemble"))
    back = pfedbayes.load(folder)
    for which in back.models():
        assert back.evaluate(samples=4)[which] == last.record.scores(which)
        client = open_client(folder, "client 1" if which == "personal" else None, shared=which == "shared", raw=True)
        x = torch.randn(5, *back.shards.x.shape[1:], generator=torch.Generator().manual_seed(0))
        outputs = client.outputs(6)(x)
        assert len(outputs) == (2 if posterior == "ensemble" else 6)
        assert float(outputs.std(0).min()) > 0
        assert torch.equal(outputs, trained_model(back, which, 1).outputs(6)(x))
    with pytest.raises(UserError, match="is more than the weights of a network: predict with the run folder"):
        export(client, tmp_path / "client.safetensors")
    assert "ne network, without sampling" not in write([folder], tmp_path / "report.html").read_text()


def test_a_run_with_swag_resumes_to_the_same_bits(tmp_path):
    experiment = config("fedrep", "swag", "evaluation.swag_rank=2", "evaluation.swag_start=1")
    list(execute(experiment, tmp_path / "whole", [1]))
    begun = execute(experiment, tmp_path / "cut", [1])
    next(begun), next(begun)
    begun.close()
    list(execute(experiment, tmp_path / "cut", [1], resume=True))
    assert same_bits(pfedbayes.load(tmp_path / "cut"), pfedbayes.load(tmp_path / "whole"))


def test_swag_collects_the_last_quarter_of_the_rounds_by_default():
    assert config("fedavg", "swag", "training.rounds=40").evaluation.swag_start == 30
    assert config("fedavg", "swag", "evaluation.swag_start=7").evaluation.swag_start == 7
    assert config("fedavg", "laplace").evaluation.swag_start is None


def test_folds_and_clients_alone_have_posteriors_of_their_own_data(tmp_path):
    overrides = [*BLOBS, "method.name=fedavg", "evaluation.posterior=laplace", "evaluation.folds=2"]
    experiment = read_experiment(None, [*overrides, "evaluation.alone=true", "evaluation.samples=4"])
    list(execute(experiment, tmp_path / "run", [1]))
    back = pfedbayes.load(tmp_path / "run")
    shards = load_shards(experiment.data)
    assert len(back.server_rows(0, 0)) == sum(map(len, shards.train))
    alone = back.setup.first_alone
    assert back.server_rows(alone, 1).tolist() == shards.train[1].tolist()
    client = open_client(tmp_path / "run", "client 1", model="alone", raw=True)
    x = shards.x[:5]
    assert torch.equal(client.outputs(6)(x), trained_model(back, "shared", 1, alone).outputs(6)(x))


@pytest.mark.parametrize(
    ("method", "posterior", "others", "reason"),
    [
        ("pfedbayes", "laplace", [], "pFedBayes draws its weights itself: leave evaluation.posterior out"),
        ("fedavg-ft", "swag", [], "makes its personal models when they predict.*set evaluation.posterior=laplace"),
        ("bnfed", "swag", [], "networks of BNFed change their size during training"),
        ("knnper", "laplace", [], "kNN-Per has models that are more than the weights of a network"),
        ("fedavg", "ensemble", ["evaluation.folds=3"], "set evaluation.folds=0 and evaluation.alone=false"),
        ("fedavg", "laplace", ["evaluation.precision=validation", "data.validation=0"], "data.validation is 0"),
        ("fedavg", "nonsense", [], "evaluation.posterior"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(method, posterior, others, reason):
    with pytest.raises(UserError, match=reason):
        config(method, posterior, *others)


def test_an_ensemble_needs_several_seeds_and_save_keeps_none():
    experiment = config("fedavg", "ensemble")
    shards = load_shards(experiment.data)
    with pytest.raises(UserError, match="needs several seeds: add --seeds 5"):
        build_federation(experiment, shards, [1])


def test_a_federation_with_a_posterior_is_not_saved_without_its_run(tmp_path):
    experiment = config("fedavg", "laplace")
    federation = build_federation(experiment, load_shards(experiment.data), [1])
    with pytest.raises(UserError, match=r"a federation with evaluation.posterior is kept by its run"):
        pfedbayes.save(federation, tmp_path / "kept")
