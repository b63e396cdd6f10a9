"""One's own data from files to shards."""

import csv

import numpy as np
import pytest
import torch

import pfedbayes
from pfedbayes.data import DataConfig, Shards, load_shards, read_inputs, shards_from_tables
from pfedbayes.data.own import columns, readers
from pfedbayes.data.own import loading as own
from pfedbayes.errors import Problems, UserError

CLINICS = {"Nord": 30, "Süd": 20, "西": 11}


def rows_of(clinic, size, seed=0):
    rng = np.random.default_rng([seed, size])
    age, stage = rng.integers(20, 90, size), rng.choice(["I", "II", "III"], size)
    ill = np.where(age + 10 * (stage == "III") + rng.normal(0, 10, size) > 60, "ill", "well")
    return [
        {"age": a if k % 7 else "", "stage": s, "clinic": clinic, "outcome": o, "cost": f"{2.5 * a + 1:.2f}"}
        for k, (a, s, o) in enumerate(zip(age.tolist(), stage.tolist(), ill.tolist(), strict=True))
    ]


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def one_file(tmp_path):
    """Rows of all clinics, mixed."""
    rows = [row for clinic, size in CLINICS.items() for row in rows_of(clinic, size)]
    order = np.random.default_rng(1).permutation(len(rows))
    return write_csv(tmp_path / "clinics.csv", [rows[k] for k in order])


@pytest.fixture
def folder(tmp_path):
    """A file per clinic, without the clinic's column."""
    (tmp_path / "clinics").mkdir()
    for clinic, size in CLINICS.items():
        rows = [{key: value for key, value in row.items() if key != "clinic"} for row in rows_of(clinic, size)]
        write_csv(tmp_path / "clinics" / f"{clinic}.csv", rows)
    (tmp_path / "clinics" / "README").write_text("not data")
    return tmp_path / "clinics"


def load(path, **settings):
    config = {"target": "outcome", "ignore": ("cost",), "validation": 0.2} | settings
    return load_shards(DataConfig(name="files", path=str(path), **config))


