import pytest
import torch
from blobs import BLOBS

import pfedbayes
from pfedbayes import runs
from pfedbayes.runs.execute import execute
from pfedbayes.runs.experiment import read_experiment


def test_the_summary_has_what_may_explain_uncertainty(tmp_path):
    list(execute(read_experiment(None, BLOBS), tmp_path / "run", [1, 2]))
    run, ours = runs.read_run(tmp_path / "run"), pfedbayes.load(tmp_path / "run")
    apart = []
    for s in range(2):
        q, w = (
            torch.distributions.Normal(v[0], torch.nn.functional.softplus(v[1]))
            for v in (ours.personal_state(1, s).q, ours.servers[s])
        )
        apart.append(float(torch.distributions.kl_divergence(q, w).sum()))
    assert run.summary.clients.distance[1] == pytest.approx(sum(apart) / 2, rel=1e-3)
    labels = ours.shards.y[ours.shards.train[2]].tolist()
    assert run.summary.clients.rarest_label[2] == min(labels.count(label) for label in set(labels))
    curve = run.summary.risk_coverage["personal"]
    assert curve.coverage[-1] == 1
    last = run.rounds[-1].personal["mc10"]
    errors = sum(sum(row) for row in last["accuracy"]) / 6  # clients of one size
    assert 100 * curve.risk[-1] == pytest.approx(100 - errors)
    assert len(last["entropy"]) == 2
    assert all(0 < part < whole for part, whole in zip(last["mutual_information"][0], last["entropy"][0], strict=True))


def test_other_methods_have_no_distance(tmp_path):
    list(execute(read_experiment(None, [*BLOBS, "method.name=fedavg"]), tmp_path / "run", [1]))
    assert runs.read_run(tmp_path / "run").summary.clients.distance is None
