"""Trees of images."""

import os
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from ..bases import TINY
from ..damage import change_bytes, change_kind, flip_bits
from ..trials import Trial, Workshop
from ..values import TEXTS

MODES = ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I", "I;16", "F"]


def images(shop: Workshop) -> Trial:
    """A tree with a bad image, name or folder, to train on; or a bad image to predict."""
    rng = shop.rng
    if rng.random() < 0.5:
        path = shop.copy("new.png")
        title = _bad_image(rng, path)
        command = ["predict", str(shop.copy("images.safetensors")), "--input", str(path)]
        return Trial(title, [command], keep_if_refused=[path])
    tree = shop.copy("images")
    title = rng.choice([_in_tree, _in_tree, _folders])(rng, tree)
    command = ["run", *TINY, "--data", str(tree), "--set", "training.rounds=1", "--set", "data.validation=0.2"]
    if rng.random() < 0.2:
        size = rng.choice(["[0,0]", "[1,1]", "[4,4]", "[100000,100000]", "[-1,2]", "[4]", "4"])
        command += ["--set", f"data.image_size={size}"]
        title += f", image_size {size}"
    command += rng.choice([["--dry-run"], ["--dry-run"], ["--net", "mlp", "--out", "out"]])
    return Trial(title, [command], keep_if_refused=[tree])


def _in_tree(rng: random.Random, tree: Path) -> str:
    return _bad_image(rng, rng.choice(sorted(tree.rglob("*.png"))))


def _folders(rng: random.Random, tree: Path) -> str:
    name = rng.choice([text for text in TEXTS if "/" not in text and "\x00" not in text and 0 < len(text) < 200
                       and text not in (".", "..") and "\ud800" not in text])  # fmt: skip
    changes: dict[str, Callable[[], object]] = {
        "an empty class": (tree / "north" / "bird").mkdir,
        "an empty client": (tree / "east").mkdir,
        "an image without class": lambda: (tree / "north" / "x.png").write_bytes(b""),
        "a FIFO as an image": lambda: os.mkfifo(tree / "north" / "cat" / "x.png"),
        "a FIFO as a client": lambda: os.mkfifo(tree / "fifo"),
        "a folder as an image": (tree / "north" / "cat" / "x.png").mkdir,
        "a link to itself": lambda: (tree / "north" / "cat" / "x.png").symlink_to("x.png"),
        "a link to the tree": lambda: (tree / "north" / "loop").symlink_to(tree),
        "a device": lambda: (tree / "north" / "cat" / "x.png").symlink_to("/dev/zero"),
        f"a client called {name!r}": lambda: (tree / "north").rename(tree / name),
        f"a class called {name!r}": lambda: (tree / "north" / "cat").rename(tree / "north" / name),
        "one class": lambda: [
            (path / "dog").rename(tree / f"gone-{path.name}") for path in (tree / "north", tree / "south")
        ],
        "a text beside": lambda: (tree / "notes.txt").write_text("x"),
    }
    what = rng.choice(list(changes))
    changes[what]()
    return what


def _bad_image(rng: random.Random, path: Path) -> str:
    kind = rng.random()
    if kind < 0.3:
        return rng.choice([change_bytes, flip_bits, change_kind])(rng, path)
    if kind < 0.5:
        width, height = rng.choice(
            [(0, 0), (1, 1), (20_000, 20_000), (2**31 - 1, 2**31 - 1), (70_000, 1), (0, 8), (8, 8)]
        )
        path.write_bytes(_png(width, height, rng.choice([0, 2, 3, 4, 6, 5, 9]), rng.choice([8, 8, 1, 16, 3])))
        return f"{path.name}: a PNG of {width} x {height} with little in it"
    mode = rng.choice(MODES)
    size = rng.choice([(8, 8), (1, 1), (9, 7), (300, 2)])
    array = np.random.default_rng(rng.randrange(100)).integers(0, 256, (size[1], size[0]), dtype=np.uint8)
    image = Image.fromarray(array)
    image = Image.fromarray(array.astype(np.uint16) * 257) if mode == "I;16" else image.convert(mode)
    suffix = rng.choice(["PNG", "TIFF", "GIF", "JPEG", "BMP", "WEBP"])
    exif = Image.Exif()
    exif[0x0112] = rng.choice([1, 3, 6, 8, 99])
    try:
        image.save(path, suffix, exif=exif)
    except (OSError, KeyError, ValueError):
        image.convert("RGB").save(path, "PNG", exif=exif)
    return f"{path.name}: {suffix} of mode {mode}, {size}"


def _png(width: int, height: int, colour: int, depth: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )
