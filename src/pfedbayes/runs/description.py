"""What run.json says about a federation."""

from __future__ import annotations

from typing import Any

from pfedbayes import runs
from pfedbayes.engine.federation import Federation
from pfedbayes.evaluation.models import FederatedModels
from pfedbayes.methods import Method
from pfedbayes.runs.naming import method_name
from pfedbayes.runs.sections import Evaluation


def describe_federation(federation: Federation, evaluation: Evaluation, digest: str | None) -> runs.RunInfo:
    """Describe a federation, its machine and its code. digest: None for a federation that no config describes."""
    shards = federation.shards
    clients = scored_clients(federation, evaluation)
    sets = getattr(shards, evaluation.split)
    labels = None
    if shards.num_classes is not None:
        labels = [sorted(set(shards.y[shards.train[i]].tolist())) for i in clients]
    return runs.RunInfo(
        format=runs.FORMAT,
        **runs.describe_code(),
        created=runs.now(),
        hardware=runs.Hardware(federation.plan.device, **runs.describe_machine()),
        plan=federation.plan,
        digest=digest,
        seeds=list(federation.seeds),
        num_clients=len(shards.names),
        clients=[shards.names[i] for i in clients],
        train_sizes=[len(shards.train[i]) for i in clients],
        test_sizes=[len(sets[i]) for i in clients],
        labels=labels,
        class_names=list(shards.class_names) if shards.class_names else None,
        data=shards.preprocessing.describe() if shards.preprocessing else None,
        fingerprint=shards.fingerprint() if shards.preprocessing else None,
        num_params=federation.model.net.num_params,
        method=describe_method(federation.method),
        task=federation.model.likelihood.task,
    )


def describe_method(method: Method) -> runs.MethodInfo:
    """Return what reports say about a method."""
    about = method.about
    return runs.MethodInfo(method_name(method), about.title, about.personal, about.shared, about.stochastic)


def scored_clients(federation: FederatedModels, evaluation: Evaluation) -> list[int]:
    """Return the clients that records have columns for: all of them, or those drawn for evaluation."""
    sets = federation.data.evaluation_sets(evaluation.split, federation.seeds[0], evaluation.clients)
    return [i for i, indices in enumerate(sets) if evaluation.clients is None or len(indices)]


def scores_of(scores: Any, clients: list[int]) -> Any:
    """Return the columns of these clients in scores {model: {estimator: {metric: [seed][client]}}}."""
    if isinstance(scores, dict):
        return {name: scores_of(item, clients) for name, item in scores.items()}
    return scores and [[values[i] for i in clients] for values in scores]
