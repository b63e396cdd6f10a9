"""Run the examples and write the pages of docs/examples.

    python scripts/write_examples.py             run all examples (minutes), then write their pages
    python scripts/write_examples.py mnist       run this one
    python scripts/write_examples.py schools --schools school.csv
    python scripts/write_examples.py --no-run    write the pages again from the JSON files of earlier runs

docs/examples/NAME.json keeps what a run printed and measured. Pages and figures depend on it alone; a test checks this.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pfedbayes import report, runs
from pfedbayes.files.typed import from_json, to_json
from pfedbayes.report import charts
from pfedbayes.report.charts import Figure

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "scripts" / "pages"
FOLDER = ROOT / "docs" / "examples"
NAMES = ("four_hospitals", "schools", "survival", "mnist")
NOTE = "*`make examples` writes this page from a real run; edit its template in scripts/pages.*"
Story = dict[str, Any]


def tell(name: str, *arguments: str) -> Story:
    """Run an example in an empty folder; return what it printed and the files it wrote."""
    with tempfile.TemporaryDirectory() as empty:
        command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
        environment = os.environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(
            command,
            cwd=empty,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"examples/{name}.py failed:\n{done.stdout}")
        left = Path(empty) / name
        return {
            "output": done.stdout,
            "run": kept(runs.read_run(left / "run")) if (left / "run").exists() else None,
            "tables": {path.stem: head(path) for path in sorted(left.glob("*.csv"))},
        }


def kept(run: runs.Run) -> Story:
    """What the drawings of a run need. Single predictions are left out: they hold the images. So is where data lay."""
    data = run.experiment.data
    path = {"path": Path(data.path).name} if data.path else {}
    config = {name: values | path if name == "data" else values for name, values in run.sections.items()}
    summary = run.summary and dataclasses.replace(run.summary, examples=[])
    whole: Story = rounded(
        {"config": config, "info": to_json(run.info), "rounds": to_json(run.rounds), "summary": to_json(summary)}
    )
    return whole


def run_of(name: str, story: Story) -> runs.Run:
    """The run of a story, without its single predictions."""
    info, summary = from_json(runs.RunInfo, story["info"]), from_json(runs.Summary, story["summary"])
    rounds = [from_json(runs.RoundRecord, record) for record in story["rounds"]]
    return runs.Run(Path(name), story["config"], info, rounds, summary)


def rounded(value: Any) -> Any:
    """Five digits of every number: enough to draw it."""
    match value:
        case float():
            return float(f"{value:.5g}")
        case dict():
            return {key: rounded(each) for key, each in value.items()}
        case list():
            return [rounded(each) for each in value]
        case _:
            return value


def head(path: Path) -> Story:
    """Return the columns of a table, its number of rows, and all rows or the first few."""
    with path.open(newline="") as file:
        columns, *rows = csv.reader(file)
    return {"columns": columns, "count": len(rows), "rows": rows if len(rows) <= 100 else rows[:5]}


def render(name: str, story: Story) -> dict[str, str]:
    """Return the page and the figures, by file name."""
    figures = report.all_figures(run_of(name, story["run"]))
    templates = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, autoescape=False)  # noqa: S701
    page = templates.get_template(f"{name}.md").render(
        note=NOTE,
        commands=commands(story["output"]),
        tables=story["tables"],
        run=story["run"],
        table=table,
        wrap=wrap,
        figure=lambda key: picture(name, key, figures[key]),
        figures=figures,
    )
    drawn = {f"{name}_{key}.svg": charts.standalone(figure.svg) for key, figure in figures.items()}
    return {f"{name}.md": page.rstrip() + "\n", **drawn}


def picture(name: str, key: str, figure: Figure) -> str:
    """Return a figure with its title and caption as Markdown."""
    caption = f"\n\n*{figure.caption}*" if figure.caption else ""
    return f"**{figure.title}**\n\n![{figure.title}]({name}_{key}.svg)" + caption


def table(shown: Story, columns: Sequence[str] | None = None, rows: int = 12) -> str:
    """Return the first rows of a table as Markdown, with all or some of its columns."""
    places = [shown["columns"].index(column) for column in columns or shown["columns"]]
    lines = [[short(row[place]) for place in places] for row in (shown["columns"], *shown["rows"][:rows])]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|---" * len(places) + "|", *body])


def wrap(command: str) -> str:
    """Break a command line that is too long for a page before its options."""
    lines, *rest = command.split(" -")
    for option in rest:
        fits = len(lines.rsplit("\n", 1)[-1]) + len(option) < 86
        lines += f" -{option}" if fits else f" \\\n  -{option}"
    return lines


def short(cell: str) -> str:
    """Shorten a number to four decimals, and keep a bar from ending the cell."""
    is_long = re.fullmatch(r"\d\.\d{5,}|\d+(\.\d+)?e-\d+", cell)
    return f"{float(cell):.4f}" if is_long else cell.replace("|", "\\|")


def commands(output: str) -> list[dict[str, str]]:
    """Split the output at the commands that an example prints before it runs them, and shorten progress."""
    brief = re.sub(r"^(round .*\n)(?:round .*\n){2,}(round .*\n)", r"\1…\n\2", output, flags=re.MULTILINE)
    parts = re.split(r"^\$ (.*)\n", brief, flags=re.MULTILINE)
    texts = ["\n".join(line.rstrip() for line in part.splitlines()).strip("\n") for part in parts]
    return [{"line": line, "output": text} for line, text in zip(["", *texts[1::2]], texts[::2], strict=True)]


def main() -> None:
    """Run the chosen examples and write their pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(NAMES)}; default: all")
    parser.add_argument("--no-run", action="store_true", help="write the pages without running the examples")
    parser.add_argument("--schools", metavar="FILE", type=Path, help="run schools.py with this file; else it is kept")
    arguments = parser.parse_args()
    names = arguments.names or NAMES
    given = {"schools": [str(arguments.schools.resolve())]} if arguments.schools else {}
    run = [] if arguments.no_run else [name for name in names if name != "schools" or given]
    # Run all before anything is written, so that every run records a clean commit.
    told = {name: tell(name, *given.get(name, [])) for name in run}
    for name in names:
        if name in told:
            runs.write_file(FOLDER / f"{name}.json", json.dumps(told[name], ensure_ascii=False) + "\n")
        story = json.loads((FOLDER / f"{name}.json").read_text())
        for file, content in render(name, story).items():
            runs.write_file(FOLDER / file, content)
            print(FOLDER / file)


if __name__ == "__main__":
    main()
