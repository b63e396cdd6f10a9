"""Read folders of images, client/class/image.png."""

from __future__ import annotations

import contextlib
import logging
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedbayes.data.own.columns import Budget, Table, Texts, require_name
from pfedbayes.data.own.readers import reading
from pfedbayes.data.own.sheets import optional
from pfedbayes.errors import UserError, one_line
from pfedbayes.files.reading import open_regular

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")  # whatever a file is called; others may start programs
SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
GREY_MODES = ("1", "L", "LA", "La", *SIXTEEN_BIT_MODES)
UNSCALED_MODES = ("I", "F")  # 32-bit pixels, of which no range is known
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)  # the EXIF field, and its values that swap height and width
# What Pillow's decoders raise for damaged files.
DAMAGED = (
    OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, MemoryError,
    NotImplementedError, struct.error, zlib.error,
)  # fmt: skip
CLASS = "class"  # the name of the target

# Pillow logs details of damaged files, which Python prints if nobody handles them. Our own message is enough.
logging.getLogger("PIL").addHandler(logging.NullHandler())


def is_tree(folder: Path) -> bool:
    """Return whether a folder holds images two levels down."""
    with reading(folder):
        return any(path.suffix.lower() in IMAGE_SUFFIXES for path in folder.glob("*/*/*"))


def read_tree(root: Path, size: tuple[int, int] | None) -> dict[str, Table]:
    """Read one table per client folder; all images get the same shape (C, H, W)."""
    with reading(root):
        clients = {folder.name: _classes(folder) for folder in _folders(root)}
    paths = [path for classes in clients.values() for paths in classes.values() for path in paths]
    if not paths:
        raise UserError(f"{root} has no images: put them there as client/class/, in folders that are not hidden")
    shape = _common_shape(paths, size)
    Budget().spend(len(paths) * int(np.prod(shape)), str(root))
    return {client: _of_classes(root / client, classes, shape) for client, classes in clients.items()}


def image_files(path: Path) -> list[Path]:
    """Return an image, or all images of a folder in the order of their names."""
    with reading(path):
        paths = _images(path) if path.is_dir() else [path]
    if not paths:
        raise UserError(f"{path} has no images: give an image file or a folder with {', '.join(IMAGE_SUFFIXES)}")
    return paths


def read_images(paths: Sequence[Path], where: str, shape: tuple[int, ...]) -> Table:
    """Read images and resize them to a shape (C, H, W)."""
    return _table(where, paths, shape, {})


def read_classes(folder: Path, shape: tuple[int, ...]) -> Table:
    """Read one client's images, class/image.png, and resize them to a shape (C, H, W)."""
    with reading(folder):
        classes = _classes(folder)
    if not any(classes.values()):
        raise UserError(f"{folder} has no images: move them into {folder}/CLASS/")
    return _of_classes(folder, classes, shape)


def _of_classes(folder: Path, classes: dict[str, list[Path]], shape: tuple[int, ...]) -> Table:
    paths = [path for own in classes.values() for path in own]
    codes = np.repeat(np.arange(len(classes), dtype=np.int32), [len(own) for own in classes.values()])
    return _table(str(folder), paths, shape, {CLASS: Texts(codes, tuple(classes))})


def _table(where: str, paths: Sequence[Path], shape: tuple[int, ...], columns: dict[str, Any]) -> Table:
    x = np.empty((len(paths), *shape), dtype=np.uint8)
    for k, path in enumerate(paths):
        x[k] = _read(path, shape)
    return Table(where, columns, np.arange(len(paths)), x, unit="image")


def _folders(path: Path) -> list[Path]:
    return sorted(folder for folder in path.iterdir() if folder.is_dir() and folder.name[0] != ".")


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES and path.name[0] != ".")


def _classes(client: Path) -> dict[str, list[Path]]:
    if _images(client):
        raise UserError(f"{client} has images without a class: move them into {client}/CLASS/")
    classes = {folder.name: _images(folder) for folder in _folders(client)}
    for name in classes:
        require_name(name, str(client), "the class")
    return classes


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open an image. Errors inside the block mean that the image is damaged."""
    pillow = optional("PIL.Image", "images", f"reading {path}")
    try:
        with warnings.catch_warnings(), open_regular(path) as file:
            warnings.simplefilter("ignore")  # about damaged metadata
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with pillow.open(file, formats=FORMATS) as image:
                if image.mode in UNSCALED_MODES:
                    raise UserError(
                        f"{path} has pixels of 32 bits without a known range (mode {image.mode}): save it with 8 or 16 "
                        "bits per channel"
                    )
                yield image
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        most = f"{pillow.MAX_IMAGE_PIXELS / 1e6:.0f} million"
        raise UserError(f"{path} has more than {most} pixels: make it smaller or remove it") from None
    except DAMAGED as error:
        reason = one_line(getattr(error, "strerror", None) or str(error) or type(error).__name__)
        raise UserError(f"{path} cannot be read as an image ({reason}): replace or remove it") from None


def _common_shape(paths: Sequence[Path], size: tuple[int, int] | None) -> tuple[int, int, int]:
    """Return (C, H, W): one channel if all images are grey; the given size, or else that of all images."""
    grey, found = True, dict[tuple[int, int], Path]()
    for path in paths:
        with _opened(path) as image:
            grey = grey and image.mode in GREY_MODES
            found.setdefault(_size(image), path)
    if size is None and len(found) > 1:
        (one, a), (other, b), *_ = found.items()
        raise UserError(
            f"{a} has {one[0]} x {one[1]} pixels and {b} has {other[0]} x {other[1]}: set one size with "
            "data.image_size=[height, width]"
        )
    return (1 if grey else 3, *(size or next(iter(found))))


def _size(image: Any) -> tuple[int, int]:
    """Return height and width as they are seen, turned as the EXIF orientation says."""
    if image.getexif().get(ORIENTATION) in TURNED:  # decode it: Pillow turns some formats by itself
        image = optional("PIL.ImageOps", "images", "reading images").exif_transpose(image)
    return image.height, image.width


def _read(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    channels, height, width = shape
    pillow, operations = (optional(name, "images", f"reading {path}") for name in ("PIL.Image", "PIL.ImageOps"))
    with _opened(path) as image:
        pixels = operations.exif_transpose(image)
        if pixels.mode in SIXTEEN_BIT_MODES:  # Pillow would cut values above 255 off; 257 = 65535 / 255
            pixels = pillow.fromarray(((np.asarray(pixels).astype(np.uint32) + 128) // 257).astype(np.uint8))
        pixels = pixels.convert("L" if channels == 1 else "RGB")
        if pixels.size != (width, height):
            pixels = pixels.resize((width, height))
        array = np.asarray(pixels, dtype=np.uint8)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)
