"""Tables that are damaged, made to harm or of odd types: one line, no traceback, no hang."""

import datetime
import decimal
import os
import socket
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pfedbayes.data import DataConfig, load_shards, read_inputs, shards_from_tables
from pfedbayes.data.own import columns, csv_files, readers
from pfedbayes.data.own.columns import Schema, Texts
from pfedbayes.data.own.new_rows import read_chunks
from pfedbayes.data.own.readers import read_table
from pfedbayes.data.own.table_builder import table_of
from pfedbayes.errors import UserError


def refused(path, **kinds):
    with pytest.raises(UserError) as caught:
        read_table(path, Schema(kinds=kinds))
    message = str(caught.value)
    assert "\n" not in message
    assert ": " in message
    return message


def load(path, **settings):
    settings = {"target": "y", "client_column": "c"} | settings
    return load_shards(DataConfig(name="files", path=str(path), **settings))


@pytest.fixture
def fitted():
    table = {"a": [1.0, 2, 3], "b": ["u", "v", "u"], "y": ["n", "m", "n"]}
    return shards_from_tables({"one": table}, "y", test_fraction=0).preprocessing


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".npz"])
def test_pipes_sockets_devices_and_folders_are_not_opened(tmp_path, suffix, fitted):
    pipe, folder, link, plug = (tmp_path / f"{name}{suffix}" for name in ("pipe", "folder", "link", "plug"))
    os.mkfifo(pipe)
    folder.mkdir()
    link.symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(plug))
        for path in (pipe, folder, link, plug):
            assert "cannot be read (" in refused(path)
            with pytest.raises(UserError):
                list(read_chunks(path, fitted))
            with pytest.raises(UserError):
                load(path)


@pytest.mark.parametrize(
    "path", ["x" * 5000, "a/" * 3000, "a\0b.csv", "~nobody-at-all/a.csv", "\udcff.csv", "a\nb.csv"]
)
def test_odd_paths_are_one_line(path, fitted):
    for call in (lambda: load(path), lambda: read_inputs(path, fitted), lambda: list(read_chunks(path, fitted))):
        with pytest.raises(UserError) as caught:
            call()
        assert "\n" not in str(caught.value)
        str(caught.value).encode()


def test_a_loop_of_links_is_one_line(tmp_path):
    (tmp_path / "a.csv").symlink_to(tmp_path / "b.csv")
    (tmp_path / "b.csv").symlink_to(tmp_path / "a.csv")
    with pytest.raises(UserError, match="cannot be opened"):
        load(tmp_path / "a.csv")
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path, client_column=None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a,c,y\n1,u,x\n".encode("utf-16-le"), "has control characters"),
        (b"a,c,y\n1,u,x\0y\n2,v,z\n", "line 2: the text in the column 'y'"),
        (b"a,c,y\n1,u\x1b[31m,x\n2,v,z\n", "the text in the column 'c'"),
        (b"a\x07,c,y\n1,u,x\n", "the column 'a\\x07' has control characters"),
        (b"a,c,y\n1,u," + b"x" * 2000 + b"\n", "has 2,000 characters"),
        (b"a,c,y\n1,u," + b"x" * 200_000 + b"\n", "field larger than field limit"),
        (b"a" * 2000 + b",c,y\n1,u,x\n", "has 2,000 characters"),
        ("ä,c,y\n1,u,".encode() + b"\xff\n", "is not UTF-8"),
        (b"a,c,y\n1,u,\x81\n", "is not UTF-8"),
    ],
)
def test_bytes_that_are_no_table(tmp_path, content, words):
    (tmp_path / "a.csv").write_bytes(content)
    assert words in refused(tmp_path / "a.csv")


def test_a_file_without_line_breaks_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_files, "LONGEST_LINE", 1000)
    (tmp_path / "a.csv").write_text("a,b\n1," + "2" * 2000 + "\n")
    assert "has a line of more than 1,000 characters" in refused(tmp_path / "a.csv")


def test_wide_tables_are_read_fewer_rows_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_files, "CELLS", 6)
    (tmp_path / "a.csv").write_text("a,b,c\n" + "1,2,3\n" * 5)
    assert [len(cells.lines) for cells in csv_files.read_cells(tmp_path / "a.csv")] == [0, 2, 2, 1]


