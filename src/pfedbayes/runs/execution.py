"""Running an experiment into a folder, with checkpoints, and getting the trained federation back."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfedbayes import runs
from pfedbayes.data import Preprocessing, Shards, load_shards
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.plan import Plan, choose_device
from pfedbayes.errors import Diverged, UserError
from pfedbayes.evaluation.prediction import MODELS, Ways
from pfedbayes.maths.gaussian import kl
from pfedbayes.maths.metrics import (
    BINS,
    adaptive_ece,
    confidence,
    entropy,
    log_average,
    mutual_information,
    reliability,
    risk_coverage,
)
from pfedbayes.maths.trees import leaves
from pfedbayes.methods.base import weights_posterior
from pfedbayes.nets import Model
from pfedbayes.runs.calibration import calibration_bytes
from pfedbayes.runs.config import to_toml
from pfedbayes.runs.early_stopping import EarlyStopping
from pfedbayes.runs.experiment import Evaluation, Experiment, build_federation, from_sections, method_name

CHECKPOINT_SHARE = 0.1  # of the time, at most, goes into checkpoints


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a round; `record` is the line of the log if the models were evaluated."""

    round: int
    rounds: int
    seconds: float
    record: dict[str, Any] | None


def execute(
    experiment: Experiment,
    out: Path,
    seeds: Sequence[int],
    device: str = "auto",
    resume: bool = False,
    data_dir: Path | None = None,
    on_download: Callable[[str, int, int], None] | None = None,
    on_federation: Callable[[Federation], None] | None = None,
) -> Generator[Progress]:
    """Run an experiment into a folder, yielding after every round. on_federation is shown what is about to be trained.

    Closing the iterator between two rounds saves the state; `resume` goes on from the last one saved.
    """
    choose_device(device)
    writer = runs.Writer(out)
    try:
        yield from _execute(writer, experiment, seeds, device, resume, data_dir, on_download, on_federation)
    finally:
        writer.close()


def _execute(
    writer: runs.Writer,
    experiment: Experiment,
    seeds: Sequence[int],
    device: str,
    resume: bool,
    data_dir: Path | None,
    on_download: Callable[[str, int, int], None] | None,
    on_federation: Callable[[Federation], None] | None,
) -> Generator[Progress]:
    plan, checkpoint = _previous(writer.folder, experiment, seeds, resume)
    shards = load_shards(experiment.data, data_dir, on_download)
    if plan is not None:
        _refuse_other_data(runs.read(writer.folder), shards)
    clients_file = writer.folder / runs.CLIENTS
    federation = build_federation(experiment, shards, seeds, plan, device, clients_file=clients_file)
    try:
        if checkpoint:
            if checkpoint.round > experiment.training.rounds:
                raise UserError(
                    f"{writer.folder} is already at round {checkpoint.round}: raise training.rounds to go on"
                )
            federation.restore(checkpoint.tensors, checkpoint.round, clients_file)
            # What was read is the file itself, which would take up the disk beside the next one that replaces it.
            checkpoint = checkpoint.let_go()
        if on_federation:
            on_federation(federation)
        writer.write(runs.CONFIG, to_toml(experiment.sections()))
        if plan is None:
            info = _describe(federation, experiment.evaluation, experiment.digest(seeds))
        else:
            info = runs.read(writer.folder).info | {"plan": dataclasses.asdict(plan)}
        writer.write(runs.INFO, json.dumps(info, indent=1) + "\n")
        if shards.preprocessing:
            writer.write(runs.PREPROCESSING, shards.preprocessing.to_json())
        writer.truncate_log(checkpoint.log_bytes if checkpoint else 0)
        clock = runs.Clock(checkpoint.seconds if checkpoint else 0.0)
        stopping = None
        if experiment.training.patience is not None:
            best = checkpoint.best if checkpoint else None
            stopping = EarlyStopping(experiment.training.patience, experiment.evaluation, best)
        checkpoint = best = None  # the states of a best round are let go of when a better one comes
        for name in (runs.SUMMARY, runs.CALIBRATION):
            (writer.folder / name).unlink(missing_ok=True)
        yield from _train(writer, experiment, federation, plan or federation.plan, clock, stopping)
    finally:
        federation.population.close()


