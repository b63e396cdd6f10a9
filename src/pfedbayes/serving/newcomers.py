"""A client that was never in the run: its own model, made from the shared one in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pfedbayes import runs
from pfedbayes.data import Shards
from pfedbayes.data.own.new_rows import read_examples
from pfedbayes.data.splits import Purpose, held_out
from pfedbayes.engine.federation import Federation
from pfedbayes.engine.personalisation import personalise
from pfedbayes.errors import UserError
from pfedbayes.evaluation.posterior import Answer, answering, weights_of
from pfedbayes.maths.metrics import METRICS, scores
from pfedbayes.runs import saving
from pfedbayes.serving.client import Client
from pfedbayes.serving.opening import load_models
from pfedbayes.trust import calibration
from pfedbayes.trust.calibration import DRAWS, NOTHING, Kept, score
from pfedbayes.trust.certificate import Certificate, certify_joined

STEPS = 200
HOLD_OUT = 0.3  # of the rows, to calibrate on


@dataclass(frozen=True)
class Joined:
    """A newcomer, the rows it was trained on and held out, and how its own and the shared model do on the latter (empty
    if there are none); the certificate, or why there is none; and a condition of it that could not be checked."""

    client: Client
    trained: int
    held: int
    own: dict[str, float]
    shared: dict[str, float]
    certificate: Certificate | None
    without: str | None
    unchecked: bool

    def words(self) -> list[str]:
        """What came of it, for people."""
        name = self.client.name
        said = [f"{name}: a model of its own from {self.trained:,} rows; {self.held:,} are held out to calibrate on"]
        for metric in ("accuracy", "rmse"):
            if metric in self.own:
                unit = " %" if metric == "accuracy" else ""
                figures = (
                    f"{self.own[metric]:.4g}{unit} by its own model, {self.shared[metric]:.4g}{unit} by the shared"
                )
                said.append(f"{metric} on the rows held out: {figures}")
        if self.certificate is None:
            return [*said, f"no certificate: {self.without}"]
        one = self.certificate
        seen = f"{one.certified.size:,} rows, {one.certified.gibbs:.1%} of them wrong"
        said.append(
            f"certificate: with {1 - one.delta:.0%} confidence a network drawn from its model is wrong on at most "
            f"{one.bound:.1%} of new rows{' (vacuous: no better than guessing)' if one.vacuous else ''}; from all "
            f"{seen}, and a KL of {one.kl:.1f} nats from the shared model"
        )
        if self.unchecked:
            said.append("it holds if none of these rows were trained on in the run, whose data are not here to check")
        return said


def join(
    run: str | Path,
    data: str | Path,
    name: str | None = None,
    steps: int = STEPS,
    zeta: float | None = None,
    hold_out: float = HOLD_OUT,
    certify: bool = True,
    device: str = "auto",
) -> Joined:
    """Give a newcomer its own model by so many steps from the shared one of a run, on all of its rows but a share that
    is held out. The data of the run are not needed; if they are there, it is checked that none of them certify.

    certify: bound the error of the model, which takes the longest where there are convolutions.
    """
    run, data = Path(run), Path(data)
    name = name or data.stem
    kept = calibration.read(run)
    if name in kept.names:
        raise UserError(f"{name!r} is a client of the run already: give the newcomer another name with --client")
    if not 0 <= hold_out < 1:
        raise UserError(f"--hold-out is {hold_out}: give a share between 0 and 1, e.g. {HOLD_OUT}")
    federation, unchecked = _load(run, kept, device)
    shards = _shards(kept, data, name, hold_out)
    joined = personalise(federation, shards, "shared", steps, zeta)
    certificate, without = None, None if certify else "none was asked for"
    try:
        certificate = certify_joined(federation, joined) if certify else None
    except UserError as error:
        without = str(error)
    likelihood, held = joined.model.likelihood, joined.batch_of(shards.validation[0])
    own, shared = answering(joined, "personal", 0, DRAWS), answering(federation, "shared", 0, DRAWS)

    def figures(answer: Answer) -> dict[str, float]:
        values = scores(likelihood, answer(held.x), held.y).tolist() if len(held.y) else ()
        return dict(zip(METRICS[likelihood.task], values, strict=False))

    weights = weights_of(joined, "personal", 0)
    assert weights is not None  # noqa: S101, `personalise` gives Gaussians
    client = Client(
        name=name,
        which="personal",
        preprocessing=kept.preprocessing,
        likelihood=likelihood,
        drawn=weights.drawn,
        own=score(likelihood, own(held.x), held.y) if len(held.y) else NOTHING,
        of_all=NOTHING,
        notes=(),
        weights=weights,
        net=kept.net,
    )
    return Joined(
        client, len(shards.train[0]), len(held.y), figures(own), figures(shared), certificate, without, unchecked
    )


def _load(run: Path, kept: Kept, device: str) -> tuple[Federation, bool]:
    """The federation of a run with its data if they are still there, and whether they are not."""
    if runs.read_info(run).method.name != "pfedbayes":
        raise UserError(f"{run} has no distribution over models to start from: a newcomer needs a run of pfedbayes")
    try:
        return saving.load(run, device=device), False
    except UserError:
        return load_models(run, kept, device=device), True


def _shards(kept: Kept, data: Path, name: str, hold_out: float) -> Shards:
    """The newcomer's rows, those that are held out as validation data, evenly over the labels."""
    x, y = read_examples(data, kept.preprocessing)
    classes = kept.preprocessing.target.classes
    labels = None if classes is None else y.numpy()
    held = torch.from_numpy(held_out(labels, len(y), hold_out, Purpose.VALIDATION_CUT.stream(), seed=1))
    none = torch.empty(0, dtype=torch.int64)
    return Shards(
        x, y, ((~held).nonzero().flatten(),), (none,), (held.nonzero().flatten(),), (name,),
        None if classes is None else len(classes), kept.preprocessing,
    )  # fmt: skip
