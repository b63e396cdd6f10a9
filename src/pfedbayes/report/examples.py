"""Single test examples: the image, the truth, and how sure each model is of what."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pfedbayes.report import charts, png
from pfedbayes.report.tables import MODELS, STYLE
from pfedbayes.runs.folder import Run

_SURE = 0.9  # a label at least this probable is a sure answer
_PER_GROUP = 6
_MOST_CLASSES = 10


@dataclass(frozen=True)
class Example:
    """One test example as the page shows it."""

    client: str
    label: str
    image: str | None  # a data URL
    chart: str  # SVG
    verdicts: list[str]


@dataclass(frozen=True)
class Group:
    title: str
    examples: list[Example]
    hidden: int  # how many more belong here and are not shown


def groups(run: Run) -> list[Group]:
    """The recorded examples as sure, unsure and wrong, each with its clearest cases first."""
    recorded = [example for example in (run.summary or {}).get("examples") or [] if _answers(example)]
    names = run.info.get("class_names")
    judged = sorted(((*_verdict_of(example), example) for example in recorded), key=lambda item: item[1])
    right = [(p, example) for guess, p, example in judged if guess == example["label"]]
    wrong = [example for guess, _, example in judged if guess != example["label"]]
    members_of = {
        f"Right and sure (at least {_SURE:.0%})": [example for p, example in right if p >= _SURE][::-1],
        "Right but unsure": [example for p, example in right if p < _SURE],
        "Wrong": wrong[::-1],
    }
    return [
        Group(title, [_example(one, names) for one in members[:_PER_GROUP]], max(0, len(members) - _PER_GROUP))
        for title, members in members_of.items()
        if members
    ]


def _answers(example: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the models say about an example, where they give class probabilities."""
    return {model: example[model] for model in MODELS if (example.get(model) or {}).get("probabilities")}


def _verdict_of(example: dict[str, Any]) -> tuple[int, float]:
    """The answer by which an example is judged: the personal model's, or the shared one's without it."""
    return _top(next(iter(_answers(example).values())))


def _top(answer: dict[str, Any]) -> tuple[int, float]:
    """The most probable label and its probability."""
    probabilities = np.nan_to_num(np.array(answer["probabilities"], dtype=np.float64))
    return int(probabilities.argmax()), float(probabilities.max())


def _example(example: dict[str, Any], names: Sequence[str] | None) -> Example:
    answers, client, label = _answers(example), str(example["client"]), example["label"]
    called = partial(_called, names)
    verdicts = [_words(model, answer, called) for model, answer in answers.items()]
    probabilities = np.array([answer["probabilities"] for answer in answers.values()], dtype=np.float64)
    spreads = np.array([answer["spread"] for answer in answers.values()], dtype=np.float64)
    chart = charts.bar_chart(
        f"Class probabilities for a test example of {client}, true label {called(label)}",
        {model: STYLE[model] for model in answers},
        [
            charts.Group(
                label=f"✓ {called(k)}" if k == label else called(k),
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
    return Example(client, called(label), _data_url(example.get("image")), chart, verdicts)


def _shown_classes(probabilities: np.ndarray[Any, Any], label: int) -> list[int]:
    """The true class and the most probable others, from probabilities (models, classes)."""
    likely = np.argsort(-np.nan_to_num(probabilities).max(axis=0), kind="stable").tolist()
    others = [k for k in likely if k != label]
    return sorted([label, *others[: _MOST_CLASSES - 1]])


def _called(names: Sequence[str] | None, label: int) -> str:
    return names[label] if names else str(label)


def _words(model: str, answer: dict[str, Any], called: Callable[[int], str]) -> str:
    guess, probability = _top(answer)
    doubts = [
        f"{key.replace('_', ' ')} {answer[key]:.2f}"
        for key in ("entropy", "mutual_information")
        if answer.get(key) is not None
    ]
    return ", ".join([f"{model} says {called(guess)} ({probability:.0%})", *doubts])


def _data_url(image: dict[str, Any] | None) -> str | None:
    if image is None or image["shape"][0] not in png.CHANNELS:
        return None
    encoded = png.encode(image["shape"], base64.b64decode(image["pixels"]))
    return "data:image/png;base64," + base64.b64encode(encoded).decode("ascii")