def _train(
    writer: runs.Writer,
    experiment: Experiment,
    federation: Federation,
    plan: Plan,
    clock: runs.Clock,
    stopping: EarlyStopping | None,
) -> Generator[Progress]:
    """Train to the end, with the recorded plan, from where the federation is."""
    scored = _scored(federation, experiment.evaluation)
    due = clock.seconds() + experiment.execution.checkpoint_seconds
    try:
        over = stopping is not None and stopping.is_over(federation.round)
        for round in () if over else federation.rounds():
            record = None
            if experiment.training.evaluates(round):
                scores = federation.evaluate(**experiment.evaluation.after(round, experiment.training.rounds))
                record = {"round": round, "seconds": clock.seconds(), **json_safe(_columns(scores, scored))}
                if stopping:
                    record["validation_nll"] = json_safe(stopping.consider(federation))
                    over = stopping.is_over(round)
                writer.append(record)
            if federation.plan != plan:  # smaller chunks for the memory, or no compiler: a resumed run begins so
                plan = federation.plan
                info = json.loads((writer.folder / runs.INFO).read_text()) | {"plan": dataclasses.asdict(plan)}
                writer.write(runs.INFO, json.dumps(info, indent=1) + "\n")
            if clock.seconds() > due or round == experiment.training.rounds or over:
                took = _save(writer, federation, clock, stopping)
                due = clock.seconds() + max(experiment.execution.checkpoint_seconds, took / CHECKPOINT_SHARE)
            yield Progress(round, experiment.training.rounds, clock.seconds(), record)
            if over:
                break
    except (GeneratorExit, Diverged):
        # Both leave the federation as it was after its last whole round.
        _save(writer, federation, clock, stopping)
        raise
    kept = _best_of(federation, experiment, stopping.best if stopping else None)
    summary = {
        "rounds": federation.round,
        "kept_round": kept.round,
        "seconds": clock.seconds(),
        "estimator": kept.headline(experiment.evaluation.samples),
        **look_closely(kept, experiment.evaluation),
    }
    writer.write(runs.CALIBRATION, calibration_bytes(kept, experiment))
    kept.population.close()
    writer.write(runs.SUMMARY, json.dumps(json_safe(summary), indent=1) + "\n")


def _best_of(federation: Federation, experiment: Experiment, best: runs.Best | None) -> Federation:
    """The federation as it was after its best round, beside the one that has gone on; itself if no best is kept."""
    if best is None or best.round == federation.round:
        return federation
    kept = build_federation(experiment, federation.shards, federation.seeds, federation.plan)
    kept.restore(best.tensors, best.round)
    return kept


def _save(writer: runs.Writer, federation: Federation, clock: runs.Clock, stopping: EarlyStopping | None) -> float:
    """Write a checkpoint; the seconds that it took."""
    start = clock.seconds()
    tensors = federation.checkpoint(writer.folder / runs.CLIENTS)
    writer.checkpoint(tensors, federation.round, start, stopping.best if stopping else None)
    federation.population.saved()
    return clock.seconds() - start


def _scored(federation: Federation, evaluation: Evaluation) -> list[int]:
    """The clients that a record has columns for: all, or those that are drawn for evaluation."""
    sets = federation.evaluation_sets(evaluation.split, evaluation.clients)
    return [i for i, indices in enumerate(sets) if evaluation.clients is None or len(indices)]


def _columns(scores: Any, clients: list[int]) -> Any:
    """Scores {model: {estimator: {metric: [seed][client]}}} of these clients alone."""
    if isinstance(scores, dict):
        return {name: _columns(item, clients) for name, item in scores.items()}
    return scores and [[values[i] for i in clients] for values in scores]


def other_config(run: runs.Run, experiment: Experiment, seeds: Sequence[int]) -> str | None:
    """How a run is not one of this experiment with these seeds; None if it is."""
    if run.info["digest"] is None:
        return "it was not made by a config"
    if run.info["seeds"] != list(seeds):
        return f"seeds were {run.info['seeds']} and are {list(seeds)}"
    return experiment.difference(run.config)


def _previous(
    folder: Path, experiment: Experiment, seeds: Sequence[int], resume: bool
) -> tuple[Plan | None, runs.Checkpoint | None]:
    """The recorded plan and the checkpoint to go on from, once the folder is seen to fit the experiment. Of the plan
    clients alone may be told to rest elsewhere, since that changes no bits."""
    if not (folder / runs.INFO).exists():
        own = {
            runs.CONFIG,
            runs.INFO,
        }  # a run killed in its first moments may have left the one without the other
        if others := [path.name for path in folder.iterdir() if path.name not in own and path.name[0] != "."]:
            raise UserError(f"{folder} holds other files ({others[0]}, …): give an empty or a new folder with --out")
        return None, None
    previous = runs.read(folder)
    if how := other_config(previous, experiment, seeds):
        raise UserError(
            f"{folder} was made by another config ({how}): give another --out, or the settings it was made with"
        )
    if not resume:
        raise UserError(f"{folder} already holds this run: add --resume to go on with it, or give another --out")
    plan = Plan(**previous.info["plan"])
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"{folder} was run on a GPU and torch sees none: go on where there is one, or give another --out"
        )
    resting = experiment.execution.resting or plan.resting
    return dataclasses.replace(plan, resting=resting), runs.read_checkpoint(folder)


