"""Assess the uncertainty of models of numbers: scores on own test data, intervals, and detection of strange inputs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pfedbayes.evaluation.estimators import Which
from pfedbayes.maths.likelihoods import NumberLikelihood
from pfedbayes.maths.metrics import Gaussians, moments
from pfedbayes.maths.ranking import auroc
from pfedbayes.trust import conformal
from pfedbayes.trust.answers import ALPHA, Answers, Inputs, Models
from pfedbayes.trust.strangeness import model_scores

METRICS = ("rmse", "nll", "coverage")
"""Those that all likelihoods of numbers have."""


def answer_numbers(
    models: Models, likelihood: NumberLikelihood, which: Which, clients: Mapping[int, Inputs], s: int
) -> tuple[dict[int, dict[str, Answers]], dict[int, dict[str, float]]]:
    """Return what a model of a seed says to all inputs of each client, by kind, and the metrics of each client.

    The score of an input by the model is the predicted deviation. Intervals are calibrated on validation data: on the
    client's own if there are enough, else on those of all clients.
    """
    said: dict[int, dict[str, tuple[Tensor, Gaussians]]] = {}
    answers: dict[int, dict[str, Answers]] = {}
    for i, inputs in clients.items():
        said[i], answers[i] = {}, {}
        for kind, x in inputs.every().items():
            outputs = models.predict(which, i, x, s).cpu()
            predicted = moments(likelihood, outputs)
            said[i][kind] = outputs, predicted
            answers[i][kind] = Answers(
                outputs, predicted.deviation.mean(-1), None, model_scores(likelihood, outputs), inputs.distance[kind]
            )
    held_out = [i for i, inputs in clients.items() if "validation" in inputs.known]
    scores = [conformal.residuals(said[i]["validation"][1], clients[i].known["validation"][1]) for i in held_out]
    intervals = dict(zip(held_out, conformal.calibrate_clients(scores, ALPHA), strict=True)) if held_out else {}
    rows: dict[int, dict[str, float]] = {}
    for i, inputs in clients.items():
        y, (outputs, predicted) = inputs.known["own"][1], said[i]["own"]
        found = dict(zip(likelihood.metrics, likelihood.scores(outputs, y).tolist(), strict=True))
        row = {name: found[name] for name in METRICS}
        for name in inputs.strange:
            other = answers[i][f"strange {name}"].epistemic
            row[f"auroc_{name}"] = float(auroc(answers[i]["own"].epistemic, other))
        if i in intervals:
            low, high = conformal.interval(predicted, intervals[i])
            row["set_coverage"] = float(((low <= y) & (y <= high)).all(-1).double().mean())
        rows[i] = row
    return answers, rows
