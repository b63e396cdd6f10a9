"""Reading and finding the published data sets."""

import gzip
import lzma
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from published_files import (
    BATCH,
    CACHE,
    SIDE,
    TEST,
    TRAIN,
    cifar_bytes,
    fashion_bytes,
    gzipped,
    md5,
    one_line,
    tar,
    write,
)

from pfedbayes.data import Pool, available, load_published, published
from pfedbayes.errors import UserError

pytestmark = pytest.mark.usefixtures("sandbox")
PUBLISHED = published.SOURCES


class TestMnist:
    def test_counts_types_and_extremes(self, mnist: Pool) -> None:
        assert mnist.x.shape == (70_000, 1, 28, 28)
        assert mnist.x.dtype == torch.uint8
        assert (int(mnist.x.min()), int(mnist.x.max())) == (0, 255)
        assert mnist.y.dtype == torch.int64
        assert mnist.y.bincount().tolist() == [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
        assert (mnist.num_classes, mnist.official_train_count) == (10, 60_000)
        assert mnist.y[:16].tolist() == published.MNIST_FIRST_LABELS

    def test_it_is_the_published_set(self, mnist: Pool) -> None:
        """The four idx files, rebuilt from the pool, have the MD5 sums of the published ones."""
        x, y = mnist.x.numpy(), mnist.y.numpy().astype(np.uint8)
        digests = [
            md5(struct.pack(">IIII", 2051, len(part), 28, 28) + part.tobytes()) for part in (x[:60_000], x[60_000:])
        ] + [md5(struct.pack(">II", 2049, len(part)) + part.tobytes()) for part in (y[:60_000], y[60_000:])]
        assert digests == [
            "6bbc9ace898e44ae57da46a324031adb",
            "2646ac647ad5339dbf082846283269ea",
            "a25bea736e30d166cdddb491f175f624",
            "27ae3e4e09519cfbb04c329615203637",
        ]

    @pytest.mark.parametrize("content", [b"", b"not xz at all"])
    def test_a_damaged_package_is_named(self, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path / "bundled", {"mnist.xz": content})
        monkeypatch.setattr(published.resources, "files", lambda package: tmp_path)
        with pytest.raises(UserError, match="reinstall") as error:
            load_published("mnist")
        one_line(error)

    def test_a_package_with_other_content_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path / "bundled", {"mnist.xz": lzma.compress(bytes(70_000))})
        monkeypatch.setattr(published.resources, "files", lambda package: tmp_path)
        with pytest.raises(UserError, match="damaged: reinstall"):
            load_published("mnist")


class TestFormats:
    @pytest.mark.parametrize("pack", [dict, gzipped], ids=["idx", "idx.gz"])
    def test_idx(self, pack: Callable[[dict[str, bytes]], dict[str, bytes]], tmp_path: Path) -> None:
        files = fashion_bytes()
        pool = load_published("fashion-mnist", write(tmp_path / "d", pack(files)), download=False)
        pixels = b"".join(files[f"{part}-images-idx3-ubyte"][16:] for part in ("train", "t10k"))
        assert pool.x.shape == (TRAIN + TEST, 1, SIDE, SIDE)
        assert pool.x.dtype == torch.uint8
        assert pool.x.numpy().tobytes() == pixels
        assert pool.y.tolist() == [j % 10 for j in range(TRAIN)] + [j % 10 for j in range(TEST)]
        assert (pool.num_classes, pool.official_train_count) == (10, TRAIN)

    @pytest.mark.parametrize("archived", [False, True], ids=["batches", "archive"])
    def test_cifar(self, archived: bool, tmp_path: Path) -> None:
        files = cifar_bytes()
        content = {"cifar-10-binary.tar.gz": tar(files)} if archived else files
        pool = load_published("cifar10", write(tmp_path / "d", content), download=False)
        assert pool.x.shape == (6 * BATCH, 3, 32, 32)
        assert pool.y.tolist() == [j % 10 for j in range(BATCH)] * 6
        assert (pool.num_classes, pool.official_train_count) == (10, 5 * BATCH)
        third = files["data_batch_1.bin"][2 * 3073 : 3 * 3073]
        assert pool.x[2].numpy().tobytes() == third[1:]
        assert pool.x[-1].numpy().tobytes() == files["test_batch.bin"][-3072:]

    def test_archive_members_in_another_order(self, tmp_path: Path) -> None:
        files = cifar_bytes()
        backwards = dict(reversed(files.items()))
        straight = load_published("cifar10", write(tmp_path / "a", files), download=False)
        archived = load_published(
            "cifar10", write(tmp_path / "b", {"cifar-10-binary.tar.gz": tar(backwards)}), download=False
        )
        assert torch.equal(straight.x, archived.x)


