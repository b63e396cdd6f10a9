"""Where clients come from: a run folder, those who joined it later, or a file of their own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pfedbayes import runs
from pfedbayes.engine.federation import Federation
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Which
from pfedbayes.evaluation.posterior import answering, weights_of
from pfedbayes.runs import saving
from pfedbayes.runs.experiment import build_model
from pfedbayes.serving.client import Client
from pfedbayes.serving.portable import read_client
from pfedbayes.trust import calibration
from pfedbayes.trust.calibration import NOTHING, Kept, together

NEWCOMERS = "newcomers"  # the folder in a run folder where clients lie that joined later
SUFFIX = ".safetensors"


def open_client(source: str | Path, name: str | None = None, shared: bool = False, device: str = "auto") -> Client:
    """A client of a run folder, one that joined it later (`newcomers.join`), or one in a file (`export`).

    Of a run with several seeds it is the first one's."""
    source = Path(source)
    if source.is_file():
        client = read_client(source, device)
        if shared and client.which != "shared":
            raise UserError(f"{source} holds {client.title}: leave --shared out, or give the run folder")
        if name is not None and client.name not in (None, name):
            raise UserError(f"{source} is of {client.name!r} and not of {name!r}: correct --client")
        return client
    kept = calibration.read(source)
    joined = {path.stem: path for path in sorted((source / NEWCOMERS).glob(f"*{SUFFIX}"))}
    if name in joined and not shared:
        return read_client(joined[name], device)
    if name is not None and name not in kept.names and not shared:
        known = [*kept.names[:20], *(["…"] if len(kept.names) > 20 else []), *joined]
        raise UserError(
            f"{source} has no client {name!r}, it has {', '.join(known)}: predict with --shared, or give it a model of "
            "its own with pfedbayes personalize"
        )
    if name is None and not shared:
        raise UserError(f"say whose model is asked with --client ({', '.join(kept.names[:20])}), or add --shared")
    which: Which = "shared" if shared else "personal"
    return _of_run(load_models(source, kept, which, device), kept, name, which)


def open_all(source: str | Path, device: str = "auto") -> Iterator[Client]:
    """The own models of all clients that were in a run."""
    kept = calibration.read(Path(source))
    federation = load_models(Path(source), kept, "personal", device)
    return (_of_run(federation, kept, name, "personal") for name in kept.names)


def newcomer_file(run: Path, name: str) -> Path:
    """Where a client that joined a run later lies."""
    if not name or name[0] == "." or "/" in name or "\0" in name:
        raise UserError(f"{name!r} cannot name a file: give the client another name with --client")
    return run / NEWCOMERS / f"{name}{SUFFIX}"


def _of_run(federation: Federation, kept: Kept, name: str | None, which: Which) -> Client:
    if which not in federation.models():
        other = "leave --shared out" if which == "shared" else "add --shared"
        raise UserError(f"{federation.method.about.title} has no {which} model: {other}")
    index = kept.names.index(name) if name in kept.names else 0
    weights = weights_of(federation, which, index)
    notes = []
    if kept.chose_round and len(together(kept.scores[which]).odd):
        notes.append("the calibration rows also chose the round that was kept, so they are not quite new to the models")
    if name not in kept.names:
        notes.append("a client that was not in the run is promised nothing")
    return Client(
        name=name,
        which=which,
        preprocessing=kept.preprocessing,
        likelihood=federation.model.likelihood,
        drawn=partial(answering, federation, which, index),
        own=kept.scores[which][index] if name in kept.names else NOTHING,
        of_all=together(kept.scores[which]),
        notes=tuple(notes),
        weights=weights,
        net=kept.net,
    )


def load_models(folder: Path, kept: Kept, which: Which = "shared", device: str = "auto") -> Federation:
    """The trained federation of a run, without its data unless the method makes its models from them."""
    experiment = runs.read_run(folder).experiment
    if which == "personal" and experiment.method.adapts:
        return saving.load(folder, device=device)
    shards = kept.stand_in()
    return saving.load(folder, shards, build_model(kept.net, shards, experiment.method), device)
