"""Tables: CSV, TSV and Parquet."""

import csv
import io
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from ..bases import QUICK, TABLE, TIMES, TINY, patients, rows
from ..damage import change_bytes, change_kind, flip_bits
from ..trials import Command, Trial, Workshop
from ..values import NUMBERS, TEXTS

COLUMNS = ["clinic", "age", "dose", "flag", "level", "outcome"]
PATIENT = ["clinic", "age", "years", "died"]
# The uses of tables with times until an event, by the use of other tables.
OF_TIMES = {"run of times": "run", "join with times": "join", "predict times": "predict"}


def table(shop: Workshop) -> Trial:
    """A table with bad cells, columns or bytes, to predict, to join with, or to train on."""
    rng = shop.rng
    use = rng.choice(["predict"] * 5 + ["export"] * 3 + ["join"] * 2 + ["run"] * 3 + [*OF_TIMES])
    parquet = rng.random() < 0.3
    path = shop.folder / f"bad{'.parquet' if parquet else rng.choice(['.csv', '.csv', '.csv', '.tsv'])}"
    if use == "run" and rng.random() < 0.3:
        path = shop.folder / "bad" / f"north{path.suffix}"
        path.parent.mkdir()
    title = (_parquet if parquet else _csv)(rng, path, use)
    if rng.random() < 0.15:
        title += "; " + rng.choice([change_bytes, flip_bits, change_kind])(rng, path)
    return Trial(title, [_command(shop, path, use)], keep_if_refused=[path])


def _command(shop: Workshop, path: Path, use: str) -> Command:
    rng = shop.rng
    out = ["-o", rng.choice(["out.csv", "out.tsv", "out.parquet", "out.npz"])] if rng.random() < 0.3 else []
    run = str(shop.copy("times" if use in OF_TIMES else "table")) if "run" not in use and use != "export" else ""
    if "predict" in use:
        return ["predict", run, "--client", "north", "--input", str(path), *out]
    if use == "export":
        name = rng.choice(["north.safetensors", "shared.safetensors"])
        return ["predict", str(shop.copy(name)), "--input", str(path), *out]
    if "join" in use:
        joins = [] if rng.random() < 0.5 else ["--client", rng.choice(TEXTS).replace("\x00", "")]
        return ["personalize", run, "--data", str(path), "--steps", "1", "--no-certificate", *joins]
    roles = ["--target", "outcome"] if path.parent != shop.folder else TABLE
    if use == "run of times":
        roles = TIMES if rng.random() < 0.8 else [*TIMES[:2], "--event", rng.choice(["clinic", "years", "age", "x"])]
    elif rng.random() < 0.3:
        roles = ["--target", rng.choice([*COLUMNS, "missing"]), "--client-column", rng.choice([*COLUMNS, "missing"])]
    if use == "run" and rng.random() < 0.25:
        roles += ["--event", rng.choice([*COLUMNS, "missing"])]
        roles[1] = rng.choice(COLUMNS)
    data = str(path if path.parent == shop.folder else path.parent)
    quick = ["--set", "data.validation=0.2", "--set", "training.rounds=1"]
    tiny = QUICK if use == "run of times" else TINY
    return ["run", *tiny, "--data", data, *roles, *quick, *rng.choice([["--dry-run"], ["--out", "out"]])]


def _cells(rng: random.Random, use: str) -> tuple[list[str], list[list[Any]], str]:
    """Return names, rows and what is bad about them."""
    known = (patients if use in OF_TIMES else rows)(rng, rng.choice([0, 1, 12, 12, 12, 40]))
    targets = ("years", "died") if use in OF_TIMES else ("outcome",)
    plain = OF_TIMES.get(use, use)
    without = {"predict": ("clinic", *targets), "export": ("clinic", *targets), "join": ("clinic",)}.get(plain, ())
    names = [name for name in (PATIENT if use in OF_TIMES else COLUMNS) if name not in without]
    body: list[list[Any]] = [[row[name] for name in names] for row in known]
    titles = [rng.choice(CHANGES)(rng, names, body) for _ in range(rng.choice([1, 1, 2, 3]))]
    if rng.random() < 0.1:
        titles.append(_ragged(rng, names, body))
    return names, body, ", ".join(titles)


def _cell(rng: random.Random, names: list[str], body: list[list[Any]]) -> str:
    value = rng.choice([*NUMBERS, *TEXTS])
    if body:
        body[rng.randrange(len(body))][rng.randrange(len(names))] = value
    return f"a cell is {str(value)[:40]!r}"


