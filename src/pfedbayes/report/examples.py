"""Single predictions: the image, the true label, and the class probabilities of each model."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pfedbayes.report import charts, png
from pfedbayes.report.tables import STYLE
from pfedbayes.runs import schema
from pfedbayes.runs.folder import Run

_CONFIDENT = 0.9  # the least probability of a confident prediction
_PER_GROUP = 6
_MOST_CLASSES = 10


@dataclass(frozen=True)
class Example:
    """One example as the page shows it."""

    client: str
    label: str
    image: str | None
    """A data URL."""
    chart: str
    """The class probabilities, as SVG."""
    verdicts: list[str]
    """A line per model."""


@dataclass(frozen=True)
class Group:
    """Examples of one kind."""

    title: str
    examples: list[Example]
    hidden: int
    """Number of further examples of this kind, which are not shown."""


def groups(run: Run) -> list[Group]:
    """Group the recorded examples into confident, uncertain and wrong ones, each with its clearest cases first."""
    recorded = [example for example in (run.summary.examples if run.summary else []) if _answers(example)]
    names = run.info.class_names
    judged = sorted(((*_verdict_of(example), example) for example in recorded), key=lambda item: item[1])
    right = [(p, example) for guess, p, example in judged if guess == example.label]
    wrong = [example for guess, _, example in judged if guess != example.label]
    members_of = {
        f"Correct and confident (at least {_CONFIDENT:.0%})": [one for p, one in right if p >= _CONFIDENT][::-1],
        "Correct but uncertain": [one for p, one in right if p < _CONFIDENT],
        "Wrong": wrong[::-1],
    }
    return [
        Group(title, [_example(one, names) for one in members[:_PER_GROUP]], max(0, len(members) - _PER_GROUP))
        for title, members in members_of.items()
        if members
    ]


def _answers(example: schema.Example) -> dict[str, schema.Answer]:
    """Return the predictions of the models that have class probabilities."""
    answers = {"personal": example.personal, "shared": example.shared}
    return {model: answer for model, answer in answers.items() if answer and answer.probabilities}


def _verdict_of(example: schema.Example) -> tuple[int, float]:
    """Return the prediction by which an example is judged: of the personal model, or else of the shared one."""
    return _top(next(iter(_answers(example).values())))


def _top(answer: schema.Answer) -> tuple[int, float]:
    """Return the most probable label and its probability."""
    probabilities = np.nan_to_num(np.array(answer.probabilities, dtype=np.float64))
    return int(probabilities.argmax()), float(probabilities.max())


def _example(example: schema.Example, names: Sequence[str] | None) -> Example:
    answers, client, label = _answers(example), example.client, example.label
    class_name = partial(_class_name, names)
    verdicts = [_verdict(model, answer, class_name) for model, answer in answers.items()]
    probabilities = np.array([answer.probabilities for answer in answers.values()], dtype=np.float64)
    spreads = np.array([answer.spread for answer in answers.values()], dtype=np.float64)
    chart = charts.bar_chart(
        f"Class probabilities for a test example of {client}, true label {class_name(label)}",
        {model: STYLE[model] for model in answers},
        [
            charts.Group(
                label=f"✓ {class_name(k)}" if k == label else class_name(k),
                values=probabilities[:, k].tolist(),
                spreads=spreads[:, k].tolist(),
                strong=k == label,
            )
            for k in _shown_classes(probabilities, label)
        ],
        value_label="probability",
        description="; ".join(verdicts),
        end=1,
        compact=True,
    )
    return Example(client, class_name(label), _data_url(example.image), chart, verdicts)


def _shown_classes(probabilities: np.ndarray[Any, Any], label: int) -> list[int]:
    """Return the true class and the most probable others, from probabilities (models, classes)."""
    likely = np.argsort(-np.nan_to_num(probabilities).max(axis=0), kind="stable").tolist()
    others = [k for k in likely if k != label]
    return sorted([label, *others[: _MOST_CLASSES - 1]])


def _class_name(names: Sequence[str] | None, label: int) -> str:
    return names[label] if names else str(label)


def _verdict(model: str, answer: schema.Answer, class_name: Callable[[int], str]) -> str:
    guess, probability = _top(answer)
    uncertainty = {"entropy": answer.entropy, "mutual information": answer.mutual_information}
    parts = [f"{name} {value:.2f}" for name, value in uncertainty.items() if value is not None]
    return ", ".join([f"{model} model: {class_name(guess)} ({probability:.0%})", *parts])


def _data_url(image: schema.Image | None) -> str | None:
    if image is None or image.shape[0] not in png.CHANNELS:
        return None
    encoded = png.encode(image.shape, base64.b64decode(image.pixels))
    return "data:image/png;base64," + base64.b64encode(encoded).decode("ascii")