def refused(path, **settings):
    with pytest.raises(UserError) as caught:
        load(path, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def problems(path, **settings):
    with pytest.raises(Problems) as caught:
        load(path, **settings)
    return caught.value.problems


def test_a_file_with_a_client_column(one_file):
    shards = load(one_file, client_column="clinic")
    assert shards.names == ("Nord", "Süd", "西")
    assert shards.class_names == ("ill", "well")
    assert shards.x.shape == (61, 2 + 4 + 4)  # age and whether it is missing, stage, pieces of age
    parts = zip(shards.train, shards.validation, shards.test, strict=True)
    assert [sum(map(len, own)) for own in parts] == list(CLINICS.values())
    assert [len(rows) for rows in shards.test] == [6, 4, 2]
    assert [len(rows) for rows in shards.validation] == [5, 3, 2]


def test_a_folder_with_a_file_per_client(folder):
    shards = load(folder)
    assert shards.names == ("Nord", "Süd", "西")
    assert shards.x.shape == (61, 11)


def test_a_folder_with_a_client_column(one_file, tmp_path):
    """Files that are no clients: the same rows cut into files anyhow are the same data."""
    lines = one_file.read_text(encoding="utf-8").splitlines()
    (tmp_path / "parts").mkdir()
    for k, part in enumerate((lines[1:20], lines[20:21], lines[21:])):
        (tmp_path / "parts" / f"{k}.csv").write_text("\n".join([lines[0], *part]), encoding="utf-8")
    whole, parts = load(one_file, client_column="clinic"), load(tmp_path / "parts", client_column="clinic")
    assert whole.fingerprint() == parts.fingerprint()
    assert whole.preprocessing == parts.preprocessing


def test_the_split_is_even_over_labels_and_a_matter_of_the_seed(one_file):
    shards = load(one_file, client_column="clinic")
    for rows in (shards.test, shards.validation):
        share = shards.y[rows[0]].double().mean() - shards.y[shards.train[0]].double().mean()
        assert abs(share) < 0.25
    assert load(one_file, client_column="clinic").fingerprint() == shards.fingerprint()
    assert load(one_file, client_column="clinic", seed=2).fingerprint() != shards.fingerprint()


def test_statistics_come_from_training_rows_alone(one_file):
    shards = load(one_file, client_column="clinic")
    train = shards.x[torch.cat(shards.train)]
    present = train[:, 1] == 0
    assert float(train[present, 0].mean()) == pytest.approx(0, abs=1e-6)
    assert float(train[present, 0].std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert abs(float(shards.x[shards.x[:, 1] == 0, 0].mean())) > 1e-4


def test_regression_is_standardised(one_file):
    shards = load(one_file, client_column="clinic", target="cost", ignore=("outcome",))
    assert shards.num_classes is None
    train = shards.y[torch.cat(shards.train)]
    assert float(train.mean()) == pytest.approx(0, abs=1e-6)
    assert float(train.std(correction=0)) == pytest.approx(1, abs=1e-6)


def test_a_given_split(one_file, tmp_path):
    rows = list(csv.DictReader(one_file.read_text(encoding="utf-8").splitlines()))
    for k, row in enumerate(rows):
        row["part"] = ("train", "Test", "val", "train")[k % 4]
    path = write_csv(tmp_path / "split.csv", rows)
    shards = load(path, client_column="clinic", split_column="part")
    assert sum(map(len, shards.train)) == sum(row["part"] == "train" for row in rows)
    assert sum(map(len, shards.validation)) == sum(row["part"] == "val" for row in rows)
    assert shards.x.shape == (61, 10)
    rows[4]["part"] = "later"
    message = refused(write_csv(path, rows), client_column="clinic", split_column="part")
    assert "line 6" in message
    assert "'later'" in message
    rows[4]["part"] = ""
    assert "missing" in refused(write_csv(path, rows), client_column="clinic", split_column="part")


def test_new_rows_are_read_with_the_preprocessing_of_the_training_data(one_file, tmp_path):
    shards = load(one_file, client_column="clinic")
    again = read_inputs(one_file, shards.preprocessing)  # target, client and ignored columns do not matter
    assert sorted(map(tuple, again.tolist())) == sorted(map(tuple, shards.x.tolist()))
    new = tmp_path / "new.csv"
    new.write_text("stage,age\nIV,\nI,50\n")
    encoded = read_inputs(new, shards.preprocessing)
    assert encoded[0, :6].tolist() == [0, 1, 0, 0, 0, 1]
    for text, words in (
        ("stage\nI\n", "lacks the column 'age'"),
        ("stage,age,height\nI,3,4\n", "has the column 'height'"),
        ("stage,age\nI,old\n", "line 2: the column 'age' is 'old', but the column must hold numbers"),
        ("stage,age\n", "has no rows"),
    ):
        new.write_text(text)
        with pytest.raises(UserError, match=words):
            read_inputs(new, shards.preprocessing)
    with pytest.raises(UserError, match="is not a table"):
        read_inputs(tmp_path, shards.preprocessing)
    with pytest.raises(UserError, match="does not exist"):
        read_inputs(tmp_path / "nothing.csv", shards.preprocessing)


def test_categories_that_look_like_numbers(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("code,c,y\n1,u,0\n2,u,1\n1,v,1\n3,v,0\n")
    shards = load(path, client_column="c", target="y", ignore=(), categories=("code",), test_fraction=0, validation=0)
    assert shards.preprocessing.inputs[0].categories == ("1", "2", "3")
    new = tmp_path / "new.csv"
    new.write_text("code\n3\n7\n")
    assert read_inputs(new, shards.preprocessing).tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target": "outcom", "client_column": "clinic"}, "no column 'outcom': did you mean 'outcome'?"),
        ({"client_column": "hospital"}, "no column 'hospital': it has age, stage, clinic, outcome"),
        ({}, "--client-column"),
        ({"client_column": "clinic", "target": None}, "--target"),
        ({"client_column": "clinic", "split_column": "part"}, "no column 'part'"),
        ({"client_column": "clinic", "categories": ("zip",)}, "no column 'zip'"),
        ({"client_column": "clinic", "task": "regression"}, "holds text"),
    ],
)
def test_a_wrong_question_is_named(one_file, settings, words):
    assert words in refused(one_file, **settings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,c,outcome\n", "has no rows"),
        ("a,c,outcome\n1,u,x\n2,,y\n", "line 3: 'c' is missing"),
        ("a,c,outcome\n1,u,x\n2,v,\n", "line 3: the target 'outcome' is missing"),
        ("a,c,outcome\n1,u,x\n2,v,nan\n", "line 3: the target 'outcome' is missing"),
        ("a,c,outcome\n1,u,x\n2,v,x\n", "is 'x' in every row"),
        ("c,outcome\nu,x\nv,y\n", "no column to predict from"),
        ("a,c,outcome\n1,u,x\n2,v,3\n", "line 3: the column 'outcome' is '3', but the column holds text elsewhere"),
    ],
)
def test_bad_rows_are_named(tmp_path, text, words):
    path = tmp_path / "a.csv"
    path.write_text(text)
    assert words in refused(path, client_column="c", ignore=())


