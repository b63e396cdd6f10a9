"""What mkdocs cannot do by itself: pages made from the code, and links that leave the docs folder.

A page of docs/ is read in the repository too, where `../examples/x.py` is a file beside it. In the site such a file is
a page of its own, with its text on it.
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

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

import pfedbayes
from pfedbayes.methods import METHODS, Method

ROOT = Path(__file__).parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
LANGUAGES = {".py": "python", ".toml": "toml"}
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code and from files outside docs/."""
    made = {
        "methods.md": methods_page(),
        "api.md": api_page(),
        "contributing.md": moved("CONTRIBUTING.md", "contributing.md"),
        "changelog.md": moved("CHANGELOG.md", "changelog.md"),
    }
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    written = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for source in sorted({path for page in written for path in left_by(page)}):
        page = File.generated(config, f"source/{source}.md", content=source_page(source))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of pages in docs/ that leave the folder to the pages made for them."""
    if not page.file.abs_src_path:
        return markdown
    return relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def relinked(text: str, source: str, page: str) -> str:
    """The text of the file `source` of the repository, with links as the page `page` of the site needs them."""

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        home = target.removeprefix("docs/") if target.startswith("docs/") else PAGES.get(target)
        if home is None:
            home = f"source/{target}.md"
        return f"]({posixpath.relpath(home, posixpath.dirname(page) or '.')}{match[2] or ''})"

    return LINK.sub(replace, text)


def moved(source: str, page: str) -> str:
    """A file of the repository as a page of the site."""
    return relinked((ROOT / source).read_text(), source, page)


def left_by(page: Path) -> set[str]:
    """Files outside docs/ that a page links to and that are not pages already."""
    links = {(page.parent / match[1]).resolve() for match in LINK.finditer(page.read_text())}
    outside = {link.relative_to(ROOT).as_posix() for link in links if not link.is_relative_to(ROOT / "docs")}
    return {path for path in outside if path not in PAGES}


def source_page(source: str) -> str:
    """The text of a file of the repository; a link to a file that is not there fails here."""
    path = ROOT / source
    unsearched = "---\nsearch:\n  exclude: true\n---\n\n"
    return f"{unsearched}# {source}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}```\n"


def methods_page() -> str:
    """What each method learns, where it comes from, its settings and their defaults, as the classes say."""
    names = "\n".join(
        f"| [`{name}`](#{name}) | {method.about.title} | {method.about.reference} | {models(method)} |"
        for name, method in METHODS.items()
    )
    return (
        "# Methods\n\n"
        "Choose one by `pfedbayes run --set method.name=NAME`, and its settings by `--set method.SETTING=VALUE`. This "
        "page is made from the classes themselves, as is the table that `pfedbayes methods` prints; "
        "[Contributing](contributing.md#add-a-method) shows how to add one.\n\n"
        f"| name | method | from | models |\n|---|---|---|---|\n{names}\n\n"
        + "\n".join(method_section(name, method) for name, method in METHODS.items())
    )


def method_section(name: str, method: type[Method]) -> str:
    summary = inspect.getdoc(sys.modules[method.__module__]) or ""
    meanings = field_docstrings(method)
    rows = "".join(
        f"| `{field.name}` | `{json.dumps(field.default)}` | `{field.type}` | {meanings[field.name]} |\n"
        for field in dataclasses.fields(method)
    )
    settings = f"| setting | default | type | meaning |\n|---|---|---|---|\n{rows}" if rows else "It has no settings.\n"
    return (
        f"## {method.about.title} {{ #{name} }}\n\n"
        f"{method.about.reference}. Learns {method.about.learns}.\n\n{summary}\n\n"
        f"{inspect.getdoc(method)}\n\n{settings}"
    )


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
    """The public names of the package, by the module that they come from."""
    parts = ["# API\n\nThe names that `import pfedbayes` gives. What begins with an underscore may change.\n"]
    for module, names in pfedbayes._HOME.items():
        parts.append(f"## {module.capitalize()}\n")
        parts += [f"::: pfedbayes.{name}\n" for name in names]
    return "\n".join(parts)