def test_work_is_linear_in_columns(tmp_path, fitted):
    """Count the calls of functions, which do not depend on what else the machine does. A square would make it 100."""
    calls = {}
    for count in (50, 500):
        names = [f"x{k}" for k in range(count)]
        rows = "".join(",".join(["0.5"] * count + [f"{k}.5", "uv"[k % 2]]) + "\n" for k in range(12))
        (tmp_path / "a.csv").write_text(",".join([*names, "y", "c"]) + "\n" + rows)
        seen = []
        sys.setprofile(lambda frame, event, argument, seen=seen: seen.append(event))
        try:
            list(read_chunks(tmp_path / "a.csv", load(tmp_path / "a.csv").preprocessing))
        finally:
            sys.setprofile(None)
        calls[count] = len(seen)
    assert calls[500] < 12 * calls[50]


class Counted(str):
    """A name that counts how often it is compared."""

    compared = 0

    def __eq__(self, other):
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_names_are_looked_up_and_not_searched_for(fitted):
    names = [Counted(f"x{k}") for k in range(300)]
    Counted.compared = 0
    schema = Schema(roles=tuple(names), only=tuple(names), ignore=tuple(names[:100]))
    table_of({name: [1.0, 2.0] for name in names}, "here", schema)
    csv_files.header(Path("a.csv"), names, Schema(), [], [])
    assert Counted.compared < 10 * len(names)


def npz(path, **arrays):
    np.savez(path, **({"x": np.zeros((3, 2)), "y": np.arange(3)} | arrays))
    return path


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": np.array(3)}, "y has a single value"),
        ({"x": np.array(3)}, "no numeric array x"),
        ({"x": np.zeros((3, 0))}, "without any number"),
        ({"x": np.zeros((0, 3)), "y": np.zeros(0)}, "without any number"),
        ({"y": np.array([b"a", b"\xff\xfe", b"c"])}, "cannot be read"),
        ({"y": np.frombuffer(b"\xff" * 24, dtype="<U2")}, "holds what is no text"),
        ({"y": np.array([1 + 2j, 1, 1])}, "has the type complex"),
        ({"y": np.zeros(3, dtype=[("a", "i4")])}, "has the type"),
        ({"y": np.zeros((3, 2))}, "has shape (3, 2)"),
        ({"y": np.array(["a", "b\ud800", "c"])}, "not valid Unicode"),
        ({"x": np.full((3, 1), 1e308)}, "beyond ±1e+30"),
        ({"x": np.full((3, 2, 2), 1e39)}, "beyond ±1e+30"),
        ({"x": np.full((3, 1), np.longdouble("1e400"))}, "is infinite"),
    ],
)
def test_odd_arrays(tmp_path, arrays, words):
    assert words in refused(npz(tmp_path / "a.npz", **arrays))


def test_numbers_of_two_bytes_are_read_without_a_warning(tmp_path):
    table = read_table(npz(tmp_path / "a.npz", x=np.ones((3, 2, 2), dtype=np.float16)), Schema())
    assert table.x.dtype == np.float32


