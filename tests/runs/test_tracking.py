"""Trackers get the means of the records, and never end a run."""

import sys
import types

import pytest

from pfedbayes.errors import UserError
from pfedbayes.runs.schema import RoundRecord
from pfedbayes.runs.tracking import mean_scores, tracking

RECORD = RoundRecord(
    3, 1.5, {"mean": {"accuracy": [[50.0, 100.0], [None, 90.0]], "auroc": [[None, float("nan")]]}}, None,
    validation_nll=0.25,
)  # fmt: skip
SETTINGS = {"method": {"name": "fedavg", "eta": 0.1}}


def test_scores_are_means_over_clients_and_seeds():
    assert mean_scores(RECORD) == {"seconds": 1.5, "validation_nll": 0.25, "personal/mean/accuracy": 80.0}


def fake(monkeypatch, name, **functions):
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**functions))


def test_mlflow_and_wandb_get_settings_scores_and_an_end(monkeypatch, tmp_path):
    seen = []
    fake(
        monkeypatch, "mlflow",
        start_run=lambda run_name: seen.append(run_name),  # noqa: PLW0108
        log_params=seen.append,
        log_metrics=lambda values, step: seen.append((step, values)), end_run=lambda: seen.append("mlflow ends"),
    )  # fmt: skip
    run = types.SimpleNamespace(
        log=lambda values, step: seen.append((step, values)), finish=lambda: seen.append("wandb ends")
    )
    fake(monkeypatch, "wandb", init=lambda **about: seen.append(about) or run)
    with tracking(["mlflow", "wandb"], tmp_path / "a-run", SETTINGS, pytest.fail) as send:
        send(RECORD)
    scores = (3, mean_scores(RECORD))
    assert seen == [
        "a-run", {"method.name": "fedavg", "method.eta": "0.1"}, scores,
        {"project": "pfedbayes", "name": "a-run", "config": {"method.name": "fedavg", "method.eta": 0.1}}, scores,
        "mlflow ends", "wandb ends",
    ]  # fmt: skip


def test_a_tracker_that_fails_is_left_and_the_others_go_on(monkeypatch, tmp_path):
    def broken(*_, **__):
        raise ConnectionError("no route\nto host")

    seen, warnings = [], []
    nothing = lambda *_, **__: None  # noqa: E731
    fake(monkeypatch, "mlflow", start_run=nothing, log_params=nothing, log_metrics=broken, end_run=pytest.fail)
    run = types.SimpleNamespace(log=lambda values, step: seen.append(step), finish=broken)
    fake(monkeypatch, "wandb", init=lambda **_: run)
    with tracking(["mlflow", "wandb"], tmp_path, SETTINGS, warnings.append) as send:
        send(RECORD)
        send(RECORD)
    assert seen == [3, 3]
    assert [line.split()[2] for line in warnings] == ["mlflow", "wandb"]
    assert "(ConnectionError: no route); the run goes on" in warnings[0]


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_what_is_not_installed_is_named(monkeypatch, tmp_path, name):
    monkeypatch.setitem(sys.modules, name, None)
    with (
        pytest.raises(UserError, match=rf"needs {name}: pip install 'pfedbayes\[{name}\]'"),
        tracking([name], tmp_path, SETTINGS, pytest.fail),
    ):
        pass


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(UserError, match="did you mean 'wandb'"), tracking(["wanbd"], tmp_path, {}, pytest.fail):
        pass


def test_tensorboard_keeps_the_scores_in_the_run_folder(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tracking(["tensorboard"], tmp_path, SETTINGS, pytest.fail) as send:
        send(RECORD)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = read.Scalars("personal/mean/accuracy")
    assert (event.step, event.value) == (3, 80.0)