def _refuse_other_data(run: runs.Run, shards: Shards) -> None:
    """One's own files may have changed since the run; a published set cannot."""
    before = run.info.get("fingerprint")
    if before is not None and before != shards.fingerprint():
        raise UserError(
            f"the data at {run.config['data']['path']} are not those that {run.folder} was trained with: put them "
            "back, or start a new run"
        )


def _describe(federation: Federation, evaluation: Evaluation, digest: str | None) -> dict[str, Any]:
    """What run.json says, of single clients only of those that are scored; a digest of None marks a federation that
    no config describes."""
    shards, method = federation.shards, federation.method
    clients = _scored(federation, evaluation)
    sets = getattr(shards, evaluation.split)
    labels = None
    if shards.num_classes is not None:
        labels = [sorted(set(shards.y[shards.train[i]].tolist())) for i in clients]
    return {
        "format": runs.FORMAT,
        **runs.describe_code(),
        "created": runs.now(),
        "hardware": {"device": federation.plan.device, **runs.describe_machine()},
        "plan": dataclasses.asdict(federation.plan),
        "digest": digest,
        "seeds": list(federation.seeds),
        "num_clients": len(shards.names),
        "clients": [shards.names[i] for i in clients],
        "train_sizes": [len(shards.train[i]) for i in clients],
        "test_sizes": [len(sets[i]) for i in clients],
        "labels": labels,
        "class_names": shards.class_names,
        "data": shards.preprocessing.describe() if shards.preprocessing else None,
        "fingerprint": shards.fingerprint() if shards.preprocessing else None,
        "num_params": federation.model.net.num_params,
        "method": {
            "name": method_name(method),
            "title": method.about.title,
            "personal": method.about.personal,
            "shared": method.about.shared,
            "stochastic": method.about.stochastic,
        },
        "task": federation.model.likelihood.task,
    }