def test_bad_folders_are_named(folder):
    assert "does not exist" in refused(folder / "nowhere")
    assert ["no column 'clinic'" in each for each in problems(folder, client_column="clinic")] == [True] * 3
    (folder / "leer.csv").write_text("age,stage,outcome,cost\n")
    assert "leer has no rows" in refused(folder)
    (folder / "leer.csv").write_text("age,stage,outcome,cost,extra\n1,I,ill,2,3\n")
    assert "leer has the column 'extra'" in refused(folder)
    (folder / "leer.csv").write_text("age,stage,outcome,cost\nold,I,ill,2\n")
    message = refused(folder)
    assert "'age' holds numbers for" in message
    assert "leer" in message
    (folder / "leer.csv").rename(folder / "Nord.tsv")
    assert "two files named 'Nord'" in refused(folder)
    assert "has no known file type" in refused(folder / "README")
    (folder / "empty").mkdir()
    assert "has no data" in refused(folder / "empty")


def test_a_small_client_and_one_of_one_class_simply_work(folder):
    (folder / "einer.csv").write_text("age,stage,outcome,cost\n50,I,ill,2\n")
    (folder / "gesund.csv").write_text("age,stage,outcome,cost\n" + "30,I,well,2\n" * 9)
    shards = load(folder)
    one, well = (shards.names.index(name) for name in ("einer", "gesund"))
    assert (len(shards.train[one]), len(shards.test[one])) == (1, 0)
    assert (len(shards.train[well]), len(shards.test[well])) == (6, 2)


def test_data_that_fit_only_before_they_are_encoded_are_noticed(one_file, monkeypatch):
    def free(path, schema, _, problems):
        return readers.read_table(path, schema, Free(), problems)

    needed = 2 * 4 * 61 * 10
    monkeypatch.setattr(columns, "host_memory", lambda: 2 * needed - 2)
    monkeypatch.setattr(own, "read_table", free)
    assert "do not fit into half of the memory" in refused(one_file, client_column="clinic")
    monkeypatch.setattr(columns, "host_memory", lambda: 2 * needed + 2)
    load(one_file, client_column="clinic")


class Free(columns.Budget):
    def spend(self, count, where):
        pass


def test_npz_in_one_file_and_in_many(tmp_path):
    rng = np.random.default_rng(0)
    x, y, client = rng.normal(size=(40, 3)), rng.integers(0, 3, 40), np.repeat(["a", "b"], 20)
    np.savez(tmp_path / "all.npz", x=x, y=y, client=client.astype("S1"))
    (tmp_path / "each").mkdir()
    for name in ("a", "b"):
        np.savez(tmp_path / "each" / f"{name}.npz", x=x[client == name], y=y[client == name])
    one, many = (load(tmp_path / name, target=None, ignore=()) for name in ("all.npz", "each"))
    assert one.fingerprint() == many.fingerprint()
    assert one.class_names == ("0", "1", "2")
    np.savez(tmp_path / "new.npz", x=x[:5], client=client[:5])
    assert torch.equal(read_inputs(tmp_path / "new.npz", one.preprocessing)[:, :3], read_inputs_rows(x[:5], one))
    np.savez(tmp_path / "new.npz", x=x[:5, :2])
    with pytest.raises(UserError, match="lacks the column 'x2'"):
        read_inputs(tmp_path / "new.npz", one.preprocessing)


