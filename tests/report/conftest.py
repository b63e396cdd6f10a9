"""Runs made up for the report: plausible numbers without any training."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pfedbayes.files.typed import from_json
from pfedbayes.runs import CONFIG, RoundRecord, Run, RunInfo, Summary, Writer
from pfedbayes.runs.config import to_toml


def _scores(rng: np.random.Generator, task: str, seeds: int, clients: int, quality: float) -> dict[str, Any]:
    """Numbers of one model and estimator: (seeds, clients) lists that improve as quality goes from 0 to 1."""
    noise = rng.normal(size=(seeds, clients))
    if task == "regression":
        values = {"rmse": 1.2 - quality + 0.05 * noise, "nll": 2 - 1.5 * quality + 0.1 * noise, "coverage": 88 + noise}
        values |= {"deviation": 1.5 - quality + 0.01 * noise, "model_deviation": 0.7 - 0.5 * quality + 0.01 * noise}
    else:
        values = {
            "accuracy": np.clip(100 * quality + 1.5 * noise, 0, 100),
            "nll": 2.3 * (1 - quality) + 0.05 * np.abs(noise) + 0.05,
            "brier": 1 - quality + 0.02 * np.abs(noise),
            "ece": 0.15 * (1 - quality) + 0.01 * np.abs(noise) + 0.01,
            "entropy": 2 - 1.5 * quality + 0.01 * noise,
            "mutual_information": 0.5 - 0.4 * quality + 0.005 * noise,
        }
    return {name: array.tolist() for name, array in values.items()}


def _reliability(rng: np.random.Generator, tilt: float) -> dict[str, Any]:
    middles = (np.arange(15) + 0.5) / 15
    count = np.round(2000 * middles**4).astype(int)
    accuracy = np.clip(middles - tilt * np.sin(np.pi * middles) + 0.02 * rng.normal(size=15), 0, 1)
    empty = count == 0
    return {
        "confidence": [None if gone else value for gone, value in zip(empty, middles.tolist(), strict=True)],
        "accuracy": [None if gone else value for gone, value in zip(empty, accuracy.tolist(), strict=True)],
        "count": count.tolist(),
    }


def _answer(label: int, probability: float, classes: int = 10) -> dict[str, Any]:
    probabilities = np.full(classes, (1 - probability) / (classes - 1))
    probabilities[label] = probability
    return {
        "probabilities": probabilities.tolist(),
        "spread": (probabilities * (1 - probabilities) / 2).tolist(),
        "entropy": float(-(probabilities * np.log(probabilities)).sum()),
        "mutual_information": 0.05,
    }


def _examples(rng: np.random.Generator, clients: list[str], personal: bool) -> list[dict[str, Any]]:
    examples = []
    for i, probability in enumerate((0.99, 0.97, 0.7, 0.55, 0.6, 0.95)):
        label, guess = i % 10, (i % 10) if i < 4 else (i + 3) % 10
        pixels = np.zeros((1, 28, 28), np.uint8)
        pixels[0, 6:22, 12 - i : 16 - i] = 255
        pixels[0, 6:10, 4:22] = rng.integers(100, 255)
        examples.append(
            {
                "client": clients[i % len(clients)],
                "label": label,
                "image": {"shape": [1, 28, 28], "pixels": base64.b64encode(pixels.tobytes()).decode()},
                "personal": _answer(guess, probability) if personal else None,
                "shared": _answer(label, probability * 0.8),
            }
        )
    return examples


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """Make a Run: make_run("name", method=..., task=..., clients=..., seeds=..., rounds=..., finished=...)."""

    def make(
        name: str = "first",
        *,
        method: str = "pfedbayes",
        task: str = "classification",
        clients: list[str] | int = 10,
        seeds: int = 1,
        rounds: int = 20,
        finished: bool = True,
    ) -> Run:
        rng = np.random.default_rng(sum(name.encode()))
        names = [f"client-{i}" for i in range(clients)] if isinstance(clients, int) else clients
        title, personal, stochastic = {
            "pfedbayes": ("pFedBayes", True, True),
            "pfedme": ("pFedMe", True, False),
            "fedavg": ("FedAvg", False, False),
        }[method]
        estimators = ["mc10", "one", "mean"] if stochastic else ["mean"]
        classification = task == "classification"

        def model(best: float, done: float) -> dict[str, Any]:
            quality = best * (1 - np.exp(-4 * done))
            return {
                estimator: _scores(rng, task, seeds, len(names), quality - 0.03 * i)
                for i, estimator in enumerate(estimators)
            }

        log = [
            {
                "round": 10 * (i + 1),
                "seconds": 0.5 * (i + 1),
                "personal": model(0.97, (i + 1) / rounds) if personal else None,
                "shared": model(0.9, (i + 1) / rounds),
            }
            for i in range(rounds)
        ]
        config = {
            "data": {"name": "mnist" if classification else "regression", "labels": "two-block"},
            "net": {"name": "mlp", "hidden": [100]},
            "method": {"name": method, "zeta": 1e-05} if stochastic else {"name": method},
            "training": {"rounds": 10 * max(rounds, 1), "batch_size": 50},
            "evaluation": {"samples": 10, "split": "test"},
        }
        info = {
            "format": 1,
            "version": "0.1.0",
            "commit": "abc1234",
            "created": "2026-01-01T12:00:00+00:00",
            "hardware": {
                "device": "cpu",
                "cpu": "Some CPU",
                "cores": 2,
                "memory_gb": 23.4,
                "gpu": None,
                "torch": "2",
                "python": "3.11",
            },
            "plan": {"over": "vmap", "threads": 2},
            "digest": "of the config",
            "seeds": list(range(1, seeds + 1)),
            "clients": names,
            "train_sizes": [50 + 10 * i for i in range(len(names))],
            "test_sizes": [900 + 25 * i for i in range(len(names))],
            "labels": [[(i + k) % 10 for k in range(5)] for i in range(len(names))] if classification else None,
            "num_params": 79510,
            "method": {"name": method, "title": title, "personal": personal, "shared": True, "stochastic": stochastic},
            "task": task,
        }
        summary = {
            "rounds": 10 * rounds,
            "seconds": 93.1,
            "estimator": estimators[0],
            "reliability": {
                "personal": _reliability(rng, 0.05) if personal else None,
                "shared": _reliability(rng, 0.15),
            }
            if classification
            else {},
            "examples": _examples(rng, names, personal) if classification else [],
            "risk_coverage": {
                model: {"coverage": [0.25, 0.5, 0.75, 1.0], "risk": [0, 0.01, 0.02, risk], "aurc": risk / 3}
                for model, risk in (("personal", 0.05), ("shared", 0.1))[not personal :]
            }
            if classification
            else {},
            "clients": {
                "distance": [30.0] * len(names) if personal and stochastic else None,
                "rarest_label": [10] * len(names) if classification else None,
            },
        }
        return Run(
            tmp_path / name,
            config,
            from_json(RunInfo, info),
            [from_json(RoundRecord, record) for record in log],
            from_json(Summary, summary) if finished else None,
        )

    return make


@pytest.fixture
def score_run(make_run: Callable[..., Run]) -> Callable[..., Run]:
    """Make a Run with one evaluated round and given scores, of two clients with 1 and 3 test examples."""

    def score(personal: dict[str, Any] | None, shared: dict[str, Any] | None = None, **options: Any) -> Run:
        run = make_run(**options)
        rounds = [RoundRecord(5, 1.0, personal, shared)]
        info = dataclasses.replace(run.info, clients=["a", "b"], train_sizes=[4, 4], test_sizes=[1, 3], labels=None)
        return dataclasses.replace(run, rounds=rounds, info=info)

    return score


@pytest.fixture
def save_run() -> Callable[[Run], Path]:
    """Write a Run into its folder, as a training run would have."""

    def save(run: Run) -> Path:
        writer = Writer(run.folder)
        writer.write(CONFIG, to_toml(run.sections))
        writer.write_info(run.info)
        for record in run.rounds:
            writer.append(record)
        if run.summary is not None:
            writer.write_summary(run.summary)
        writer.close()
        return run.folder

    return save