def spoil_fashion(name: str, content: bytes) -> dict[str, bytes]:
    return fashion_bytes() | {name: content}


def label_17() -> bytes:
    content = bytearray(fashion_bytes()["train-labels-idx1-ubyte"])
    content[20] = 17
    return bytes(content)


TRAIN_IMAGES = fashion_bytes()["train-images-idx3-ubyte"]
TRAIN_LABELS = fashion_bytes()["train-labels-idx1-ubyte"]


class TestBadFiles:
    @pytest.mark.parametrize(
        ("name", "content", "cause"),
        [
            ("train-images-idx3-ubyte", TRAIN_IMAGES[:-100], f"has {len(TRAIN_IMAGES) - 100} of the"),
            ("train-images-idx3-ubyte", TRAIN_IMAGES + b"\0", "has more than the"),
            ("train-images-idx3-ubyte", b"", "does not begin like"),
            ("train-images-idx3-ubyte", TRAIN_LABELS, "wrong magic number or sizes"),
            ("train-images-idx3-ubyte", b"\0\0\x08\x02" + TRAIN_IMAGES[4:], "wrong magic number or sizes"),
            ("train-labels-idx1-ubyte", struct.pack(">II", 2049, TRAIN + 1) + bytes(TRAIN + 1), "sizes"),
            ("train-labels-idx1-ubyte", label_17(), "has the label 17"),
        ],
        ids=["truncated", "too long", "empty", "other file", "wrong magic", "wrong count", "label 17"],
    )
    def test_idx(self, name: str, content: bytes, cause: str, tmp_path: Path) -> None:
        folder = write(tmp_path / "d", spoil_fashion(name, content))
        with pytest.raises(UserError, match=cause) as error:
            load_published("fashion-mnist", folder)
        assert one_line(error).startswith(str(folder / name))

    @pytest.mark.parametrize(
        "content",
        [b"PK\x03\x04 a zip file", gzip.compress(TRAIN_IMAGES)[:-2000], gzip.compress(b"hello")],
        ids=["not gzip", "truncated", "foreign"],
    )
    def test_gz(self, content: bytes, tmp_path: Path) -> None:
        name = "train-images-idx3-ubyte.gz"
        folder = write(tmp_path / "d", gzipped(fashion_bytes()) | {name: content})
        with pytest.raises(UserError, match="replace it by the published file") as error:
            load_published("fashion-mnist", folder)
        assert one_line(error).startswith(str(folder / name))

    def test_a_gzip_file_with_a_flipped_bit(self, tmp_path: Path) -> None:
        files = gzipped(fashion_bytes())
        content = bytearray(files["train-images-idx3-ubyte.gz"])
        content[len(content) // 2] ^= 1
        with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz"):
            load_published(
                "fashion-mnist", write(tmp_path / "d", files | {"train-images-idx3-ubyte.gz": bytes(content)})
            )

    @pytest.mark.parametrize(
        ("content", "cause"),
        [
            (cifar_bytes()["data_batch_3.bin"][:-1], f"has {BATCH * 3073 - 1} of the {BATCH * 3073} bytes"),
            (b"\x0a" + cifar_bytes()["data_batch_3.bin"][1:], "has the label 10"),
        ],
        ids=["short", "label 10"],
    )
    @pytest.mark.parametrize("archived", [False, True], ids=["batches", "archive"])
    def test_cifar(self, content: bytes, cause: str, archived: bool, tmp_path: Path) -> None:
        files = cifar_bytes() | {"data_batch_3.bin": content}
        folder = write(tmp_path / "d", {"cifar-10-binary.tar.gz": tar(files)} if archived else files)
        with pytest.raises(UserError, match=cause) as error:
            load_published("cifar10", folder)
        assert "data_batch_3.bin" in one_line(error)

    @pytest.mark.parametrize(
        ("content", "cause"),
        [
            (b"not a tar file", "cannot be read"),
            (tar(cifar_bytes())[:-5000], "cannot be read"),
            (tar({"data_batch_1.bin": cifar_bytes()["data_batch_1.bin"]}), "does not contain data_batch_2.bin"),
        ],
        ids=["foreign", "truncated", "incomplete"],
    )
    def test_archive(self, content: bytes, cause: str, tmp_path: Path) -> None:
        folder = write(tmp_path / "d", {"cifar-10-binary.tar.gz": content})
        with pytest.raises(UserError, match=cause) as error:
            load_published("cifar10", folder)
        assert str(folder / "cifar-10-binary.tar.gz") in one_line(error)

    @pytest.mark.parametrize(
        ("name", "files"), [("fashion-mnist", fashion_bytes()), ("cifar10", cifar_bytes())], ids=["idx", "cifar"]
    )
    def test_one_file_missing(self, name: str, files: dict[str, bytes], tmp_path: Path) -> None:
        last = list(files)[-1]
        folder = write(tmp_path / "d", {key: files[key] for key in files if key != last})
        with pytest.raises(UserError, match=f"lacks {last}") as error:
            load_published(name, folder)
        assert one_line(error).startswith(str(folder))
        assert any(f"lacks {last}" in record.how_to_get for record in available(folder))

    def test_digits_in_the_place_of_fashion(self, tmp_path: Path, mnist: Pool) -> None:
        digits = struct.pack(">II", 2049, TRAIN) + bytes(mnist.y[:TRAIN].tolist())
        folder = write(tmp_path / "d", spoil_fashion("train-labels-idx1-ubyte", digits))
        with pytest.raises(UserError, match="holds MNIST, not Fashion-MNIST"):
            load_published("fashion-mnist", folder)

    def test_unknown_name(self) -> None:
        with pytest.raises(UserError, match='unknown data set "imagenet": choose'):
            load_published("imagenet")


class TestSearch:
    def test_the_order_of_places(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each place in turn is emptied, and the next one is found."""
        monkeypatch.setenv("PFEDBAYES_DATA", str(tmp_path / "env"))
        places = [tmp_path / "given", tmp_path / "env", tmp_path / CACHE, tmp_path / "debian"]
        for place in places:
            write(place, fashion_bytes())
        found = []
        for place in places:
            record = next(r for r in available(tmp_path / "given") if r.name == "fashion-mnist")
            assert record.found is not None
            found.append(Path(record.found).resolve())
            for file in place.iterdir():
                file.unlink()
        assert found == places
        assert next(r for r in available() if r.name == "fashion-mnist").found is None

    @pytest.mark.parametrize("subfolder", ["cifar-10-batches-bin", "cifar10", "."])
    def test_cifar_folders(self, subfolder: str, tmp_path: Path) -> None:
        write(tmp_path / "d" / subfolder, cifar_bytes())
        assert len(load_published("cifar10", tmp_path / "d", download=False).x) == 6 * BATCH

    def test_the_folder_of_the_set_comes_before_its_parent(self, tmp_path: Path) -> None:
        write(tmp_path / "d", spoil_fashion("train-labels-idx1-ubyte", b"of another set"))
        write(tmp_path / "d" / "fashion-mnist", fashion_bytes())
        assert len(load_published("fashion-mnist", tmp_path / "d").x) == TRAIN + TEST

    def test_a_data_folder_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="does not exist: correct --data-dir") as error:
            load_published("cifar10", tmp_path / "typo")
        assert "typo" in one_line(error)

    def test_absent_and_not_to_be_downloaded(self, tmp_path: Path) -> None:
        with pytest.raises(UserError) as fashion:
            load_published("fashion-mnist", download=False)
        for way in ("--data-dir or PFEDBAYES_DATA", "Debian's package dataset-fashion-mnist", "the network"):
            assert way in one_line(fashion)
        with pytest.raises(UserError) as cifar:
            load_published("cifar10", download=False)
        for way in ("--data-dir or PFEDBAYES_DATA", str(tmp_path / CACHE / "cifar10"), "the network"):
            assert way in one_line(cifar)

    def test_available(self, tmp_path: Path) -> None:
        write(tmp_path / "d" / "cifar10", cifar_bytes())
        mnist, fashion, cifar = available(tmp_path / "d")
        assert (mnist.name, mnist.images, mnist.found, mnist.how_to_get) == ("mnist", 70_000, "bundled", "")
        assert (fashion.name, fashion.images, fashion.found) == ("fashion-mnist", TRAIN + TEST, None)
        assert "dataset-fashion-mnist" in fashion.how_to_get
        assert (cifar.images, cifar.found) == (6 * BATCH, str(tmp_path / "d" / "cifar10"))


def test_the_published_table() -> None:
    """The real table, which all other tests replace: sizes of the published files, and where each comes from."""
    fashion, cifar = PUBLISHED["fashion-mnist"], PUBLISHED["cifar10"]
    assert {file.name: file.length for file in fashion.files} == {
        "train-images-idx3-ubyte": 47_040_016,
        "train-labels-idx1-ubyte": 60_008,
        "t10k-images-idx3-ubyte": 7_840_016,
        "t10k-labels-idx1-ubyte": 10_008,
    }
    assert [item.file_name for item in fashion.downloads] == [f"{file.name}.gz" for file in fashion.files]
    assert [file.length for file in cifar.files] == [30_730_000] * 6
    assert [item.file_name for item in cifar.downloads] == [cifar.archive]
