"""Open a client: from a run folder, from the newcomers of a run, or from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Served
from pfedbayes.evaluation.laplace import Laplace
from pfedbayes.evaluation.posterior import TrainedModel, trained_model
from pfedbayes.files.reading import reading
from pfedbayes.methods.base import Method, adapts
from pfedbayes.runs import read_run, saving
from pfedbayes.runs.calibration import CalibrationRecord, read_calibration
from pfedbayes.serving.client import Client, Gated
from pfedbayes.serving.portable import read_client
from pfedbayes.serving.saved_models import saved_models
from pfedbayes.trust.calibration import NO_SCORES, concatenate, concatenate_summaries, scores_at
from pfedbayes.trust.gate import is_open
from pfedbayes.trust.joining import Verdict
from pfedbayes.trust.recalibration import RAW
from pfedbayes.trust.strangeness import Reference

NEWCOMERS = "newcomers"  # the subfolder of a run with the clients that joined later
SUFFIX = ".safetensors"
# The models that a user can name.
MODELS: dict[str, Served] = {
    "personal": "personal",
    "joined": "personal",
    "alone": "alone",
    "shared": "shared",
    "gated": "gated",
}
Models = Callable[[int], TrainedModel]
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

    name: the client; optional for the shared model and for a file. shared: the same as model="shared". If the run has
    several seeds, the models are those of the first. trust_module: whether to import the code that a file or folder
    names for its network; else it is refused. model: "personal" (or "joined") is the client's model of the federation,
    "gated" the same with the shared model for labels that the client has no rows of, "alone" the one that it has
    trained alone, "shared" the shared one. Default: "alone" if cross-validation has found it to be better than the
    personal one, else "gated" if the client lacks labels that others have, else "personal". raw: leave out the map that
    makes the probabilities calibrated; gated predictions have none, since their gate is fitted.
    """
    source = Path(source)
    if shared and model not in (None, "shared"):
        raise UserError(f"--shared and --model {model} exclude each other: leave one of them out")
    if model not in (None, *MODELS):
        raise UserError(f"there is no model {model!r}: choose {', '.join(MODELS)}")
    wanted, shared = MODELS.get(str(model)), shared or model == "shared"
    with reading(source, "give a run folder, or the exported file of a client"):
        is_file = source.is_file()
    if is_file:
        client = read_client(source, device, trust_module)
        if shared and client.which != "shared":
            raise UserError(f"{source} holds {client.title}: leave --shared out, or give the run folder")
        if name is not None and client.name not in (None, name):
            raise UserError(f"{source} is of {client.name!r} and not of {name!r}: correct --client")
        if wanted not in (None, client.which):
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
        if wanted not in (None, newcomer.which):
            raise UserError(f"{joined[name]} holds {newcomer.title}: leave --model out")
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
        return _client(_models(source, record, "shared", device, trust_module), None, record, name, "shared", raw=raw)
    which, why = _own_model(record, str(name), wanted, _verdicts(source))
    models = _both_models(source, record, which, device, trust_module)
    return _client(*models, record, name, which, why, raw)


def open_all(source: str | Path, device: str = "auto", trust_module: bool = False) -> Iterator[Client]:
    """Yield the default models of all clients that took part in a run; trust_module: see `open_client`."""
    record, verdicts = read_calibration(Path(source)), _verdicts(Path(source))
    chosen = {name: _own_model(record, name, None, verdicts) for name in record.names}
    models = {
        which: _both_models(Path(source), record, which, device, trust_module)
        for which in dict.fromkeys(which for which, _ in chosen.values())
    }
    return (_client(*models[which], record, name, which, why) for name, (which, why) in chosen.items())


def _verdicts(folder: Path) -> dict[str, Verdict]:
    """Return the verdicts on joining of a run by client, from cross-validation."""
    summary = read_run(folder, log_bytes=0).summary
    return {one.client: one.folds for one in (summary.joining if summary else None) or []}


def _own_model(
    record: CalibrationRecord, name: str, wanted: Served | None, verdicts: dict[str, Verdict]
) -> tuple[Served, tuple[str, ...]]:
    """Return which of its own models a client predicts with, and a note if it is the one that it has trained alone."""
    if wanted == "alone" and "alone" not in record.scores:
        raise UserError("the run has no models that clients trained alone: leave --model out")
    if wanted == "gated" and not record.gates:
        raise UserError(
            "the run has no gated predictions: they need classes, a personal and a shared model, and a client that "
            "lacks a label; leave --model out"
        )
    if wanted is not None:
        return wanted, ()
    if name in verdicts and verdicts[name].use != "joined":
        return "alone", (f"by cross-validation its own model is the better one ({verdicts[name].sentence()})",)
    lacks = bool(record.gates) and not is_open(record.gates[record.names.index(name)])
    return ("gated" if lacks else "personal"), ()


