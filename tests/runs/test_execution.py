import dataclasses
import json

import pytest
import torch

import pfedbayes
from federations import federation, make_shards, model_for, trained
from pfedbayes import runs
from pfedbayes.engine.backend.local_training import LocalTraining
from pfedbayes.errors import UserError
from pfedbayes.methods import METHODS, FedAvg, PFedBayes
from pfedbayes.runs.execution import execute
from pfedbayes.runs.experiment import load as load_experiment

BLOBS = [
    "data.name=blobs", "data.clients=3", "data.examples=40", "net.hidden=[6]", "training.batch_size=8",
    "training.local_steps=2", "training.rounds=4", "training.evaluate_every=2",
]  # fmt: skip


def same_bits(one, other):
    a, b = one.tensors(), other.tensors()
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_into_a_folder_and_comes_back(tmp_path, name):
    experiment = load_experiment(None, [*BLOBS, f"method.name={name}", "evaluation.label_prior=true"])
    steps = list(execute(experiment, tmp_path / "run", [1, 2]))
    assert [step.round for step in steps] == [1, 2, 3, 4]
    record = steps[-1].record
    assert {which for which in ("personal", "shared") if record[which]} == {
        which for which in ("personal", "shared") if getattr(METHODS[name], which)
    }
    back = pfedbayes.load(tmp_path / "run")
    assert back.round == 4
    again = back.evaluate(label_prior=True)
    for which in back.models():
        assert again[which] == record[which]


def test_a_cheap_course_is_recorded_and_the_end_is_looked_at_by_the_headline_estimator(tmp_path):
    cheap = ["evaluation.estimators=['mean']", "evaluation.sampling=activations"]
    steps = list(execute(load_experiment(None, [*BLOBS, *cheap]), tmp_path / "run", [1, 2]))
    assert list(steps[-1].record["personal"]) == list(steps[-1].record["shared"]) == ["mean"]
    run = runs.read(tmp_path / "run")
    assert run.summary["estimator"] == "mc10"
    counted = [sum(run.summary["reliability"][which]["count"]) for which in ("personal", "shared")]
    assert counted == [2 * sum(run.info["test_sizes"])] * 2  # two seeds
    spreads = [example["personal"]["spread"] for example in run.summary["examples"]]
    assert spreads
    assert all(max(spread) > 0 for spread in spreads)


def test_ones_own_federation_is_kept_and_comes_back(tmp_path):
    method = PFedBayes(zeta=2.0)
    ours = trained(method, 2)
    pfedbayes.save(ours, tmp_path / "mine")
    back = pfedbayes.load(tmp_path / "mine", make_shards(), model_for(method), device="cpu")
    assert (back.round, back.method, back.train, back.seeds) == (2, method, ours.train, ours.seeds)
    assert same_bits(ours, back)
    x = torch.zeros(2, 3, dtype=torch.float64)
    assert torch.equal(ours.predict("personal", 1, x, 5), back.predict("personal", 1, x, 5))
    for one in (ours, back):
        one.train_round()
    assert same_bits(ours, back)
    pfedbayes.save(back, tmp_path / "mine")  # a newer state may take the place of an older one


def test_what_load_and_save_need_is_said(tmp_path):
    ours = federation(FedAvg())
    pfedbayes.save(ours, tmp_path / "mine")
    with pytest.raises(UserError, match="its shards and model"):
        pfedbayes.load(tmp_path / "mine")
    other = dataclasses.replace(make_shards(), train=make_shards().train[:4], test=make_shards().test[:4],
                                validation=make_shards().validation[:4], names=make_shards().names[:4])  # fmt: skip
    with pytest.raises(UserError, match="does not fit"):
        pfedbayes.load(tmp_path / "mine", other, model_for(FedAvg()))
    list(execute(load_experiment(None, BLOBS), tmp_path / "run", [1]))
    with pytest.raises(UserError, match="holds a run"):
        pfedbayes.save(ours, tmp_path / "run")


