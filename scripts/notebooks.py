"""Run the tutorial notebooks and turn them into pages, without Jupyter.

    python scripts/notebooks.py                     run all notebooks and store what they print
    python scripts/notebooks.py compare_methods     run one of them

A notebook is JSON. Its code cells run in order in one namespace, as in Jupyter: a cell that starts with `!` is a shell
command, and the value of a last expression is shown.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
Cell = dict[str, Any]


def read(path: Path) -> dict[str, Any]:
    """Return a notebook as the dictionary that its file holds."""
    notebook: dict[str, Any] = json.loads(path.read_text())
    return notebook


def execute(notebook: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run all code cells inside `folder`, store their outputs in the notebook, and return the namespace."""
    names: dict[str, Any] = {"__name__": "notebook"}
    with contextlib.chdir(folder):
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for count, cell in enumerate(cells, start=1):
            cell["execution_count"] = count
            cell["outputs"] = run_shell(source(cell)) if is_shell(cell) else run_python(source(cell), names, count)
    return names


def source(cell: Cell) -> str:
    """Return the text of a cell."""
    return "".join(cell["source"])


def is_shell(cell: Cell) -> bool:
    """Whether a code cell holds shell commands."""
    return source(cell).startswith("!")


def shell_text(cell: Cell) -> str:
    """Return the shell commands of a cell, without the leading exclamation marks."""
    return "\n".join(line.removeprefix("!") for line in source(cell).splitlines())


def run_shell(text: str) -> list[Cell]:
    """Run shell commands and return what they print. Raise where one fails."""
    commands = "\n".join(line.removeprefix("!") for line in text.splitlines())
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        ["sh", "-e", "-c", commands],
        env=os.environ | {"PATH": scripts, "COLUMNS": "88"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{commands}\nended with exit code {done.returncode}:\n{done.stdout}")
    return stream(done.stdout)


def run_python(text: str, names: dict[str, Any], count: int) -> list[Cell]:
    """Run Python in the namespace `names`; return what it prints and the value of a last expression."""
    tree = ast.parse(text)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    value = None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)  # noqa: S102
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # noqa: S307
    shown = [] if value is None else [result(value, count)]
    return stream(printed.getvalue()) + shown


def stream(text: str) -> list[Cell]:
    """Return printed text as the outputs of a cell."""
    lines = [line.rstrip() + "\n" for line in text.strip("\n").splitlines()]
    return [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []


def result(value: object, count: int) -> Cell:
    """Return a value as Jupyter shows it: as a picture where it draws itself, else as text."""
    data = {"text/plain": [repr(value)]}
    if hasattr(value, "_repr_svg_"):
        data = {"image/svg+xml": value._repr_svg_().splitlines(keepends=True), "text/plain": ["a picture"]}
    return {"output_type": "execute_result", "execution_count": count, "data": data, "metadata": {}}


def to_markdown(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown: text, code and outputs."""
    parts = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(source(cell))
            continue
        parts.append(fenced("sh", shell_text(cell)) if is_shell(cell) else fenced("python", source(cell)))
        parts += [output_markdown(output) for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def output_markdown(output: Cell) -> str:
    """Return one output of a cell as Markdown."""
    if output["output_type"] == "stream":
        return fenced("text", "".join(output["text"]).rstrip("\n"))
    if svg := "".join(output["data"].get("image/svg+xml", [])):
        return f'<img class="picture" alt="" src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}">'
    return fenced("text", "".join(output["data"]["text/plain"]))


def fenced(language: str, text: str) -> str:
    """Return text as a fenced block."""
    return f"```{language}\n{text}\n```"


def main(names: list[str]) -> None:
    """Run notebooks in empty folders and store their outputs."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = read(path)
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