def file_name(client: str, suffix: str, remedy: str) -> str:
    """Return the name of a client's file. The client's name may come from a stranger: it must not name a folder."""
    if client[:1] in ("", ".") or "/" in client or not client.isprintable() or len(client.encode()) > LONGEST_NAME:
        raise UserError(f"{client[:80]!r} cannot be a file name: {remedy}")
    return f"{client}{suffix}"


def newcomer_file(run: Path, name: str) -> Path:
    """Return the file of a client that joined a run later."""
    return run / NEWCOMERS / file_name(name, SUFFIX, "choose another name with --client")


def _models(folder: Path, record: CalibrationRecord, which: Served, device: str, trust_module: bool) -> Models:
    """Return a function from the number of a client to its model, or to the shared one."""
    saved = saved_models(folder, record, device, trust_module)
    if which != "alone":
        _require_model(saved.method, which)
    own = which != "shared" and saved.method.about.personal
    if isinstance(saved.method, Laplace) or (own and adapts(saved.method)):  # they are made from training data
        federation = saving.load(folder, device=device, trust_module=trust_module)
        index = record.alone or 0 if which == "alone" else 0
        return partial(trained_model, federation, "personal" if own else "shared", seed_index=index)
    return partial(saved.trained_model, which)


def out_of_fold(folds: int) -> str:
    """Return the caveat of guarantees by cross-validation."""
    return (
        f"the calibration rows were predicted by models trained without them, in {folds} folds, so the guarantees hold "
        "approximately"
    )


def _both_models(
    folder: Path, record: CalibrationRecord, which: Served, device: str, trust_module: bool
) -> tuple[Models, Models | None]:
    """Return a client's own models, and the shared one if it gates them."""
    if which != "gated":
        return _models(folder, record, which, device, trust_module), None
    own: Models = _models(folder, record, "personal", device, trust_module)
    return own, _models(folder, record, "shared", device, trust_module)


def _require_model(method: Method, which: Served) -> None:
    if not getattr(method.about, which):
        remedy = "leave --shared out" if which == "shared" else "add --shared"
        raise UserError(f"{method.about.title} has no {which} model: {remedy}")


def _client(
    models: Models,
    shared: Models | None,
    record: CalibrationRecord,
    name: str | None,
    which: Served,
    notes: tuple[str, ...] = (),
    raw: bool = False,
) -> Client:
    index = record.names.index(name) if name in record.names else 0
    model = models(index)
    caveats = list(notes)
    kind: Served = "personal" if which == "gated" else which
    if kind not in record.scores:
        raise UserError(
            f"the run has no calibration scores for its {which} model: finish it with pfedbayes run --resume"
        )
    if record.folds:
        caveats.append(out_of_fold(record.folds))
    if record.chose_round and any(len(each.odd) for each in record.scores[kind]):
        caveats.append(
            "the calibration rows also chose the round that was kept, so they are not quite new to the models"
        )
    scores, map = record.scores[kind], RAW
    if raw and kind in record.maps:
        scores = record.raw_scores[kind]
    elif kind in record.maps and shared is None:
        map = record.maps[kind].of(index if name in record.names else None)
        caveats.append(
            "the calibration rows also made the probabilities calibrated, by cross-fitting, so the guarantees hold "
            "approximately; --raw predicts without it"
        )
    gated, own, of_all = None, scores[index] if name in record.names else NO_SCORES, concatenate(scores)
    if shared is not None:
        other, of_all_gated = shared(index), concatenate_summaries(record.gated)
        gated = Gated(record.gates[index], other.outputs, other.weights, record.gated[index], of_all_gated)
        own, of_all = (scores_at(rows, gated.usual_share()) for rows in gated[-2:])
    reference = None
    if name in record.names and which in record.strange:
        reference = Reference(record.inputs[index], record.strange[which][index], which == "gated")
    if name not in record.names:
        caveats.append("there is no guarantee for a client that was not in the run")
    return Client(
        name=name,
        which=which,
        preprocessing=record.preprocessing,
        likelihood=model.model.likelihood,
        outputs=model.outputs,
        own=own,
        of_all=of_all,
        map=map,
        notes=tuple(caveats),
        weights=model.weights,
        net=record.net,
        gated=gated,
        reference=reference,
    )
