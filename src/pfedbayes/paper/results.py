"""A folder of results as people read it: tables in Markdown, figures in SVG, and one page with all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pfedbayes import runs
from pfedbayes.methods import METHODS
from pfedbayes.paper import findings, rate, tables
from pfedbayes.paper.tables import Source
from pfedbayes.report import charts
from pfedbayes.report.charts import Figure
from pfedbayes.report.page import Table, environment
from pfedbayes.report.tables import numbers, over_seeds
from pfedbayes.runs.reading import NUMBER, read_json, require_keys
from pfedbayes.sweep.scores import DEFAULT

PAGE = "results.html"
THEORY = "theory.json"
NOTE = "Written by `pfedbayes results` from the JSON beside it; do not edit."
ABOUT = (
    "Accuracy in percent, weighted by test images, mean ± standard deviation over seeds. The best of rounds 700 to 800 "
    "is picked on the test data, as in the paper, and is no unbiased estimate. – : not run, or not in the paper."
)
TERMS = (
    "Personal and shared models are the paper's PM and GM. pFedBayes predicts by one draw of the weights (one sample), "
    "by the average of ten, or by the means of the weights (mean network). Two-block labels: half of the clients have "
    "the labels 0 to 4, the others 5 to 9; sliding: five labels in a row, from client to client by one."
)
ABOUT_TUNING = (
    "A fifth of the training data was held out, and settings are compared on it alone, never on test data; some of "
    "them, and more seeds, were added when Table 1 was known for others. Of every method the setting with the best "
    "mean over its models, sizes and seeds is taken: experiments/tuned.toml; a setting that was not run on all of them "
    "has no overall score. – : not run."
)
ABOUT_STUDIES = (
    "Accuracy in percent, mean ± standard deviation over seeds; – : not run. Each table is a sweep of that name in the "
    "folder experiments; its cells that have not been run are not in the table. What follows is in reasons.md."
)


def write(folder: Path) -> list[Path]:
    """Write all files that follow from the data in the folder."""
    return _write(folder, render(folder))


def write_theory(folder: Path) -> list[Path]:
    """Write the page and the figure of the theory alone, which need no other data."""
    return _write(folder, _files(_theory(folder), {}))


def _write(folder: Path, files: dict[str, str]) -> list[Path]:
    for name, content in files.items():
        runs.write_file(folder / name, content)
    return [folder / name for name in files]


def render(folder: Path) -> dict[str, str]:
    """The content of every file, by name."""
    source = tables.read(folder)
    pages = _pages(source) | _theory(folder)
    convergence, uncertainty = _convergence(source), _uncertainty(folder)
    figures = convergence | uncertainty
    files = _files(pages, figures)
    if figures:
        files["figures.md"] = _gallery(figures)
    files[PAGE] = (
        environment()
        .get_template("results.html")
        .render(
            pages=pages,
            convergence=list(convergence.values()),
            uncertainty=list(uncertainty.values()),
        )
    )
    return files


Pages = dict[str, tuple[str, list[str], list[Table]]]  # by name: title, sentences, tables


def _pages(source: Source) -> Pages:
    first = [
        tables.beside_paper(source, "paper"),
        tables.beside_paper(source, "tuned"),
        findings.far_from_paper(source),
        tables.honest(source, "paper", "two-block"),
        tables.honest(source, "tuned", "two-block"),
        tables.honest(source, "paper", "sliding"),
    ]
    pages: Pages = {
        "table1": ("Table 1: all methods, data sets and sizes", [ABOUT, TERMS, *findings.remarks(source)], first)
    }
    for name, title in (("table2", "Table 2: settings of pFedBayes"), ("table3", "Table 3: settings of the others")):
        noise = tables.noise_of_the_paper(source) if name == "table2" else ()
        notes = [ABOUT, *noise, *findings.device_time(source, name)]
        pages[name] = (title, notes, [tables.settings_table(source, name)])
    if source.records["tuning"]:
        notes = [ABOUT_TUNING, *findings.device_time(source, "tuning")]
        pages["tuning"] = ("How the preset “tuned” was chosen", notes, [tables.tuning_table(source)])
    if studies := tables.study_tables(source):
        pages["studies"] = ("Studies: what explains the tables", [ABOUT_STUDIES], studies)
    return pages


def _theory(folder: Path) -> Pages:
    path = folder / THEORY
    return {path.stem: rate.page(rate.read(path))} if path.exists() else {}


def _files(pages: Pages, figures: dict[str, Figure]) -> dict[str, str]:
    """The files of the pages, of the figures in them and of other figures."""
    files = {f"{name}.md": _markdown(*page) for name, page in pages.items()}
    drawn = [figures, *(table.figures for _, _, shown in pages.values() for table in shown)]
    files |= {f"{name}.svg": charts.standalone(figure.svg) for each in drawn for name, figure in each.items()}
    return files


def _markdown(title: str, notes: list[str], shown: list[Table]) -> str:
    parts = [f"# {title}", NOTE, *notes]
    for table in shown:
        parts += [f"## {table.caption}", *table.notes]
        for name, figure in table.figures.items():
            # What stands for a picture is no heading.
            parts.append(f"![{figure.title[0].lower()}{figure.title[1:]}]({name}.svg)")
        for block, rows in table.blocks:
            lines = [
                f"| {' | '.join(['', *table.heads])} |",
                f"|{'---|' * (len(table.heads) + 1)}",
                *(f"| {' | '.join([head, *cells])} |" for head, cells in rows),
            ]
            parts += [f"### {block}", "\n".join(lines)] if block else ["\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _gallery(figures: dict[str, Figure]) -> str:
    parts = ["# Figures 2 and 3", NOTE]
    for name, figure in figures.items():
        parts += [f"## {figure.title}", f"![{figure.title}]({name}.svg)", figure.caption]
    return "\n\n".join(parts) + "\n"


def _convergence(source: Source) -> dict[str, Figure]:
    """Figure 2: accuracy over the rounds on MNIST, of the personal model where a method has one."""
    figures = {}
    for size in tables.SIZES:
        series = []
        for k, method in enumerate(tables.METHODS_OF_THE_PAPER):
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
    """How pFedBayes comes to its end."""
    own = next((line for line in series if line.label.startswith(METHODS["pfedbayes"].about.title)), None)
    if own is None:
        return ""
    peak = max(range(len(own.y)), key=own.y.__getitem__)
    place = 1 + sum(line.y[-1] > own.y[-1] for line in series)
    return (
        f" {own.label}, by ten samples: {own.y[peak]:.2f} at round {own.x[peak]:g}, its best, and {own.y[-1]:.2f} at "
        f"round {own.x[-1]:g}, there in place {place} of {len(series)}."
    )


def _series(label: str, curves: list[list[list[float]]], k: int) -> charts.Series:
    """The mean over seeds of curves of (round, accuracy)."""
    values = numbers([[accuracy for _, accuracy in curve] for curve in curves])
    estimates = [over_seeds(column) for column in values.T]
    return charts.Series(
        label=label,
        x=[number for number, _ in curves[0]],
        y=[estimate.value for estimate in estimates],
        spread=[estimate.std or 0.0 for estimate in estimates],
        style=k % charts.COLOURS,
    )


def _uncertainty(folder: Path) -> dict[str, Figure]:
    """Figure 3: what the personal models of five clients say of one image each, as training goes on."""
    path = folder / "figure3.json"
    if not path.exists():
        return {}
    remedy = f"write it again by pfedbayes figure3 {path}"
    data: dict[str, Any] = read_json(path, "Figure 3", _check_uncertainty, remedy)
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
            description = f"Mean entropy over its test images {answer['entropy']:.2f} nats."
            chart = charts.bar_chart(
                title, {"personal": 0}, groups, value_label="probability", description=description, end=1, compact=True
            )
            panels.append((f"{title}: mean entropy {answer['entropy']:.2f}", chart))
    title = "Figure 3: predictive uncertainty of five clients at rounds " + ", ".join(map(str, data["rounds"]))
    caption = (
        f"pFedBayes on {data['data']}: the probabilities that a client's personal model gives to the labels of one of "
        f"its test images, mean and standard deviation over {data['samples']} draws of the weights; ✓ marks the truth. "
        "Entropy in nats, mean over the client's test images."
    )
    return {"figure3": Figure(title, charts.grid(title, caption, panels, len(data["clients"])), caption)}


def _check_uncertainty(content: Any) -> None:
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
