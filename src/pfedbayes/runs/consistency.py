"""Whether the parts of a run folder fit each other. Each one alone has been compared with its type before.

Every function raises ValueError if something does not fit.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence

from pfedbayes.evaluation.cross_site import CrossSite
from pfedbayes.evaluation.estimators import MODELS
from pfedbayes.maths.metrics import METRICS
from pfedbayes.runs.schema import Example, RoundRecord, RunInfo, Summary
from pfedbayes.trust.joining import Verdict

LARGEST_IMAGE = 2**26  # bytes


def require_info(info: RunInfo) -> None:
    """Compare the lists of run.json with each other."""
    clients = len(info.clients)
    for name in ("train_sizes", "test_sizes", "labels"):
        values = getattr(info, name)
        if values is not None and len(values) != clients:
            raise ValueError(f"{name} has {len(values)} entries for {clients} clients")
    if not info.seeds or not clients:
        raise ValueError("it has no seeds or no clients")
    if min(*info.train_sizes, *info.test_sizes, info.num_params, *(label for one in info.labels or () for label in one),
           info.num_clients or 0) < 0:  # fmt: skip
        raise ValueError("a size or a label is negative")
    if info.class_names and any(label >= len(info.class_names) for one in info.labels or () for label in one):
        raise ValueError("a label has no class name")
    if info.task not in METRICS:
        raise ValueError(f"task is {info.task!r:.40}")
    if info.federation is not None and not isinstance(info.federation.settings.get("federation.privacy_delta"), float):
        raise ValueError("federation.settings has no privacy_delta")


def require_rounds(info: RunInfo, rounds: Sequence[RoundRecord]) -> None:
    """Compare the scores of a log with the seeds and clients of its run."""
    before = -1
    for record in rounds:
        if not before < record.round or not math.isfinite(record.seconds):
            raise ValueError(f"round {record.round} follows round {before}, or its time is not a number")
        before = record.round
        for model in MODELS:
            for metrics in record.scores(model).values():
                tables = metrics.values()
                if not tables or not all(_fits(info, table) for table in tables):
                    raise ValueError(f"the {model} scores of round {record.round} do not fit the seeds and clients")


def _fits(info: RunInfo, table: Sequence[Sequence[float | None]]) -> bool:
    """Return whether scores [seed][client] have an entry for each."""
    return len(table) == len(info.seeds) and set(map(len, table)) == {len(info.clients)}


def require_summary(info: RunInfo, summary: Summary) -> None:
    """Compare the lists of summary.json with each other and with the clients of its run."""
    if summary.rounds < 0 or not math.isfinite(summary.seconds):
        raise ValueError("its rounds or seconds are not numbers that it can have")
    lengths = [{len(one.confidence), len(one.accuracy), len(one.count)} for one in summary.reliability.values() if one]
    lengths += [{len(one.coverage), len(one.risk)} for one in summary.risk_coverage.values() if one]
    survival = summary.survival
    lengths += [set(map(len, (survival.times, survival.observed, *survival.predicted.values())))] if survival else []
    if any(len(different) > 1 for different in lengths):
        raise ValueError("the lists of a curve have different lengths")
    if {*summary.reliability, *summary.risk_coverage, *(survival.predicted if survival else ())} - set(MODELS):
        raise ValueError("it has a curve of an unknown model")
    if not all(_fits(info, table) for table in summary.gated.values()):
        raise ValueError("the gated scores do not fit the seeds and clients")
    facts = summary.clients
    for values in (facts.distance, facts.rarest_label) if facts else ():
        if values is not None and len(values) != len(info.clients):
            raise ValueError(f"clients has {len(values)} entries for {len(info.clients)} clients")
    for example in summary.examples:
        _require_example(info, example)
    for record in summary.joining or []:
        _require_verdict(record.folds)
        if record.test is not None:
            _require_verdict(record.test)
    if summary.cross_site is not None:
        _require_cross_site(summary.cross_site)


def _require_verdict(verdict: Verdict) -> None:
    numbers = (verdict.alone, verdict.joined, verdict.difference, verdict.low, verdict.high)
    if verdict.rows < 1 or not all(map(math.isfinite, numbers)) or not 0 <= verdict.probability <= 1:
        raise ValueError("a verdict on joining has numbers that it cannot have")


def _require_cross_site(matrix: CrossSite) -> None:
    clients = len(matrix.names)
    if len(matrix.scores) - clients not in (0, 1) or {clients} != {len(matrix.counts), *map(len, matrix.scores)}:
        raise ValueError("the cross-site scores do not fit their clients")
    if matrix.metric not in {name for names in METRICS.values() for name in names}:
        raise ValueError(f"the cross-site scores are of {matrix.metric!r:.40}")


def _require_example(info: RunInfo, example: Example) -> None:
    answers = [answer for answer in (example.personal, example.shared) if answer]
    lengths = {len(values) for answer in answers for values in (answer.probabilities, answer.spread)}
    classes = len(info.class_names) if info.class_names else None
    if len(lengths) > 1 or (lengths - {0} and not 0 <= example.label < (classes or max(lengths))):
        raise ValueError("an example has a label without a probability")
    if classes is not None and lengths - {0, classes}:
        raise ValueError("an example does not have a probability for every class")
    if example.image is not None:
        size = math.prod(example.image.shape)
        if len(example.image.shape) != 3 or min(example.image.shape) < 1 or size > LARGEST_IMAGE:
            raise ValueError("an image has another shape")
        try:
            pixels = base64.b64decode(example.image.pixels, validate=True)
        except binascii.Error:
            raise ValueError("the pixels of an image are not base64") from None
        if len(pixels) != size:
            raise ValueError("an image has more or fewer pixels than its shape says")