def read_inputs_rows(x, shards):
    means = np.array([column.mean for column in shards.preprocessing.inputs])
    deviations = np.array([column.deviation for column in shards.preprocessing.inputs])
    return torch.from_numpy(((x - means) / deviations).astype(np.float32))


def test_npz_of_images(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (12, 1, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(12) % 2, client=np.arange(12) // 4)
    shards = load(tmp_path / "a.npz", target=None, ignore=())
    assert shards.names == ("0", "1", "2")
    assert shards.x.dtype == torch.uint8
    assert sorted(shards.x.flatten(1).tolist()) == sorted(x.reshape(12, -1).tolist())
    np.savez(tmp_path / "new.npz", x=x[:, :, :4])
    with pytest.raises(UserError, match=r"shape \(1, 4, 8\), but the models take \(1, 8, 8\)"):
        read_inputs(tmp_path / "new.npz", shards.preprocessing)


@pytest.fixture
def tree(tmp_path):
    """client/class/image, some of them grey."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for client in ("east", "west"):
        for label, mode in (("cat", "L"), ("dog", "RGB")):
            (tmp_path / "tree" / client / label).mkdir(parents=True)
            for k in range(5):
                shape = (9, 12) if mode == "L" else (9, 12, 3)
                pixels = rng.integers(0, 256, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "tree" / client / label / f"{k}.png")
    return tmp_path / "tree"


def test_trees_of_images(tree):
    from PIL import Image

    shards = load(tree, target=None)
    assert (shards.names, shards.class_names) == (("east", "west"), ("cat", "dog"))
    assert (shards.x.dtype, tuple(shards.x.shape)) == (torch.uint8, (20, 3, 9, 12))
    dog = np.asarray(Image.open(tree / "east" / "dog" / "0.png"))
    assert shards.x[5].numpy().transpose(1, 2, 0).tolist() == dog.tolist()
    assert read_inputs(tree / "east" / "dog", shards.preprocessing).tolist() == shards.x[5:10].tolist()
    assert read_inputs(tree / "east" / "dog" / "0.png", shards.preprocessing).tolist() == shards.x[5:6].tolist()
    assert tuple(load(tree, target=None, image_size=(4, 6)).x.shape) == (20, 3, 4, 6)


def test_bad_trees_are_named(tree):
    from PIL import Image

    assert "leave --target out" in refused(tree)
    assert "leave --client-column out" in refused(tree, target=None, client_column="c")
    Image.new("L", (5, 5)).save(tree / "west" / "cat" / "x.png")
    message = refused(tree, target=None)
    assert "data.image_size" in message
    assert "5 x 5" in message
    (tree / "west" / "cat" / "x.png").write_bytes(b"\x89PNG broken")
    assert "x.png cannot be read as an image" in refused(tree, target=None)
    (tree / "west" / "cat" / "x.png").rename(tree / "west" / "x.png")
    assert "images without a class" in refused(tree, target=None)
    (tree / "west" / "x.png").unlink()
    (tree / "south").mkdir()
    assert "south has no rows" in refused(tree, target=None)


def test_frames_in_memory(folder):
    import pandas as pd

    frames = {path.stem: pd.read_csv(path) for path in sorted(folder.glob("*.csv"))}
    shards = shards_from_tables(frames, "outcome", ignore=["cost"], validation=0.2)
    assert shards.fingerprint() == load(folder).fingerprint()
    assert pfedbayes.shards_from_tables is shards_from_tables


def test_datasets_of_torch():
    class Squares(torch.utils.data.Dataset):
        def __init__(self, size):
            self.size = size

        def __len__(self):
            return self.size

        def __getitem__(self, k):
            return torch.tensor([float(k), k**2]), k % 3

    shards = Shards.from_datasets([Squares(5), Squares(7)], [Squares(2), Squares(3)], names=["a", "b"])
    assert (shards.num_classes, len(shards.train[1]), len(shards.test[1])) == (3, 7, 3)
    assert shards.x[shards.train[1]][6].tolist() == [6, 36]
    with pytest.raises(UserError, match="pairs"):
        Shards.from_datasets([[1, 2, 3]])
