"""How models did on validation data, kept so that they can promise something of new data when the data are gone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pfedbayes import runs
from pfedbayes.data import Preprocessing, Shards
from pfedbayes.engine.federation import Federation
from pfedbayes.errors import UserError
from pfedbayes.evaluation.estimators import Which
from pfedbayes.evaluation.posterior import answering
from pfedbayes.maths.likelihoods import Likelihood, Regression
from pfedbayes.maths.metrics import confidence, log_average, moments
from pfedbayes.runs.experiment import Experiment, fit_net
from pfedbayes.runs.sections import NetConfig
from pfedbayes.trust import abstention, conformal

FORMAT = 1
DRAWS = 100  # promises are made for predictions that average so many
DELTA = 0.05  # how often the promise of an abstention may fail
ROOM = 3  # times as many examples as would do if no answer were wrong are enough to abstain by


class Scores(NamedTuple):
    """Of n examples: how odd their true targets looked (see `conformal`), how sure the model was and whether it was
    wrong, each (n,); the last two are empty for a regression."""

    odd: Tensor
    sure: Tensor
    wrong: Tensor


NOTHING = Scores(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.bool))


def score(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Scores:
    """The scores of outputs (K, n, ...) for targets y (n, ...)."""
    if isinstance(likelihood, Regression):
        return NOTHING._replace(odd=conformal.residuals(moments(likelihood, outputs), y).cpu())
    log_probs = log_average(outputs)
    odd = conformal.true_scores(conformal.label_scores(log_probs), y)
    return Scores(odd.cpu(), confidence(log_probs).cpu(), (log_probs.argmax(-1) != y).cpu())


def together(scores: Sequence[Scores]) -> Scores:
    """The scores of all examples."""
    return Scores(*(torch.cat(parts) for parts in zip(*scores, strict=True))) if scores else NOTHING


class Promises(NamedTuple):
    """What may be said of new examples: conformal sets or intervals, and when to answer (None for a regression)."""

    sets: conformal.Calibration
    rule: abstention.Abstention | None


def promise(own: Scores, of_all: Scores, coverage: float, error: float | None) -> Promises:
    """From a client's own examples where they are enough, so that the promise is made to this client; else from those
    of all clients. Which of them is decided by their number alone: a choice by results would void the promise."""
    for name, value in (("coverage", coverage), ("error", error)):
        if value is not None and not 0 < value < 1:
            raise UserError(f"{name} is {value}: give a share between 0 and 1, e.g. 0.9 for coverage, 0.05 for error")
    sets = conformal.calibrate(own.odd, 1 - coverage)
    if sets.says_nothing and len(of_all.odd) > len(own.odd):
        sets = conformal.calibrate(of_all.odd, 1 - coverage, "federation")
    if error is None:
        return Promises(sets, None)
    if len(own.sure) >= ROOM * abstention.fewest(error, DELTA) or len(of_all.sure) <= len(own.sure):
        return Promises(sets, abstention.calibrate(own.sure, own.wrong, error, DELTA))
    return Promises(sets, abstention.calibrate(of_all.sure, of_all.wrong, error, DELTA, "federation"))


@dataclass(frozen=True)
class Kept:
    """What a run keeps for predictions. scores: of each client's validation data by each model, for the first seed;
    chose_round: whether the same data chose the round to be kept."""

    names: tuple[str, ...]
    preprocessing: Preprocessing
    num_targets: int
    net: NetConfig
    chose_round: bool
    scores: dict[str, list[Scores]]

    def stand_in(self) -> Shards:
        """Shards of one example that says nothing, to make the models again where the data are not at hand."""
        target = self.preprocessing.target
        labels = target.classes is not None
        empty = tuple(torch.empty(0, dtype=torch.int64) for _ in self.names)
        return Shards(
            x=torch.zeros(1, *self.preprocessing.shape, dtype=torch.uint8 if self.preprocessing.image else None),
            y=torch.zeros(1, dtype=torch.int64) if labels else torch.zeros(1, self.num_targets),
            train=tuple(torch.zeros(1, dtype=torch.int64) for _ in self.names),
            test=empty,
            validation=empty,
            names=self.names,
            num_classes=len(target.classes) if target.classes is not None else None,
            preprocessing=self.preprocessing,
        )


def keep(federation: Federation, experiment: Experiment) -> bytes:
    """The content of the file from which `read` makes a `Kept`."""
    shards = federation.shards
    preprocessing = shards.preprocessing or Preprocessing.of_arrays(shards.x, shards.num_classes)
    sets = federation.evaluation_sets("validation", experiment.evaluation.clients)
    tensors = {"sizes": torch.tensor([len(rows) for rows in sets])}
    for which in federation.models():
        scores = together(list(_score_clients(federation, which, sets)))
        tensors |= {f"{which}.{name}": values.contiguous() for name, values in scores._asdict().items()}
    net = fit_net(experiment.net, shards, experiment.method)
    about = {
        "format": FORMAT,
        "names": shards.names,
        "preprocessing": preprocessing.to_json(),
        "num_targets": 1 if shards.num_classes is not None else shards.y.shape[1],
        "net": {name: value for name, value in net.section().items() if value is not None},
        "chose_round": experiment.training.patience is not None,
    }
    content: bytes = save(tensors, {"run": json.dumps(about)})
    return content


def _score_clients(federation: Federation, which: Which, sets: Sequence[Tensor]) -> Iterator[Scores]:
    answer = answering(federation, which, 0, DRAWS) if which == "shared" else None
    for i, rows in enumerate(sets):
        if len(rows):
            batch = federation.batch_of(rows)
            outputs = (answer or answering(federation, which, i, DRAWS))(batch.x)
            yield score(federation.model.likelihood, outputs, batch.y)


def read(folder: Path) -> Kept:
    """What a finished run has kept."""
    path = folder / runs.CALIBRATION
    if runs.read_info(folder).digest is None:
        raise UserError(f"{folder} was kept by pfedbayes.save, without its data: load it in Python with pfedbayes.load")
    if not path.is_file():
        raise UserError(f"{folder} is not finished: go on with pfedbayes run --resume --out {folder}")
    tensors, about = read_safetensors(path, "run")
    preprocessing = Preprocessing.from_json(about["preprocessing"], str(path))
    sizes = tensors["sizes"].tolist()
    scores = {}
    for which in ("personal", "shared"):
        if f"{which}.odd" in tensors:
            fields = [_split(tensors[f"{which}.{name}"], sizes) for name in Scores._fields]
            scores[which] = [Scores(*parts) for parts in zip(*fields, strict=True)]
    net = NetConfig.from_section(about["net"])
    return Kept(tuple(about["names"]), preprocessing, about["num_targets"], net, about["chose_round"], scores)


def _split(values: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    # A regression has no labels to be wrong about.
    return torch.split_with_sizes(values, sizes if len(values) else [0] * len(sizes))


def read_safetensors(path: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file and the JSON that its metadata hold under a name."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[name])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged or of another kind ({error}): make it again") from None
    if about.get("format") != FORMAT:
        raise UserError(
            f"{path} has format {about.get('format')}, not {FORMAT}: read it with the version that wrote it"
        )
    return tensors, about