def json_safe(value: Any) -> Any:
    """JSON has no NaN: what is not finite becomes null."""
    if isinstance(value, dict):
        return {name: json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class _Predicted:
    """A client's model on its test data: outputs (K, n, C) and log-probabilities (n, C) of their average."""

    outputs: Tensor
    log_probs: Tensor


EXAMPLES_OF_A_KIND = 4


def look_closely(federation: Federation, evaluation: Evaluation) -> dict[str, Any]:
    """What only the final models are asked: calibration by confidence, errors among the surest, single predictions to
    look at; and what may explain why a client is unsure."""
    clients = _particulars(federation, _scored(federation, evaluation))
    if federation.model.likelihood.task != "classification":
        return {"reliability": {}, "examples": [], "risk_coverage": {}, "clients": clients}
    samples, split = evaluation.samples, evaluation.split
    headline = federation.headline(samples)
    ways = Ways(samples, (headline,), evaluation.sampling)
    diagrams: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    predicted: dict[str, dict[int, _Predicted]] = {}
    for which in federation.models():
        predicted[which] = {}
        sums = torch.zeros(3, BINS, dtype=federation.dtype, device=federation.device)
        said: list[tuple[Tensor, Tensor]] = []
        for block in federation.blocks(which, split, ways, evaluation.clients):
            outputs = block.outputs[headline]
            log_probs = log_average(outputs)
            sums += torch.stack(reliability(log_probs, block.y)).sum(1)
            said.append((log_probs.flatten(0, 1), block.y.flatten()))
            if 0 in block.seeds:
                first = zip(block.clients, outputs.cpu(), log_probs.cpu(), strict=False)  # the first seed comes first
                predicted[which] |= {i: _Predicted(*prediction) for i, *prediction in first}
        confidence, correct, count = sums.tolist()
        diagrams[which] = {
            "confidence": [_ratio(*pair) for pair in zip(confidence, count, strict=True)],
            "accuracy": [_ratio(*pair) for pair in zip(correct, count, strict=True)],
            "count": count,
        }
        curves[which] = _risk_coverage(*(torch.cat(parts) for parts in zip(*said, strict=True))) if said else None
    return {
        "reliability": diagrams,
        "risk_coverage": curves,
        "clients": clients,
        "examples": _examples(federation.shards, getattr(federation.shards, split), predicted),
    }


CURVE_POINTS = 100


def _risk_coverage(log_probs: Tensor, y: Tensor) -> dict[str, Any]:
    """The risk-coverage curve of all predictions together, thinned out, its area, and the adaptive ECE."""
    risk = risk_coverage(confidence(log_probs), log_probs.argmax(-1) != y)
    size = len(risk)
    points = sorted({-(-size * k // CURVE_POINTS) - 1 for k in range(1, CURVE_POINTS + 1)})
    return {
        "coverage": [(point + 1) / size for point in points],
        "risk": risk[points].tolist(),
        "aurc": float(risk.mean()),
        "adaptive_ece": float(adaptive_ece(log_probs, y)),
    }


def _particulars(federation: Federation, clients: list[int]) -> dict[str, Any]:
    """Of these clients: KL (in nats, mean over seeds) of the personal from the shared model where both are Gaussians,
    and how many training examples the rarest of a client's labels has."""
    shards, method = federation.shards, federation.method
    distances = None
    if method.about.gaussian and method.about.personal and method.about.shared:
        shared = [weights_posterior(method, server) for server in federation.servers]
        distances = [
            sum(float(kl(weights_posterior(method, federation.personal_state(i, s)), w)) for s, w in enumerate(shared))
            / len(shared)
            for i in clients
        ]
    rarest = None
    if shards.num_classes is not None:
        counts = [torch.bincount(shards.y[shards.train[i]]) for i in clients]
        rarest = [int(count[count > 0].min()) for count in counts]
    return {"distance": distances, "rarest_label": rarest}


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None


def _examples(
    shards: Shards, sets: Sequence[Tensor], predicted: dict[str, dict[int, _Predicted]]
) -> list[dict[str, Any]]:
    """Test examples of many clients on which the first model is sure and right, unsure, and surely wrong."""
    first = next(iter(predicted.values()))
    kinds: dict[str, list[tuple[float, int, int]]] = {"sure": [], "unsure": [], "wrong": []}
    for i, prediction in first.items():
        doubt = entropy(prediction.log_probs)
        right = prediction.log_probs.argmax(-1) == shards.y[sets[i]]
        ranks = {
            "sure": torch.where(right, -doubt, -torch.inf),
            "unsure": doubt,
            "wrong": torch.where(right, -torch.inf, -doubt),
        }
        for kind, rank in ranks.items():
            if (best := float(rank.max())) > -torch.inf:
                kinds[kind].append((best, i, int(rank.argmax())))
    chosen = {(i, row) for ranked in kinds.values() for _, i, row in sorted(ranked)[-EXAMPLES_OF_A_KIND:]}
    return [_example(shards, i, row, int(sets[i][row]), predicted) for i, row in sorted(chosen)]


def _example(
    shards: Shards, client: int, row: int, pool_row: int, predicted: dict[str, dict[int, _Predicted]]
) -> dict[str, Any]:
    x = shards.x[pool_row]
    image = None
    if x.dtype == torch.uint8 and x.dim() == 3:
        image = {"shape": list(x.shape), "pixels": base64.b64encode(x.numpy().tobytes()).decode()}
    example: dict[str, Any] = {"client": shards.names[client], "label": int(shards.y[pool_row]), "image": image}
    for which in MODELS:
        example[which] = _answer(predicted[which][client], row) if which in predicted else None
    return example


def _answer(prediction: _Predicted, row: int) -> dict[str, Any]:
    draws = prediction.outputs[:, row : row + 1]
    return {
        "probabilities": prediction.log_probs[row].exp().tolist(),
        "spread": draws.softmax(-1).std(0, correction=0)[0].tolist(),
        "entropy": float(entropy(prediction.log_probs[row])),
        "mutual_information": float(mutual_information(draws)),
    }


def save(federation: Federation, folder: str | Path) -> Path:
    """Keep a federation of one's own data and module in a folder, for `load`; data and module stay outside."""
    writer = runs.Writer(Path(folder))
    try:
        if (writer.folder / runs.INFO).exists() and runs.read(writer.folder).info["digest"] is not None:
            raise UserError(f"{folder} holds a run: give another folder")
        method = {"name": method_name(federation.method), **dataclasses.asdict(federation.method)}
        training = dataclasses.asdict(federation.training)
        del training["patience"]  # it belongs to runs, whose config has validation data to stop on
        writer.write(runs.CONFIG, to_toml({"method": method, "training": training}))
        writer.write(runs.INFO, json.dumps(_describe(federation, Evaluation(), None), indent=1) + "\n")
        writer.checkpoint(federation.checkpoint(writer.folder / runs.CLIENTS), federation.round, seconds=0.0)
    finally:
        writer.close()
    return writer.folder


def load(
    folder: str | Path, shards: Shards | None = None, model: Model | None = None, device: str = "auto"
) -> Federation:
    """The trained federation of a run folder, its data and network made again; what `save` kept has to be given the
    data and the model that it was trained with. With early stopping it is that of the best round."""
    run = runs.read(Path(folder))
    if "federation" in run.info:
        raise UserError(
            f"{folder} was made on Flower; its personal models are on the nodes: use pfedbayes.flower.load_node there"
        )
    experiment = from_sections(run.config)
    checkpoint = runs.read_checkpoint(run.folder)
    if checkpoint is None:
        raise UserError(f"{folder} has no saved state yet: let the run go on for a while")
    if run.info["digest"] is None and (shards is None or model is None):
        raise UserError(f"{folder} holds a federation of your own data and module: give load() its shards and model")
    if shards is None:
        shards = load_shards(experiment.data)
        _refuse_other_data(run, shards)
    plan = Plan(**run.info["plan"]).on(choose_device(device))
    federation = build_federation(experiment, shards, run.info["seeds"], plan, model=model)
    state = checkpoint.best or checkpoint
    federation.restore(state.tensors, state.round, run.folder / runs.CLIENTS)
    return federation


def read_preprocessing(folder: str | Path) -> Preprocessing:
    """How a run of one's own data made its inputs and targets; with `data.read_inputs` new rows are read likewise."""
    path = Path(folder) / runs.PREPROCESSING
    if not path.is_file():
        raise UserError(f"{path} is missing: give the folder of a run of one's own data")
    return Preprocessing.from_json(path.read_text(encoding="utf-8"), str(path))


@dataclass(frozen=True)
class Cost:
    """What a run will take, extrapolated from one round and one evaluation of it; seconds_to_start: what the first
    round takes longer than another, to compile for example; bytes of memory, and bytes of the file in which clients
    rest."""

    federation: Federation
    plan: Plan
    seconds_to_start: float
    seconds_per_round: float
    seconds_per_evaluation: float
    evaluations: int
    seconds: float
    bytes: int
    file_bytes: int


def estimate(experiment: Experiment, seeds: Sequence[int], device: str = "auto", data_dir: Path | None = None) -> Cost:
    """Measure a round and an evaluation, without writing anything."""
    shards = load_shards(experiment.data, data_dir)
    federation = build_federation(experiment, shards, seeds, device=device)
    clock = runs.Clock()
    federation.train_round()
    federation.confirm()  # a GPU may still be at work
    first = clock.seconds()
    federation.train_round()
    federation.confirm()
    per_round = clock.seconds() - first
    start = max(0.0, first - per_round)
    rounds = experiment.training.rounds
    asked = [experiment.evaluation.after(r, rounds) for r in range(1, rounds + 1) if experiment.training.evaluates(r)]
    evaluating = 0.0
    for options in [options for k, options in enumerate(asked) if options not in asked[:k]]:
        begun = clock.seconds()
        federation.evaluate(**options)
        evaluating += asked.count(options) * (clock.seconds() - begun)
    # While a round is under way the old and the new states are both there, beside the gradients of the models.
    servers = sum(leaf.nbytes for leaf in leaves(tuple(federation.servers)))
    noise = math.prod(experiment.method.noise_shape(federation.model.net.num_params) or (0,)) * 4
    at_once = federation.training_at_once
    working = 3 * (servers + at_once * federation.client_bytes) + at_once * noise
    members = len(seeds) * federation.num_clients
    resting = min(members, rounds * at_once) * federation.client_bytes if at_once < members else 0
    in_file = federation.plan.resting == "file"
    return Cost(
        federation,
        federation.plan,
        start,
        per_round,
        evaluating / len(asked),
        len(asked),
        start + rounds * per_round + evaluating,
        federation.x.nbytes + federation.y.nbytes + working + (0 if in_file else resting),
        resting if in_file else 0,
    )