def damaged_npz(path, kind):
    npz(path)
    content = bytearray(path.read_bytes())
    if kind == "encrypted":
        for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            place = content.find(mark)
            while place >= 0:
                content[place + offset] |= 1
                place = content.find(mark, place + 1)
    elif kind == "text":  # the array's header, which is a Python literal
        content[content.index(b"descr")] = 0xFF
    elif kind == "brackets":
        place = content.index(b"{'descr")
        content[place : place + 9] = b"[" * 9
    elif kind == "truncated":
        content = content[: len(content) // 2]
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("kind", ["encrypted", "text", "brackets", "truncated"])
def test_damaged_archives(tmp_path, kind):
    damaged_npz(tmp_path / "a.npz", kind)
    assert "cannot be read as NPZ" in refused(tmp_path / "a.npz")


def test_a_claimed_shape_takes_no_memory(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive, archive.open("x.npy", "w") as member:
        header = {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**4)}
        np.lib.format.write_array_header_1_0(member, header)
        member.write(bytes(80))
    monkeypatch.setattr(np.lib.format, "read_array", None)
    assert "claims the shape (1000000, 10000)" in refused(tmp_path / "a.npz")


def test_members_that_are_no_arrays_are_left_out(tmp_path):
    npz(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("x", "not an array")
        archive.writestr("note.txt", "hello")
    assert list(read_table(tmp_path / "a.npz", Schema()).columns) == ["x0", "x1", "y"]


def write_parquet(path, **arrays):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(arrays), path)
    return path


@pytest.mark.parametrize("cut", [4, 30, 200, -9, -1])
def test_damaged_parquet(tmp_path, cut):
    path = write_parquet(tmp_path / "a.parquet", a=np.arange(100.0), b=["u", "v"] * 50)
    content = path.read_bytes()
    path.write_bytes(content[:cut])
    assert "cannot be read as Parquet" in refused(path)


def test_flipped_bytes_of_parquet_are_never_a_traceback(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", a=np.arange(50.0), b=["some", "words"] * 25)
    content, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(150):
        flipped = bytearray(content)
        for place in rng.integers(0, len(flipped), 2):
            flipped[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bytes(flipped))
        try:
            read_table(path, Schema())
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017


def test_odd_types_of_parquet(tmp_path):
    import pyarrow

    path = tmp_path / "a.parquet"
    for array in (
        pyarrow.array([[1, 2], [3]]),
        pyarrow.array([{"a": 1}, {"a": 2}]),
        pyarrow.array([datetime.time(1, 2), datetime.time(3, 4)]),
        pyarrow.array([[("k", 1)], []], type=pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        pyarrow.array([b"\xff", b"b"]),
    ):
        message = refused(write_parquet(path, odd=array))
        assert "'odd'" in message
    plain = read_table(
        write_parquet(
            path,
            d=pyarrow.array([decimal.Decimal("1.50"), None]),
            n=pyarrow.nulls(2),
            b=pyarrow.array([b"u", b"v"]),
            h=pyarrow.array([1.5, 2.5], pyarrow.float16()),
            s=pyarrow.array(["u", "v"], pyarrow.large_string()),
            i=pyarrow.array([1, 2]).dictionary_encode(),
        ),
        Schema(),
    ).columns
    np.testing.assert_array_equal(plain["d"], [1.5, np.nan])
    assert np.isnan(plain["n"]).all()
    assert plain["h"].tolist() == [1.5, 2.5]
    assert plain["i"].tolist() == [1, 2]
    for name in "bs":
        assert isinstance(plain[name], Texts)
        assert plain[name].levels == ("u", "v")


def test_a_parquet_file_that_claims_too_many_rows_is_left_at_once(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", a=np.zeros(200_000, np.int8))
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(columns, "host_memory", lambda: 2 * 4 * 199_999)
    monkeypatch.setattr(readers, "TableBuilder", lambda *_, **__: pytest.fail("it was read"))
    assert "do not fit into half of the memory" in refused(path)


@pytest.mark.parametrize("value", [[1], {"a": 1}, (1, 2), 1j, datetime.time(1), np.zeros(2)])
def test_objects_in_memory_are_not_categories(value):
    cells = np.empty(2, dtype=object)
    cells[:] = [None, value]
    with pytest.raises(UserError, match=r"'odd' has the type .*: convert it to numbers or text"):
        table_of({"odd": cells}, "the table", Schema())


def test_columns_without_any_value_and_clients_of_one_row_are_fine(tmp_path):
    rows = "".join(f"{k},,{'uv'[k % 2]},{'xy'[k // 2 % 2]}\n" for k in range(12))
    (tmp_path / "a.csv").write_text(f"a,empty,c,y\n{rows}1,,w,x\n")
    shards = load(tmp_path / "a.csv")
    assert shards.names == ("u", "v", "w")
    assert [column.name for column in shards.preprocessing.inputs] == ["a"]
    assert len(read_inputs(tmp_path / "a.csv", shards.preprocessing)) == 13


def test_as_many_categories_as_rows_are_not_all_remembered(tmp_path):
    (tmp_path / "a.csv").write_text("a,c,y\n" + "".join(f"p{k},u,{k % 2}\n" for k in range(100_000)))
    assert len(read_table(tmp_path / "a.csv", Schema()).columns["a"].levels) == 101
    with pytest.raises(UserError, match="more than 1000 different values"):
        load(tmp_path / "a.csv", target="a")
