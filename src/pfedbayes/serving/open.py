"""Open a client: from a run folder, from the newcomers of a run, or from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Served
from pfedbayes.evaluation.posterior import TrainedModel, trained_model
from pfedbayes.files.reading import reading
from pfedbayes.methods.base import Method, adapts
from pfedbayes.runs import read_run, saving
from pfedbayes.runs.calibration import CalibrationRecord, read_calibration
from pfedbayes.serving.client import Client
from pfedbayes.serving.portable import read_client
from pfedbayes.serving.saved_models import saved_models
from pfedbayes.trust.calibration import NO_SCORES, concatenate
from pfedbayes.trust.joining import Verdict
from pfedbayes.trust.recalibration import RAW

NEWCOMERS = "newcomers"  # the subfolder of a run with the clients that joined later
SUFFIX = ".safetensors"
LONGEST_NAME = 200  # bytes of a client's name in a file name; most file systems allow 255 in all


def open_client(
    source: str | Path,
    name: str | None = None,
    shared: bool = False,
    device: str = "auto",
    trust_module: bool = False,
    model: str | None = None,
    raw: bool = False,
) -> Client:
    """Return a client of a run folder, one that joined the run later (`join`), or one in a file (`export`).

    name: the client; optional for the shared model and for a file. shared: return the shared model instead of the
    client's own. If the run has several seeds, the models are those of the first. trust_module: whether to import the
    code that a file or folder names for its network; else it is refused. model: the client's model of the federation
    ("joined") or the one that it has trained alone; default: the one that cross-validation has found to be better. raw:
    leave out the map that makes the probabilities calibrated.
    """
    source = Path(source)
    if shared and model is not None:
        raise UserError(f"--shared and --model {model} exclude each other: leave one of them out")
    if model not in (None, "joined", "alone"):
        raise UserError(f"there is no model {model!r}: choose joined or alone")
    with reading(source, "give a run folder, or the exported file of a client"):
        is_file = source.is_file()
    if is_file:
        client = read_client(source, device, trust_module)
        if shared and client.which != "shared":
            raise UserError(f"{source} holds {client.title}: leave --shared out, or give the run folder")
        if name is not None and client.name not in (None, name):
            raise UserError(f"{source} is of {client.name!r} and not of {name!r}: correct --client")
        if model is not None and (client.which == "alone") != (model == "alone"):
            raise UserError(f"{source} holds {client.title}: leave --model out, or give the run folder")
        if raw and not client.map.is_raw:
            raise UserError(f"{source} holds no scores of raw predictions: leave --raw out, or give the run folder")
        return client
    record = read_calibration(source)
    joined = {path.stem: path for path in sorted((source / NEWCOMERS).glob(f"*{SUFFIX}")) if not path.is_symlink()}
    if name in joined and name not in record.names and not shared:
        newcomer = read_client(joined[name], device, trust_module)
        if newcomer.name != name:
            raise UserError(f"{joined[name]} is of {newcomer.name!r}: give the file the name of its client")
        return newcomer
    if name is not None and name not in record.names and not shared:
        known = [*record.names[:20], *(["…"] if len(record.names) > 20 else []), *joined]
        raise UserError(
            f"{source} has no client {name!r}, only {', '.join(known)}: predict with --shared, or train a model for "
            "it with pfedbayes personalize"
        )
    if name is None and not shared:
        raise UserError(f"no client is given: add --client with one of {', '.join(record.names[:20])}, or --shared")
    if shared:
        return _client(_models(source, record, "shared", device, trust_module), record, name, "shared", raw=raw)
    which, why = _own_model(record, str(name), model, _verdicts(source))
    return _client(_models(source, record, which, device, trust_module), record, name, which, why, raw)


def open_all(source: str | Path, device: str = "auto", trust_module: bool = False) -> Iterator[Client]:
    """Yield the default models of all clients that took part in a run; trust_module: see `open_client`."""
    record, verdicts = read_calibration(Path(source)), _verdicts(Path(source))
    chosen = {name: _own_model(record, name, None, verdicts) for name in record.names}
    models = {
        which: _models(Path(source), record, which, device, trust_module)
        for which in dict.fromkeys(which for which, _ in chosen.values())
    }
    return (_client(models[which], record, name, which, why) for name, (which, why) in chosen.items())


def _verdicts(folder: Path) -> dict[str, Verdict]:
    """Return the verdicts on joining of a run by client, from cross-validation."""
    summary = read_run(folder, log_bytes=0).summary
    return {one.client: one.folds for one in (summary.joining if summary else None) or []}


def _own_model(
    record: CalibrationRecord, name: str, model: str | None, verdicts: dict[str, Verdict]
) -> tuple[Served, tuple[str, ...]]:
    """Return which of its own models a client predicts with, and a note if that is not the joined one."""
    if model is None:
        if name not in verdicts or verdicts[name].use == "joined":
            return "personal", ()
        return "alone", (f"by cross-validation its own model is the better one ({verdicts[name].sentence()})",)
    if model == "alone" and "alone" not in record.scores:
        raise UserError("the run has no models that clients trained alone: leave --model out")
    return ("alone" if model == "alone" else "personal"), ()


def file_name(client: str, suffix: str, remedy: str) -> str:
    """Return the name of a client's file. The client's name may come from a stranger: it must not name a folder."""
    if client[:1] in ("", ".") or "/" in client or not client.isprintable() or len(client.encode()) > LONGEST_NAME:
        raise UserError(f"{client[:80]!r} cannot be a file name: {remedy}")
    return f"{client}{suffix}"


def newcomer_file(run: Path, name: str) -> Path:
    """Return the file of a client that joined a run later."""
    return run / NEWCOMERS / file_name(name, SUFFIX, "choose another name with --client")


def _models(
    folder: Path, record: CalibrationRecord, which: Served, device: str, trust_module: bool
) -> Callable[[int], TrainedModel]:
    """Return a function from the number of a client to its model, or to the shared one."""
    saved = saved_models(folder, record, device, trust_module)
    if which != "alone":
        _require_model(saved.method, which)
    if which != "shared" and adapts(saved.method):  # such models are made from the client's training data
        federation = saving.load(folder, device=device, trust_module=trust_module)
        index = record.alone or 0 if which == "alone" else 0
        return partial(trained_model, federation, "personal", seed_index=index)
    return partial(saved.trained_model, which)


def _require_model(method: Method, which: Served) -> None:
    if not getattr(method.about, which):
        remedy = "leave --shared out" if which == "shared" else "add --shared"
        raise UserError(f"{method.about.title} has no {which} model: {remedy}")


def _client(
    models: Callable[[int], TrainedModel],
    record: CalibrationRecord,
    name: str | None,
    which: Served,
    notes: tuple[str, ...] = (),
    raw: bool = False,
) -> Client:
    index = record.names.index(name) if name in record.names else 0
    model = models(index)
    caveats = list(notes)
    if which not in record.scores:
        raise UserError(
            f"the run has no calibration scores for its {which} model: finish it with pfedbayes run --resume"
        )
    if record.folds:
        caveats.append(
            f"the calibration rows were predicted by models trained without them, in {record.folds} folds, so the "
            "guarantees hold approximately"
        )
    if record.chose_round and any(len(each.odd) for each in record.scores[which]):
        caveats.append(
            "the calibration rows also chose the round that was kept, so they are not quite new to the models"
        )
    scores, map = record.scores[which], RAW
    if raw and which in record.maps:
        scores = record.raw_scores[which]
    elif which in record.maps:
        map = record.maps[which].of(index if name in record.names else None)
        caveats.append(
            "the calibration rows also made the probabilities calibrated, by cross-fitting, so the guarantees hold "
            "approximately; --raw predicts without it"
        )
    if name not in record.names:
        caveats.append("there is no guarantee for a client that was not in the run")
    return Client(
        name=name,
        which=which,
        preprocessing=record.preprocessing,
        likelihood=model.model.likelihood,
        outputs=model.outputs,
        own=scores[index] if name in record.names else NO_SCORES,
        of_all=concatenate(scores),
        map=map,
        notes=tuple(caveats),
        weights=model.weights,
        net=record.net,
    )
