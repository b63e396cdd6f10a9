"""Read folders of images, client/class/image.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfedbayes.data.own.columns import Budget, Table, Texts
from pfedbayes.data.own.readers import optional
from pfedbayes.errors import UserError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
GREY_MODES = ("1", "L", "LA")
CLASS = "class"  # the name of the target


def is_tree(folder: Path) -> bool:
    """Return whether a folder holds images two levels down."""
    return any(path.suffix.lower() in IMAGE_SUFFIXES for path in folder.glob("*/*/*"))


def read_tree(root: Path, size: tuple[int, int] | None) -> dict[str, Table]:
    """Read one table per client folder; all images get the same shape (C, H, W)."""
    clients = {folder.name: _classes(folder) for folder in _folders(root)}
    paths = [path for classes in clients.values() for paths in classes.values() for path in paths]
    shape = _common_shape(paths, size)
    Budget().spend(len(paths) * int(np.prod(shape)), str(root))
    return {client: _of_classes(root / client, classes, shape) for client, classes in clients.items()}


def image_files(path: Path) -> list[Path]:
    """Return an image, or all images of a folder in the order of their names."""
    paths = _images(path) if path.is_dir() else [path]
    if not paths:
        raise UserError(f"{path} has no images: give an image file or a folder with {', '.join(IMAGE_SUFFIXES)}")
    return paths


def read_images(paths: Sequence[Path], where: str, shape: tuple[int, ...]) -> Table:
    """Read images and resize them to a shape (C, H, W)."""
    return _table(where, paths, shape, {})


def read_classes(folder: Path, shape: tuple[int, ...]) -> Table:
    """Read one client's images, class/image.png, and resize them to a shape (C, H, W)."""
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
    return {folder.name: _images(folder) for folder in _folders(client)}


def _open(path: Path) -> Any:
    pillow = optional("PIL.Image", "images", f"reading {path}")
    try:
        return pillow.open(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as an image ({error}): replace or remove it") from None


def _common_shape(paths: Sequence[Path], size: tuple[int, int] | None) -> tuple[int, int, int]:
    """Return (C, H, W): one channel if all images are grey; the given size, or else that of all images."""
    grey, found = True, dict[tuple[int, int], Path]()
    for path in paths:
        with _open(path) as image:
            grey = grey and image.mode in GREY_MODES
            found.setdefault((image.height, image.width), path)
    if size is None and len(found) > 1:
        (one, a), (other, b), *_ = found.items()
        raise UserError(
            f"{a} has {one[0]} x {one[1]} pixels and {b} has {other[0]} x {other[1]}: set one size with "
            "data.image_size=[height, width]"
        )
    return (1 if grey else 3, *(size or next(iter(found))))


def _read(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    channels, height, width = shape
    with _open(path) as image:
        try:
            pixels = image.convert("L" if channels == 1 else "RGB")
        except (OSError, ValueError, SyntaxError) as error:
            raise UserError(f"{path} cannot be read as an image ({error}): replace or remove it") from None
        if pixels.size != (width, height):
            pixels = pixels.resize((width, height))
        array = np.asarray(pixels, dtype=np.uint8)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)
