"""Images of all kinds become bytes as they are seen; damaged and hostile ones are one clear line."""

import logging
import os
import struct
import zlib

import numpy as np
import pytest

from pfedbayes.data import DataConfig, load_shards, read_inputs
from pfedbayes.data.own.images import read_images
from pfedbayes.errors import UserError

Image = pytest.importorskip("PIL.Image")
GREY, COLOUR = (1, 6, 8), (3, 6, 8)


def read(path, shape):
    return read_images([path], str(path), shape).x[0]


def refused(path, shape=GREY):
    with pytest.raises(UserError) as caught:
        read(path, shape)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


def load(root, **settings):
    return load_shards(DataConfig(name="files", path=str(root), **settings))


def tree(root, save):
    """Save ten images as client/class/k.png."""
    for client in ("east", "west"):
        for label in ("cat", "dog"):
            (root / client / label).mkdir(parents=True)
            for k in range(3):
                save(root / client / label / f"{k}.png", 40 * k + 10 * (label == "dog"))
    return root


@pytest.mark.parametrize(("suffix", "order"), [("png", "<"), ("tiff", "<"), ("tiff", ">")])
def test_sixteen_bits_are_scaled(tmp_path, suffix, order):
    bright = np.arange(48, dtype=np.uint16).reshape(6, 8) * 1394  # up to 65518
    image = Image.frombytes("I;16B" if order == ">" else "I;16", (8, 6), bright.astype(f"{order}u2").tobytes())
    image.save(tmp_path / f"a.{suffix}")
    for shape in (GREY, COLOUR):
        assert (read(tmp_path / f"a.{suffix}", shape) == np.rint(bright / 257)).all()


def test_a_tree_of_sixteen_bits_is_grey_and_not_white(tmp_path):
    def save(path, level):
        Image.fromarray(np.full((6, 8), level * 257, np.uint16)).save(path)

    shards = load(tree(tmp_path / "tree", save))
    assert tuple(shards.x.shape[1:]) == GREY
    assert sorted(shards.x[:, 0, 0, 0].tolist()) == sorted([0, 40, 80, 10, 50, 90] * 2)
    assert read_inputs(tmp_path / "tree" / "east" / "dog", shards.preprocessing)[:, 0, 0, 0].tolist() == [10, 50, 90]


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_without_a_known_range_are_refused(tmp_path, dtype):
    Image.fromarray(np.full((6, 8), 0.5).astype(dtype)).save(tmp_path / "a.tiff")
    assert "save it with 8 or 16 bits per channel" in refused(tmp_path / "a.tiff")

    def save(path, level):
        Image.fromarray(np.full((6, 8), level, dtype)).save(path, "TIFF")

    with pytest.raises(UserError, match="32 bits without a known range"):
        load(tree(tmp_path / "tree", save))


@pytest.mark.parametrize("suffix", ["png", "jpg", "tiff", "webp"])
@pytest.mark.parametrize(("orientation", "corner"), [(1, (0, 0)), (3, (1, 1)), (6, (0, 1)), (8, (1, 0))])
def test_images_are_turned_as_their_orientation_says(tmp_path, suffix, orientation, corner):
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:8, :8] = 255  # above on the left
    path = tmp_path / f"a.{suffix}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"tiffinfo": {0x0112: orientation}} if suffix == "tiff" else {"exif": exif}
    Image.fromarray(pixels).save(path, **options)
    height, width = (32, 16) if orientation in (6, 8) else (16, 32)
    seen = read(path, (3, height, width))
    corners = seen[0][:: height - 1, :: width - 1] > 128
    assert np.argwhere(corners).tolist() == [list(corner)]


def test_the_size_of_a_tree_is_that_of_turned_images(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    root = tree(tmp_path / "tree", lambda path, level: Image.new("L", (8, 6), level).save(path, exif=exif))
    assert tuple(load(root).x.shape[1:]) == (1, 8, 6)


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [("1", "png"), ("L", "png"), ("LA", "png"), ("P", "png"), ("RGB", "png"), ("RGBA", "png"), ("CMYK", "tiff")],
)
def test_white_is_white_in_all_modes(tmp_path, mode, suffix):
    Image.new("RGB", (8, 6), "white").convert(mode).save(tmp_path / f"a.{suffix}")
    for shape in (GREY, COLOUR):
        assert (read(tmp_path / f"a.{suffix}", shape) == 255).all()


def test_the_first_picture_of_an_animation_is_read(tmp_path):
    frames = [Image.new("L", (8, 6), level) for level in (10, 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert (read(tmp_path / "a.gif", GREY) == 10).all()


def png_of(width, height):
    """A PNG file that claims a size and holds nothing."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_000, 20_000, 2**31 - 1])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path, side):
    (tmp_path / "a.png").write_bytes(png_of(side, side))
    assert "has more than 89 million pixels" in refused(tmp_path / "a.png")


def test_a_format_that_starts_a_program_is_not_opened(tmp_path, monkeypatch):
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 6\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "a.png").write_bytes(eps)
    assert "cannot be read as an image" in refused(tmp_path / "a.png")


def test_pipes_and_folders_among_images_are_refused(tmp_path):
    root = tree(tmp_path / "tree", lambda path, level: Image.new("L", (8, 6), level).save(path))
    os.mkfifo(root / "east" / "cat" / "9.png")
    with pytest.raises(UserError, match=r"9\.png cannot be read as an image \(it is not a file\)"):
        load(root)
    (root / "east" / "cat" / "9.png").unlink()
    (root / "east" / "cat" / "9.png").mkdir()
    with pytest.raises(UserError, match=r"9\.png cannot be read as an image"):
        load(root)


def test_a_tree_of_hidden_folders_has_no_images(tmp_path):
    root = tree(tmp_path / "tree", lambda path, level: Image.new("L", (8, 6), level).save(path))
    for client in ("east", "west"):
        (root / client).rename(root / f".{client}")
    with pytest.raises(UserError, match="has no images"):
        load(root)


@pytest.mark.parametrize("name", [b"\xff", b"a\nb", b"\x1b[31m"])
@pytest.mark.parametrize("place", ["client", "class"])
def test_names_that_cannot_be_printed_are_refused(tmp_path, name, place):
    root = tree(tmp_path / "tree", lambda path, level: Image.new("L", (8, 6), level).save(path))
    old = root / "east" if place == "client" else root / "east" / "cat"
    old.rename(old.with_name(os.fsdecode(name)))
    with pytest.raises(UserError, match=f"the {place} .* has control characters or is not valid Unicode"):
        load(root)


def test_details_that_pillow_logs_are_not_printed(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a program that configures no logging
    logging.getLogger("PIL.TiffImagePlugin").error("More samples per pixel than can be decoded")
    assert capsys.readouterr().err == ""


def test_damaged_images_are_never_a_traceback(tmp_path):
    rng = np.random.default_rng(0)
    pixels = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    for suffix in ("png", "jpg", "gif", "bmp", "webp", "tiff"):
        path = tmp_path / f"a.{suffix}"
        pixels.save(path)
        content = path.read_bytes()
        for _ in range(40):
            damaged = bytearray(content)
            for place in rng.integers(0, len(damaged), 3):
                damaged[place] = int(rng.integers(256))
            path.write_bytes(bytes(damaged[: rng.integers(1, len(damaged) + 1)]))
            try:
                read(path, COLOUR)
            except UserError as error:
                assert "\n" not in str(error)  # noqa: PT017