def _column(rng: random.Random, names: list[str], body: list[list[Any]]) -> str:
    value, spot = rng.choice([*NUMBERS, *TEXTS]), rng.randrange(len(names))
    for row in body:
        row[spot] = value
    return f"all of {names[spot]} is {str(value)[:40]!r}"


def _mixed(rng: random.Random, names: list[str], body: list[list[Any]]) -> str:
    spot = rng.randrange(len(names))
    for row in body:
        row[spot] = rng.choice([*NUMBERS, *TEXTS])
    return f"anything in {names[spot]}"


def _renamed(rng: random.Random, names: list[str], body: list[list[Any]]) -> str:
    spot, new = rng.randrange(len(names)), rng.choice([*TEXTS, *COLUMNS, "label", "p_sick", "checksum"])
    names[spot] = new
    return f"a column called {new[:40]!r}"


def _dropped(rng: random.Random, names: list[str], body: list[list[Any]]) -> str:
    spot = rng.randrange(len(names))
    gone = names.pop(spot)
    for row in body:
        del row[spot]
    if not names:
        names.append("x")
        for row in body:
            row.append(1)
    return f"{gone} is missing"


def _more(rng: random.Random, names: list[str], body: list[list[Any]]) -> str:
    count = rng.choice([1, 1, 1, 500])
    names += [f"more {k}" for k in range(count)]
    for row in body:
        row += [rng.choice([1, "", "x"]) for _ in range(count)]
    return f"{count} columns too many"


def _ragged(rng: random.Random, names: list[str], body: list[list[Any]]) -> str:
    for row in body[: rng.randrange(4)]:
        row[:] = (row * 2)[: rng.randrange(2 * len(row))]
    return "rows of other lengths"


CHANGES = [_cell, _cell, _cell, _column, _column, _mixed, _renamed, _renamed, _dropped, _more]


def _csv(rng: random.Random, path: Path, use: str) -> str:
    names, body, title = _cells(rng, use)
    text = io.StringIO()
    delimiter = "\t" if path.suffix == ".tsv" else rng.choice([",", ",", ",", ";", "|"])
    writer = csv.writer(text, delimiter=delimiter, quoting=rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
    try:
        writer.writerow(names)
        writer.writerows(body)
    except csv.Error:
        text.write("x")
    content = text.getvalue()
    kind = rng.random()
    if kind < 0.05:
        content += '"'
        title += ", an open quote"
    elif kind < 0.08:
        content = content.replace("\n", "\r")
        title += ", old line ends"
    elif kind < 0.1:
        content = content.partition("\n")[2]
        title += ", no header"
    path.write_bytes(content.encode(errors="surrogatepass"))
    return title


KINDS: list[Any] = [
    pyarrow.null(), pyarrow.bool_(), pyarrow.int8(), pyarrow.uint64(), pyarrow.float16(), pyarrow.float32(),
    pyarrow.binary(), pyarrow.large_string(), pyarrow.date32(), pyarrow.timestamp("ns", "UTC"), pyarrow.time64("ns"),
    pyarrow.duration("s"), pyarrow.decimal128(10, 2), pyarrow.list_(pyarrow.int64()),
    pyarrow.struct([("a", pyarrow.int64())]), pyarrow.map_(pyarrow.string(), pyarrow.int64()),
    pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
]  # fmt: skip


def _parquet(rng: random.Random, path: Path, use: str) -> str:
    names, body, title = _cells(rng, use)
    columns = []
    for spot in range(len(names)):
        cells = [row[spot] if spot < len(row) else None for row in body]
        columns.append(_array(cells))
    if rng.random() < 0.5:
        spot, kind = rng.randrange(len(names)), rng.choice(KINDS)
        columns[spot] = _typed(len(body), kind)
        title += f", {names[spot][:40]!r} holds {kind}"
    named = [name.encode(errors="replace").decode() for name in names]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names=named), path)
    return title


def _array(cells: list[Any]) -> Any:
    try:
        return pyarrow.array(cells)
    except (pyarrow.ArrowException, OverflowError, UnicodeError):
        return pyarrow.array([str(cell).encode(errors="replace").decode() for cell in cells])


def _typed(count: int, kind: Any) -> Any:
    values: dict[str, Any] = {"list": [1], "struct": {"a": 1}, "map": [("a", 1)], "dict": "x", "binary": b"\xff",
        "large": "x",
                              "bool": True, "null": None}  # fmt: skip
    name = next((name for name in values if str(kind).startswith(name)), None)
    try:
        return pyarrow.array([values[name] if name else 1] * count, type=kind)
    except (pyarrow.ArrowException, TypeError):
        return pyarrow.nulls(count, kind)
