"""Figures 2 and 3 of the paper, drawn from our results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pfedbayes.files.reading import NUMBER, read_json, require_keys
from pfedbayes.methods import METHODS
from pfedbayes.paper.source import METHODS_OF_THE_PAPER, SIZES, Source
from pfedbayes.report import charts
from pfedbayes.report.charts import Figure
from pfedbayes.report.tables import numbers, over_seeds
from pfedbayes.sweep.scores import DEFAULT


def figure2(source: Source) -> dict[str, Figure]:
    """Figure 2: accuracy by round on MNIST, of the personal model where a method has one."""
    figures = {}
    for size in SIZES:
        series = []
        for k, method in enumerate(METHODS_OF_THE_PAPER):
            cell = {"preset": "paper", "dataset": "mnist", "size": size, "split": "two-block", "variant": DEFAULT}
            found = source.find("table1", method=method, **cell)
            curves = [record["curve"] for record in found if record.get("curve")]
            if curves:
                model = "personal" if "personal" in curves[0] else "shared"
                label = f"{METHODS[method].about.title} ({model})"
                series.append(_series(label, [curve[model] for curve in curves], k))
        if series:
            title = f"Figure 2, {size} MNIST: accuracy by round"
            ends = "; ".join(f"{line.label}: {line.y[-1]:.2f} at round {line.x[-1]:g}" for line in series)
            svg = charts.line_chart(title, series, x_label="round", y_label="Accuracy, %", description=ends)
            figures[f"figure2_{size}"] = Figure(title, svg, f"Mean over seeds.{_course(series)}")
    return figures


def _course(series: list[charts.Series]) -> str:
    """Return a sentence on the best and the last round of pFedBayes."""
    own = next((line for line in series if line.label.startswith(METHODS["pfedbayes"].about.title)), None)
    if own is None:
        return ""
    peak = max(range(len(own.y)), key=own.y.__getitem__)
    rank = 1 + sum(line.y[-1] > own.y[-1] for line in series)
    return (
        f" {own.label}, ten samples: best {own.y[peak]:.2f} at round {own.x[peak]:g}; {own.y[-1]:.2f} at round "
        f"{own.x[-1]:g}, rank {rank} of {len(series)}."
    )


def _series(label: str, curves: list[list[list[float]]], k: int) -> charts.Series:
    """Return the mean over seeds of curves of (round, accuracy)."""
    values = numbers([[accuracy for _, accuracy in curve] for curve in curves])
    estimates = [over_seeds(column) for column in values.T]
    return charts.Series(
        label=label,
        x=[number for number, _ in curves[0]],
        y=[estimate.value for estimate in estimates],
        spread=[estimate.std or 0.0 for estimate in estimates],
        style=k % charts.COLOURS,
    )


def figure3(folder: Path) -> dict[str, Figure]:
    """Figure 3: the predictions of five personal models for one test image each, at rounds 0, 1 and 10."""
    path = folder / "figure3.json"
    if not path.exists():
        return {}
    remedy = f"write it again with pfedbayes paper figure3 {path}"
    data: dict[str, Any] = read_json(path, "Figure 3", _check_figure3, remedy)
    panels = []
    for k, round in enumerate(data["rounds"]):
        for client in data["clients"]:
            answer = client["answers"][k]
            groups = [
                charts.Group(
                    label=f"✓ {label}" if label == client["label"] else str(label),
                    values=[probability],
                    spreads=[spread],
                    strong=label == client["label"],
                )
                for label, (probability, spread) in enumerate(
                    zip(answer["probabilities"], answer["spread"], strict=True)
                )
            ]
            title = f"{client['name']}, round {round}"
            description = f"Mean entropy over the client's test images: {answer['entropy']:.2f} nats."
            chart = charts.bar_chart(
                title, {"personal": 0}, groups, value_label="probability", description=description, end=1, compact=True
            )
            panels.append((f"{title}: mean entropy {answer['entropy']:.2f}", chart))
    title = "Figure 3: predictive uncertainty of five clients at rounds " + ", ".join(map(str, data["rounds"]))
    caption = (
        f"pFedBayes on {data['data']}: label probabilities of a client's personal model for one of its test images, "
        f"mean and standard deviation over {data['samples']} weight draws. ✓ marks the true label. Entropy in nats, "
        "mean over the client's test images."
    )
    return {"figure3": Figure(title, charts.grid(title, caption, panels, len(data["clients"])), caption)}


def _check_figure3(content: Any) -> None:
    require_keys(content, {"data": str, "samples": int, "rounds": list, "clients": list}, "it")
    if not content["clients"]:
        raise ValueError("it has no clients")
    for client in content["clients"]:
        require_keys(client, {"name": str, "label": int, "answers": list}, "a client")
        if len(client["answers"]) != len(content["rounds"]):
            raise ValueError("a client has not one answer for each round")
        for answer in client["answers"]:
            require_keys(answer, {"probabilities": list, "spread": list, "entropy": NUMBER}, "an answer")
            if len(answer["probabilities"]) != len(answer["spread"]):
                raise ValueError("an answer has not one spread for each probability")
