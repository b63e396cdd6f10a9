"""Give a client that was not in the run its own model, trained from the shared one in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pfedbayes import runs
from pfedbayes.data import Preprocessing, Shards, load_shards
from pfedbayes.data.own.new_rows import read_examples
from pfedbayes.data.splits import SplitPurpose, held_out
from pfedbayes.engine.personalisation import personalise
from pfedbayes.errors import UserError
from pfedbayes.evaluation.posterior import OutputFunction, trained_model
from pfedbayes.maths.metrics import log_average
from pfedbayes.runs.calibration import read_calibration
from pfedbayes.serving.client import Client, Gated
from pfedbayes.serving.saved_models import saved_models
from pfedbayes.trust import gate
from pfedbayes.trust.calibration import DRAWS, NO_SCORES, score, score_gated, scores_at
from pfedbayes.trust.certificate import Certificate, certify_newcomer
from pfedbayes.trust.strangeness import Reference, distances, fit_inputs, model_scores

STEPS = 200
HOLD_OUT = 0.3  # share of the rows that calibrate the model


@dataclass(frozen=True)
class Joined:
    """A newcomer and how well its model does."""

    client: Client
    """The newcomer with its own model."""
    trained: int
    """Rows that the model was trained on."""
    held: int
    """Rows held out for calibration."""
    own: dict[str, float]
    """Metrics of its own model on the rows held out; empty if there are none."""
    shared: dict[str, float]
    """Metrics of the shared model on the same rows."""
    certificate: Certificate | None
    """Bound on the error of its own model."""
    without: str | None
    """The reason if there is no certificate."""
    unchecked: bool
    """Whether the run's data were missing, so that nothing shows that the newcomer's rows are new to the run."""

    def describe(self) -> list[str]:
        """Return the result as lines of text."""
        name = self.client.name
        lines = [f"{name}: own model trained on {self.trained:,} rows; {self.held:,} rows held out for calibration"]
        for metric in ("accuracy", "rmse"):
            if metric in self.own:
                unit = " %" if metric == "accuracy" else ""
                own, shared = (f"{figures[metric]:.4g}{unit}" for figures in (self.own, self.shared))
                lines.append(f"{metric} on the rows held out: {own} with its own model, {shared} with the shared model")
        if self.certificate is None:
            return [*lines, f"no certificate: {self.without}"]
        one = self.certificate
        vacuous = " (vacuous: no better than guessing)" if one.vacuous else ""
        lines.append(
            f"certificate: with {1 - one.delta:.0%} confidence, a network drawn from its model is wrong on at most "
            f"{one.bound:.1%} of new rows{vacuous}; based on all {one.certified.size:,} rows, of which "
            f"{one.certified.gibbs:.1%} are wrong, and a KL of {one.kl:.1f} nats from the shared model"
        )
        if self.unchecked:
            lines.append("it holds only if the run was not trained on these rows; its data are not here to check")
        return lines


def join(
    run: str | Path,
    data: str | Path,
    name: str | None = None,
    steps: int = STEPS,
    zeta: float | None = None,
    hold_out: float = HOLD_OUT,
    certify: bool = True,
    device: str = "auto",
    trust_module: bool = False,
) -> Joined:
    """Train a model for a newcomer from the shared model of a run.

    The data of the run are not needed. If they are there, `join` checks that the newcomer's rows are not among them.

    name: of the newcomer (default: that of the file). steps: local steps from the shared model. zeta: weight of the
    KL term (default: the run's). hold_out: share of the rows that are held out for calibration. certify: bound the
    error of the model, which is slow for convolutional networks. trust_module: see `open_client`.
    """
    run, data = Path(run), Path(data)
    name = name or data.stem
    record = read_calibration(run)
    if name in record.names:
        raise UserError(f"{name!r} is already a client of the run: choose another name with --client")
    if not 0 <= hold_out < 1:
        raise UserError(f"--hold-out is {hold_out}: give a share of at least 0 and less than 1, e.g. {HOLD_OUT}")
    if runs.read_info(run).method.name not in ("pfedbayes", "hierarchical"):
        raise UserError(
            f"{run} has no distribution over models to start from: a newcomer needs a run of pfedbayes or hierarchical"
        )
    saved = saved_models(run, record, device, trust_module)
    prior, known = saved.shared_prior(), _training_data(run)
    shards = _newcomer(record.preprocessing, data, name, hold_out)
    joined = personalise(prior, shards, steps, zeta)
    certificate, without = None, None if certify else "none was requested"
    try:
        certificate = certify_newcomer(prior, joined, known) if certify else None
    except UserError as error:
        without = str(error)
    likelihood, held = joined.model.likelihood, joined.batch_of(shards.validation[0])
    model = trained_model(joined, "personal", 0)
    of_run = saved.trained_model("shared", 0)
    own, shared = model.outputs(DRAWS), of_run.outputs(DRAWS)

    def figures(outputs: OutputFunction) -> dict[str, float]:
        values = likelihood.scores(outputs(held.x), held.y).tolist() if len(held.y) else ()
        return dict(zip(likelihood.metrics, values, strict=False))

    scores, gated = score(likelihood, own(held.x), held.y) if len(held.y) else NO_SCORES, None
    plain = gate.gates(joined.data)[0] if likelihood.task == "classification" else None
    if plain is not None and not gate.is_open(plain) and len(held.y):
        personal, of_shared = (log_average(outputs(held.x)).cpu() for outputs in (own, shared))
        rows = gate.HeldOut(personal, of_shared, held.y.cpu())
        fitted = gate.of_newcomer(plain.own, record.gates, rows)
        gated = Gated(fitted, of_run.outputs, of_run.weights, score_gated(fitted, [(fitted, rows)]), gate.NO_SUMMARIES)
        scores = scores_at(gated.own, gated.usual_share())
    reference = None
    if len(held.y):
        inputs = fit_inputs(shards.x[shards.train[0]])
        by_model = model_scores(likelihood, own(held.x)).cpu() if gated is None else -gated.own.evidence
        both = torch.stack([by_model, distances(held.x.cpu(), inputs).to(by_model)], dim=1).float()
        reference = Reference(inputs, both, gated is not None)
    client = Client(
        name=name,
        which="personal" if gated is None else "gated",
        preprocessing=record.preprocessing,
        likelihood=likelihood,
        outputs=model.outputs,
        own=scores,
        of_all=NO_SCORES,
        notes=(),
        weights=model.weights,
        net=record.net,
        gated=gated,
        reference=reference,
    )
    return Joined(
        client=client,
        trained=len(shards.train[0]),
        held=len(held.y),
        own=figures(own),
        shared=figures(shared),
        certificate=certificate,
        without=without,
        unchecked=known is None,
    )


def _training_data(folder: Path) -> Shards | None:
    """Load the data of a run; None if they are gone or have changed since."""
    run = runs.read_run(folder)
    try:
        shards = load_shards(run.experiment.data)
    except UserError:
        return None
    return shards if run.info.fingerprint in (None, shards.fingerprint()) else None


def _newcomer(preprocessing: Preprocessing, data: Path, name: str, hold_out: float) -> Shards:
    """Read the newcomer's rows; a share of each label is held out as validation data."""
    x, y = read_examples(data, preprocessing)
    classes = preprocessing.target.classes
    labels = None if classes is None else y.numpy()
    held = torch.from_numpy(held_out(labels, len(y), hold_out, SplitPurpose.VALIDATION_CUT.stream(), seed=1))
    none = torch.empty(0, dtype=torch.int64)
    return Shards(
        x, y, ((~held).nonzero().flatten(),), (none,), (held.nonzero().flatten(),), (name,),
        None if classes is None else len(classes), preprocessing,
    )  # fmt: skip
