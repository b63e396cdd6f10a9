"""Hooks of mkdocs: pages made from code and notebooks, and links that leave the docs folder.

People read the pages of docs/ in the repository too, where `../examples/x.py` is a file. In the site every file that a
page links to gets a page of its own, which shows its text.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import posixpath
import re
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

import pfedbayes
from pfedbayes.methods import METHODS, Method

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads hooks by path
import notebooks

ROOT = Path(__file__).parents[1]
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
}
LANGUAGES = {".py": "python", ".toml": "toml"}
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from code, from notebooks and from files outside docs/."""
    made = {
        "methods.md": methods_page(),
        "api.md": api_page(),
    } | {page: moved(source, page) for source, page in PAGES.items() if source != "README.md"}
    made |= {f"tutorials/{path.stem}.md": tutorial_page(path) for path in notebooks.FOLDER.glob("*.ipynb")}
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    written = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
    for source in sorted({path for page in written for path in left_by(page)}):
        page = File.generated(config, f"source/{source}.md", content=source_page(source))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirect links of pages in docs/ that leave the folder to the pages made for them."""
    if not page.file.abs_src_path:
        return markdown
    return relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def relinked(text: str, source: str, page: str) -> str:
    """Return the text of the repository's file `source` with the links that the site's page `page` needs."""

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        if target.startswith("docs/"):
            home = target.removeprefix("docs/").replace(".ipynb", ".md")
        else:
            home = PAGES.get(target, f"source/{target}.md")
        return f"]({posixpath.relpath(home, posixpath.dirname(page) or '.')}{match[2] or ''})"

    return LINK.sub(replace, text)


def moved(source: str, page: str) -> str:
    """Return a file of the repository as a page of the site."""
    return relinked((ROOT / source).read_text(), source, page)


def tutorial_page(path: Path) -> str:
    """Return a notebook as a page, with a link to the file itself."""
    page = f"tutorials/{path.stem}.md"
    text = relinked(notebooks.to_markdown(notebooks.read(path)), f"docs/{page}", page)
    title, rest = text.split("\n", 1)
    return f"{title}\n\n[Download this notebook]({path.name})\n{rest}"


def left_by(page: Path) -> set[str]:
    """Return the files outside docs/ that a page links to and that have no page yet."""
    links = {(page.parent / match[1]).resolve() for match in LINK.finditer(page.read_text())}
    outside = {link.relative_to(ROOT).as_posix() for link in links if not link.is_relative_to(ROOT / "docs")}
    return {path for path in outside if path not in PAGES}


def source_page(source: str) -> str:
    """Return a page with the text of a file of the repository. Fail where a link leads to no file."""
    path = ROOT / source
    unsearched = "---\nsearch:\n  exclude: true\n---\n\n"
    return f"{unsearched}# {source}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}```\n"


def methods_page() -> str:
    """Return the page of methods: what each one learns, its source, its settings and their defaults."""
    names = "\n".join(
        f"| [`{name}`](#{name}) | {method.about.title} | {method.about.reference} | {models(method)} |"
        for name, method in METHODS.items()
    )
    return (
        "# Methods\n\n"
        "Choose a method with `pfedbayes run --set method.name=NAME` and change its settings with "
        "`--set method.SETTING=VALUE`. This page and the output of `pfedbayes methods` are generated from the classes. "
        "[Contributing](contributing.md#add-a-method) shows how to add a method.\n\n"
        f"| name | method | source | models |\n|---|---|---|---|\n{names}\n\n"
        + "\n".join(method_section(name, method) for name, method in METHODS.items())
    )


def method_section(name: str, method: type[Method]) -> str:
    summary = inspect.getdoc(sys.modules[method.__module__]) or ""
    meanings, types = field_docstrings(method), get_type_hints(method, include_extras=True)
    rows = "".join(
        f"| `{field.name}` | `{json.dumps(field.default)}` | {accepted(types[field.name])} | {meanings[field.name]} |\n"
        for field in dataclasses.fields(method)
    )
    head = "| setting | default | values | meaning |\n|---|---|---|---|\n"
    settings = head + rows if rows else "It has no settings.\n"
    return (
        f"## {method.about.title} {{ #{name} }}\n\n"
        f"{method.about.reference}. Learns {method.about.learns}.\n\n{summary}\n\n"
        f"{inspect.getdoc(method)}\n\n{settings}"
    )


def accepted(hint: Any) -> str:
    """Return the values that a setting accepts, such as: float ≥ 0, < 1."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in get_args(hint))
    if get_origin(hint) in (UnionType, Union):
        return " or ".join(accepted(choice) for choice in get_args(hint))
    if get_origin(hint) is Annotated:
        signs = {"at_least": "≥", "more_than": ">", "at_most": "≤", "less_than": "<"}
        bounds = dataclasses.asdict(hint.__metadata__[0]).items()
        limits = ", ".join(f"{signs[name]} {bound}" for name, bound in bounds if bound is not None)
        return f"{hint.__origin__.__name__} {limits}"
    return "`null`" if hint is NoneType else str(hint.__name__)


def field_docstrings(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a class, on one line."""
    definitions = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    statements = [statement for each in definitions if isinstance(each, ast.ClassDef) for statement in each.body]
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in pairwise(statements)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def models(method: type[Method]) -> str:
    return ", ".join(which for which in ("personal", "shared") if getattr(method.about, which))


def api_page() -> str:
    """Return the page of public names, by the module that defines them."""
    parts = ["# API\n\nThe public names of `import pfedbayes`. Names that begin with an underscore may change.\n"]
    for module, names in pfedbayes._HOME.items():
        parts.append(f"## {module.partition('.')[0].capitalize()}\n")
        parts += [f"::: pfedbayes.{name}\n" for name in names]
    return "\n".join(parts)
