"""Arrays: NPZ files."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ..bases import TINY
from ..damage import change_bytes, change_kind, flip_bits
from ..trials import Trial, Workshop


def arrays(shop: Workshop) -> Trial:
    """An NPZ file whose arrays, names or bytes are bad, to predict or to train on."""
    rng = shop.rng
    path = shop.folder / "bad.npz"
    predict = rng.random() < 0.6
    content = {"x": _array(shop)} if predict else {"x": _array(shop), "y": _labels(shop), "client": _clients(shop)}
    titles = [f"{name}: {array.dtype} {array.shape}" for name, array in content.items()]
    if rng.random() < 0.2:
        titles.append(f"{(gone := rng.choice(list(content)))} is missing")
        del content[gone]
    if rng.random() < 0.2:
        content[rng.choice(["more", "../x", "/abs", "\x1b[31m", "é", "x.npy", " "])] = _array(shop)
    with zipfile.ZipFile(path, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for name, array in content.items():
            archive.writestr(f"{name}.npy", _member(shop, array))
        if rng.random() < 0.1:
            archive.writestr(rng.choice(["notes.txt", "X.npy", "dir/"]), b"x")
    if rng.random() < 0.3:
        titles.append(rng.choice([change_bytes, flip_bits, flip_bits, change_kind, _meddle])(rng, path))
    if predict:
        command = ["predict", str(shop.copy("arrays.safetensors")), "--input", str(path)]
    else:
        command = ["run", *TINY, "--data", str(path), "--set", "training.rounds=1", "--set", "data.validation=0.2"]
        command += rng.choice([["--dry-run"], ["--out", "out"], ["--task", "regression", "--out", "out"]])
    return Trial(", ".join(titles), [command], keep_if_refused=[path])


def _array(shop: Workshop) -> Any:
    rng = shop.rng
    shape = rng.choice(
        [(12, 4)] * 6 + [(), (0,), (0, 4), (12,), (12, 0), (12, 2, 2), (12, 3), (3, 4), (12, 1, 1, 4), (12, 5000)]
    )
    kind = rng.choice(["f4", "f4", "f4", "f8", ">f4", "f2", "g", "u1", "i8", "u8", "?", "c8", "O", "S3", "U3",
        "M8[s]", "V4",
                       [("a", "f4"), ("b", "i4")]])  # fmt: skip
    array = np.zeros(shape, dtype=kind)
    if array.dtype.kind == "f" and array.size:
        array[...] = np.linspace(-1, 1, array.size).reshape(shape)
        array.flat[0] = rng.choice([0.0, 0.0, np.nan, np.inf, -np.inf, 6e4, 1e30 if array.dtype.itemsize > 2 else 1.0])
    return array


def _labels(shop: Workshop) -> Any:
    rng = shop.rng
    return rng.choice([
        np.arange(12) % 3, np.arange(12) % 3, np.arange(12) % 2 == 0, np.zeros(12), np.full(12, np.nan), np.array(1),
        np.array([1e308, -1e308] * 6), np.array(["a", "b", "c"] * 4), np.array([b"\xff"] * 12), np.zeros((12, 2)),
        np.arange(11),
        np.zeros(12, object), np.linspace(0, 1, 12), np.array([1, np.inf] * 6), np.arange(12) - 2**62,
        np.zeros(12, "M8[s]"),
        np.array([2**63] * 12, "u8"), np.arange(12) * 1j,
    ])  # fmt: skip


def _clients(shop: Workshop) -> Any:
    return shop.rng.choice([
        np.arange(12) % 3, np.arange(12) % 3, np.arange(12), np.zeros(12), np.array(["", "a", "../b"] * 4), np.array(3),
        np.array(["a\x1b[31m", "b\n"] * 6), np.array([np.nan] * 12), np.zeros((12, 2)), np.array([b"\xff"] * 12),
        np.arange(12) % 2 == 0, np.array(["\ud800"] * 12), np.arange(12) * 1j,
    ])  # fmt: skip


def _member(shop: Workshop, array: Any) -> bytes:
    """Return an array as .npy, now and then with a header that lies."""
    rng, file = shop.rng, io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), allow_pickle=True)
    content = file.getvalue()
    if rng.random() < 0.1:
        content = rng.choice([
            content[:-3], b"", content[:20], content.replace(b"(12,", b"(99,"), content.replace(b"(12,", b"(10**12,"),
            content.replace(b"(12,", b"(-1,"), content.replace(b"descr", b"desc\xff"),
            content.replace(b"(12", b"(9999999999999"),
            content.replace(b"False", b"print"), content.replace(b"<f4", b"|O1"), content.replace(b"'<", b"'?"),
            b"\x93NUMPY\x09\x00" + content[8:], content.replace(b"{", b"[" * 20),
            content[:8] + b"\xff\xff" + content[10:],
        ])  # fmt: skip
    return content


def _meddle(rng: Any, path: Path) -> str:
    """Set bits of the archive itself that few programs check."""
    content = bytearray(path.read_bytes())
    spot = content.find(b"PK\x01\x02" if rng.random() < 0.5 else b"PK\x03\x04")
    if spot >= 0:
        field = rng.choice([6, 8, 10, 12, 20, 24, 28])
        content[spot + field] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(content))
    return f"an entry of the archive with another field at {spot}"
