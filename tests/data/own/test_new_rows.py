"""New rows for models that are trained: what is read, what is kept, what is refused."""

import numpy as np
import pytest
import torch

from pfedbayes.data import Preprocessing, shards_from_tables
from pfedbayes.data.own import csv_files, readers
from pfedbayes.data.own.images import read_classes
from pfedbayes.data.own.new_rows import read_chunks, read_examples
from pfedbayes.errors import UserError

FRAME = {
    "age": np.array([20.0, 40.0, 60.0, np.nan]),
    "sex": np.array(["m", "f", "m", "f"]),
    "outcome": np.array(["ill", "well", "ill", "well"]),
}


@pytest.fixture
def preprocessing():
    return shards_from_tables({"a": FRAME, "b": FRAME}, "outcome", test_fraction=0).preprocessing


def whole(source, preprocessing):
    chunks = list(read_chunks(source, preprocessing))
    return torch.cat([chunk.x for chunk in chunks]), [chunk.kept for chunk in chunks]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_all_kinds_of_tables_say_the_same(tmp_path, preprocessing):
    import pandas

    rows = {"id": ["p1", "p2", "p3"], "age": [20.0, None, 30.5], "sex": ["m", "never", None]}
    frame = pandas.DataFrame(rows)
    frame.to_parquet(tmp_path / "a.parquet")
    write(tmp_path / "a.csv", "id,age,sex\np1,20,m\np2,,never\np3,30.5,\n")
    write(tmp_path / "b.csv", "sex;id;age\nm;p1;20\nnever;p2;\n;p3;30,5\n")
    expected, kept = whole(frame, preprocessing)
    assert expected[1].tolist()[:2] == [0, 1]  # the mean, and that it is missing
    assert expected[1:, 2:].tolist() == [[0, 0, 1], [0, 0, 1]]  # the slot of what is unknown
    for name in ("a.parquet", "a.csv", "b.csv"):
        x, kept = whole(tmp_path / name, preprocessing)
        assert torch.equal(x, expected)
        assert list(np.asarray(kept[-1]["id"])) == ["p1", "p2", "p3"]


def test_columns_that_are_no_inputs_may_hold_anything(tmp_path, preprocessing):
    lines = [f"p{k},{k if k % 2 else 'x'},{20 + k % 50},m,?" for k in range(150)]
    x, (kept,) = whole(write(tmp_path / "a.csv", "\n".join(["id,mixed,age,sex,outcome", *lines])), preprocessing)
    assert len(x) == 150
    assert kept["mixed"][:2] == ("x", "1")


def test_a_new_file_may_have_more_categories_than_training_data_may(tmp_path, preprocessing):
    path = write(tmp_path / "a.csv", "age,sex\n" + "\n".join(f"30,s{k}" for k in range(200)))
    x, _ = whole(path, preprocessing)
    assert x[:, 2:].sum(0).tolist() == [0, 0, 200]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_chunks_are_parts_of_the_whole(tmp_path, preprocessing, monkeypatch, suffix):
    import pandas

    frame = pandas.DataFrame({"age": np.arange(23.0), "sex": ["m", "f", None] * 7 + ["x", "m"]})
    path = tmp_path / f"a.{suffix}"
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    together, _ = whole(path, preprocessing)
    monkeypatch.setattr(csv_files if suffix == "csv" else readers, "CHUNK", 5)
    parts, kept = whole(path, preprocessing)
    assert torch.equal(parts, together)
    assert len(kept) == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("age\n20\n", "lacks the column 'sex'"),
        ("age,sex\nold,m\n", "line 2: the column 'age' is 'old', but the column must hold numbers"),
        ("age,sex\n", "has no rows"),
        ("", "has no header"),
        ("age,sex\n20\n", "line 2 has 1 cells and the header 2"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(tmp_path, preprocessing, text, words):
    with pytest.raises(UserError, match=words):
        whole(write(tmp_path / "a.csv", text), preprocessing)


def test_what_is_no_table_is_refused(tmp_path, preprocessing):
    with pytest.raises(UserError, match="does not exist"):
        whole(tmp_path / "a.csv", preprocessing)
    with pytest.raises(UserError, match="is not a table"):
        whole(write(tmp_path / "a.txt", "age,sex\n1,m\n"), preprocessing)
    with pytest.raises(UserError, match="is not a table"):
        whole(tmp_path, preprocessing)


def test_arrays_need_the_features_that_the_models_take(tmp_path):
    taken = Preprocessing.of_arrays(torch.zeros(1, 3), 2)
    np.savez(tmp_path / "a.npz", x=np.ones((4, 3)), id=np.arange(4))
    x, (kept,) = whole(tmp_path / "a.npz", taken)
    assert torch.equal(x, torch.ones(4, 3))
    assert kept["id"].tolist() == [0, 1, 2, 3]
    for width, words in ((4, "has 4 numbers, but the models take 3"), (2, "lacks the column 'x2'")):
        np.savez(tmp_path / "b.npz", x=np.ones((4, width)))
        with pytest.raises(UserError, match=words):
            whole(tmp_path / "b.npz", taken)


def test_images_come_from_arrays_or_files(tmp_path):
    from PIL import Image

    taken = Preprocessing.of_arrays(torch.zeros(1, 1, 4, 5, dtype=torch.uint8), 2)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 5), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=pixels)
    (tmp_path / "seven").mkdir()
    for k, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "seven" / f"{k}.png")
    from_arrays, _ = whole(tmp_path / "a.npz", taken)
    from_files, (kept,) = whole(tmp_path / "seven", taken)
    assert torch.equal(from_arrays, torch.from_numpy(pixels)[:, None])
    assert torch.equal(from_arrays, from_files)
    assert kept["file"] == ["0.png", "1.png", "2.png"]
    np.savez(tmp_path / "b.npz", x=pixels[:, :, :4])
    with pytest.raises(UserError, match="the models take"):
        whole(tmp_path / "b.npz", taken)
    assert read_classes(tmp_path, (1, 4, 5)).columns["class"].levels == ("seven",)


def test_examples_of_a_client_have_targets(tmp_path, preprocessing):
    path = write(tmp_path / "a.csv", "id,age,sex,outcome\n1,20,m,well\n2,30,f,ill\n")
    x, y = read_examples(path, preprocessing)
    assert (x.shape, y.tolist()) == ((2, 5), [1, 0])
    for text, words in (
        ("age,sex\n20,m\n", "lacks the target column 'outcome'"),
        ("age,sex,outcome\n20,m,\n", "line 2: the target 'outcome' is missing"),
        ("age,sex,outcome\n20,m,dead\n", "'dead', which is not a known class"),
        ("age,sex,outcome\n", "has no rows"),
    ):
        with pytest.raises(UserError, match=words):
            read_examples(write(path, text), preprocessing)


def test_a_number_is_wanted_of_a_regression(tmp_path):
    frame = {"a": np.arange(8.0), "cost": np.linspace(1, 2, 8)}
    numbers = shards_from_tables({"a": frame}, "cost", test_fraction=0).preprocessing
    with pytest.raises(UserError, match="holds text, but the models predict numbers"):
        read_examples(write(tmp_path / "a.csv", "a,cost\n1,dear\n"), numbers)
