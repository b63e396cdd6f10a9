"""A folder of results as pages: tables in Markdown, figures in SVG, and one HTML page with all of them."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, FunctionLoader

from pfedbayes import runs
from pfedbayes.paper import figures, findings, provenance, ranks, rate, settings_tables, table1, tuning
from pfedbayes.paper.pages import NOTE, Page, markdown
from pfedbayes.paper.source import STUDIES, Source, read_source
from pfedbayes.report import charts
from pfedbayes.report.charts import Figure
from pfedbayes.report.page import Table, environment

PAGE = "results.html"
THEORY = "theory.json"
ABOUT = (
    "Accuracy in percent, weighted by test images, mean ± standard deviation over seeds. –: not run, or not in the "
    "paper.",
    "The best of rounds 700 to 800 is picked on test data, as in the paper, so it is optimistic.",
)
TERMS = (
    "Personal and shared models are the paper's PM and GM. pFedBayes predicts with one weight draw (one sample), the "
    "average of ten draws, or the mean weights (mean network).",
    "Two-block labels: half of the clients have labels 0 to 4, the others 5 to 9. Sliding labels: five consecutive "
    "labels per client, shifted by one from client to client.",
    "pFedBayes is Algorithm 1 with its own hyper-parameters. Extended pFedBayes replaces steps of it, as the table of "
    "its settings lists; the name follows from the recorded settings of the runs.",
)
ABOUT_TUNING = (
    "Settings are compared on held-out validation data, a fifth of the training data, and never on test data.",
    "For every method, the setting with the best mean over its models, sizes and seeds is chosen "
    "(experiments/tuned.toml); extended pFedBayes and pFedBayes count as one method.",
    "Some settings and seeds were added after Table 1 was known for others.",
)
NOTES_ON_TUNING = (
    "A setting that did not run on all sizes of its data set has no overall score. –: not run.",
    "Rows are named by their settings: pFedBayes is Algorithm 1, extended pFedBayes departs from it.",
)
ABOUT_STUDIES = (
    "Each study is a sweep that changes one thing, to explain a difference between our results and the paper's.",
    "The conclusions are in reasons.md.",
    "Accuracy in percent, mean ± standard deviation over seeds; –: not run.",
)


def write(folder: Path) -> list[Path]:
    """Write all pages and figures that follow from the JSON files in the folder."""
    return _write(folder, render(folder))


def write_theory(folder: Path) -> list[Path]:
    """Write only the page and the figure on the theory, which need no other data."""
    return _write(folder, _files(_theory(folder), {}))


def _write(folder: Path, files: dict[str, str]) -> list[Path]:
    for name, content in files.items():
        runs.write_file(folder / name, content)
    return [folder / name for name in files]


def render(folder: Path) -> dict[str, str]:
    """Return the content of every file, by name."""
    source = read_source(folder)
    pages = _pages(source) | _theory(folder)
    convergence, uncertainty = figures.figure2(source), figures.figure3(folder)
    drawn = convergence | uncertainty
    files = _files(pages, drawn)
    if drawn:
        files["figures.md"] = _gallery(drawn)
    template = _environment().get_template(PAGE)
    files[PAGE] = template.render(
        pages=pages, convergence=list(convergence.values()), uncertainty=list(uncertainty.values())
    )
    return files


def _environment() -> Environment:
    """Return the templates of the user's report, whose style the page shares, and the one of this folder."""

    def load(name: str) -> str | None:
        return resources.files(__package__).joinpath(name).read_text("utf-8") if name == PAGE else None

    shared = environment()
    loaders = [FunctionLoader(load), *filter(None, [shared.loader])]
    return shared.overlay(loader=ChoiceLoader(loaders))


Pages = dict[str, Page]


def _pages(source: Source) -> Pages:
    """Return the pages by the names of their files."""
    pages = {
        "table1": _table1(source),
        "table2": _settings_page(source, "table2", "Table 2: settings of pFedBayes"),
        "table3": _settings_page(source, "table3", "Table 3: settings of the other methods"),
    }
    if source.records["tuning"]:
        shown = [tuning.chosen_table(source), tuning.tuning_table(source), _device_time(source, "tuning")]
        notes = [*NOTES_ON_TUNING, *tuning.untuned_statement(source)]
        pages["tuning"] = Page("How the preset “tuned” was chosen", [*ABOUT_TUNING], shown, notes)
    if studies := tuning.study_tables(source):
        pages["studies"] = Page("Studies: what explains the tables", [*ABOUT_STUDIES], [_overview(source), *studies])
    return pages


def _table1(source: Source) -> Page:
    shown = [
        table1.summary(source),
        table1.departures(source),
        ranks.among_tuned(source),
        table1.beside_paper(source, "paper"),
        table1.beside_paper(source, "tuned"),
        findings.far_from_paper(source),
        findings.differing_ranks(source),
        ranks.behind_tuned(source),
        table1.unpicked(source, "paper", "two-block"),
        table1.unpicked(source, "tuned", "two-block"),
        table1.unpicked(source, "paper", "sliding"),
        provenance.device_time(source, {"Table 1": ["table1"], "all sweeps of this folder": [*source.records]}),
    ]
    notes = [*ABOUT, *TERMS, *findings.details(source), *provenance.statements(source)]
    title = "Table 1: all methods, data sets and sizes"
    return Page(title, findings.lead(source), [table for table in shown if table], notes, opened=3)


def _settings_page(source: Source, name: str, title: str) -> Page:
    noise = settings_tables.weight_noise_statement(source) if name == "table2" else ()
    lead = [*settings_tables.closeness_statement(source, name), *noise, ABOUT[0]]
    shown = [settings_tables.settings_table(source, name), _device_time(source, name)]
    return Page(title, lead, shown, [ABOUT[1]])


def _device_time(source: Source, name: str) -> Table:
    return provenance.device_time(source, {name: [name]})


def _overview(source: Source) -> Table:
    """The studies with their questions."""
    rows = [
        (name, [question.partition(": accuracy")[0], f"experiments/{name}.toml", str(len(_runs(source, name)))])
        for name, question in STUDIES.items()
        if source.records[name]
    ]
    return Table("The studies", ["question", "sweep", "runs"], [("", rows)])


def _runs(source: Source, name: str) -> set[tuple[str, int]]:
    return {(record["cell"], record["seed"]) for record in source.records[name]}


def _theory(folder: Path) -> Pages:
    path = folder / THEORY
    return {path.stem: rate.page(rate.read_records(path))} if path.exists() else {}


def _files(pages: Pages, drawn: dict[str, Figure]) -> dict[str, str]:
    """Return the files of the pages, of the figures in them and of the other figures."""
    files = {f"{name}.md": markdown(page) for name, page in pages.items()}
    all_figures = [drawn, *(table.figures for page in pages.values() for table in page.tables)]
    files |= {f"{name}.svg": charts.standalone(figure.svg) for each in all_figures for name, figure in each.items()}
    return files


def _gallery(drawn: dict[str, Figure]) -> str:
    parts = ["# Figures 2 and 3"]
    for name, figure in drawn.items():
        parts += [f"## {figure.title}", f"![{figure.title}]({name}.svg)", figure.caption]
    return "\n\n".join([*parts, NOTE]) + "\n"