def test_a_run_of_a_gpu_can_be_loaded_without_one(tmp_path):
    list(execute(load_experiment(None, BLOBS), tmp_path / "run", [1], device="cpu"))
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    info["plan"] |= {"device": "cuda", "threads": None, "graph": True, "noise": "philox"}
    (tmp_path / "run" / "run.json").write_text(json.dumps(info))
    assert pfedbayes.load(tmp_path / "run", device="cpu").plan.device == "cpu"


def test_a_run_of_an_earlier_version_that_lacked_an_option_is_resumed_and_another_config_is_named(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    list(execute(load_experiment(None, BLOBS), whole, [1]))
    begun = execute(load_experiment(None, BLOBS), cut, [1])
    next(begun)
    begun.close()
    settings = (cut / runs.CONFIG).read_text()
    assert "shift = 0\n" in settings
    (cut / runs.CONFIG).write_text(settings.replace("shift = 0\n", ""))
    info = json.loads((cut / runs.INFO).read_text())
    (cut / runs.INFO).write_text(json.dumps(info | {"digest": "of other sections"}))
    for others, seeds, how in (
        (["training.shift=1"], [1], "training.shift was 0 and is 1"),
        ([], [1, 2], r"seeds were \[1\] and are \[1, 2\]"),
    ):
        with pytest.raises(UserError, match=rf"was made by another config \({how}\): give another --out"):
            list(execute(load_experiment(None, BLOBS + others), cut, seeds, resume=True))
    list(execute(load_experiment(None, BLOBS), cut, [1], resume=True))
    assert same_bits(pfedbayes.load(cut), pfedbayes.load(whole))


def test_smaller_chunks_are_recorded_for_a_resumed_run(tmp_path, monkeypatch):
    train = LocalTraining.__call__

    def small_memory(self, clients, received, shard, work):
        if len(work.weight) > 2:
            raise torch.OutOfMemoryError
        return train(self, clients, received, shard, work)

    monkeypatch.setattr(LocalTraining, "__call__", small_memory)
    list(execute(load_experiment(None, BLOBS), tmp_path / "run", [1]))
    assert runs.read(tmp_path / "run").info["plan"]["chunk"] == 2


def test_the_end_of_a_run_says_what_may_explain_doubt(tmp_path):
    list(execute(load_experiment(None, BLOBS), tmp_path / "run", [1, 2]))
    run, ours = runs.read(tmp_path / "run"), pfedbayes.load(tmp_path / "run")
    apart = []
    for s in range(2):
        q, w = (
            torch.distributions.Normal(v[0], torch.nn.functional.softplus(v[1]))
            for v in (ours.personal_state(1, s).q, ours.servers[s])
        )
        apart.append(float(torch.distributions.kl_divergence(q, w).sum()))
    assert run.summary["clients"]["distance"][1] == pytest.approx(sum(apart) / 2, rel=1e-3)
    labels = ours.shards.y[ours.shards.train[2]].tolist()
    assert run.summary["clients"]["rarest_label"][2] == min(labels.count(label) for label in set(labels))
    curve = run.summary["risk_coverage"]["personal"]
    assert curve["coverage"][-1] == 1
    last = run.rounds[-1]["personal"]["mc10"]
    errors = sum(sum(row) for row in last["accuracy"]) / 6  # clients of one size
    assert 100 * curve["risk"][-1] == pytest.approx(100 - errors)
    assert len(last["entropy"]) == 2
    assert all(0 < part < whole for part, whole in zip(last["mutual_information"][0], last["entropy"][0], strict=True))


def test_other_methods_have_no_distance(tmp_path):
    list(execute(load_experiment(None, [*BLOBS, "method.name=fedavg"]), tmp_path / "run", [1]))
    assert runs.read(tmp_path / "run").summary["clients"]["distance"] is None
