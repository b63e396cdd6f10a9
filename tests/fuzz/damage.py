"""Damage to files: bytes, structure, and what lies at a path instead of a file."""

import hashlib
import json
import os
import random
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from .values import RAW, dumped, mutated

CHECKSUM = re.compile(rb'"checksum":\s*"([0-9a-f]{64})"')
Damage = Callable[[random.Random, Path], str]  # returns what was done


def flip_bits(rng: random.Random, path: Path, most: int = 3) -> str:
    """Flip some bits of a file."""
    content = bytearray(path.read_bytes())
    if not content:
        return write(path, b"\xff", "one byte instead of none")
    wanted = rng.randint(1, most)
    spots = [rng.randrange(len(content)) for _ in range(wanted)]
    for spot in spots:
        content[spot] ^= 1 << rng.randrange(8)
    return write(path, bytes(content), f"bits flipped in bytes {spots}")


def write(path: Path, content: bytes, what: str) -> str:
    """Write a file anew and return what was done."""
    path.write_bytes(content)
    return f"{path.name}: {what}"


def change_bytes(rng: random.Random, path: Path) -> str:
    """Truncate, extend, replace or garble a file."""
    content = path.read_bytes()
    size = len(content)
    cut = rng.randrange(size + 1)
    garbage = rng.randbytes(rng.choice([1, 7, 100]))
    kinds: dict[str, bytes] = {
        "empty": b"",
        f"cut to {cut} of {size} bytes": content[:cut],
        "last byte missing": content[:-1],
        "first bytes missing": content[cut:],
        "garbage at the end": content + garbage,
        f"garbage at byte {cut}": content[:cut] + garbage + content[cut:],
        f"NULs from byte {cut}": content[:cut] + bytes(size - cut),
        "NULs at the end": content + bytes(100),
        "random bytes": rng.randbytes(rng.choice([1, 8, 9, 100, 5000])),
        "twice": content + content,
        "a byte order mark": b"\xef\xbb\xbf" + content,
        "UTF-16": content.decode(errors="replace").encode("utf-16"),
        "Latin-1": b"\xe9" + content,
        "deep": RAW["@open@"].encode(),
        "deep and closed": RAW["@deep-list@"].encode(),
        "JSON: null": b"null",
        "JSON: []": b"[]\n",
        "JSON: {}": b"{}\n",
        "JSON: a number": b"1" * rng.choice([1, 5000]),
        "JSON: a text": b'"x"',
        "TOML": b"a = 1\n",
        "a zip": b"PK\x03\x04" + garbage,
        "a pickle": b"\x80\x04cos\nsystem\n(S'touch canary'\ntR.",
        "a gzip": b"\x1f\x8b\x08\x00" + garbage,
        "a safetensors header that is too long": (2**62).to_bytes(8, "little") + content[8:],
        "a safetensors header of nothing": (2).to_bytes(8, "little") + b"{}",
        "an ELF": b"\x7fELF" + content,
        "CRLF": content.replace(b"\n", b"\r\n"),
        "a blank line": b"\n" + content,
        "lines swapped": b"\n".join(reversed(content.split(b"\n"))),
        "a line twice": content + content.split(b"\n")[0] + b"\n",
    }
    what = rng.choice(list(kinds))
    return write(path, kinds[what], what)


def change_kind(rng: random.Random, path: Path, outside: Path | None = None) -> str:
    """Put something else than a file at a path; outside: what a link leads to."""
    content = path.read_bytes() if path.is_file() else b""
    kinds: dict[str, Callable[[], object]] = {
        "missing": lambda: None,
        "a folder": path.mkdir,
        "a folder with a file": lambda: (path.mkdir(), (path / "x").write_text("x")),
        "a FIFO": lambda: os.mkfifo(path),
        "a link to nothing": lambda: path.symlink_to("nothing"),
        "a link to itself": lambda: path.symlink_to(path.name),
        "a link to /dev/zero": lambda: path.symlink_to("/dev/zero"),
        "a link to /dev/null": lambda: path.symlink_to("/dev/null"),
        "a link to /dev/full": lambda: path.symlink_to("/dev/full"),
        "a link to its folder": lambda: path.symlink_to("."),
        "a socket": lambda: _bind(path),
    }
    if outside is not None:
        kinds["a link outside"] = lambda: path.symlink_to(outside)
        kinds["a link to its own content outside"] = lambda: (outside.write_bytes(content), path.symlink_to(outside))
    what = rng.choice(list(kinds))
    path.unlink(missing_ok=True)
    kinds[what]()
    return f"{path.name} is {what}"


def _bind(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(before)


def change_json(rng: random.Random, path: Path) -> str:
    """Change the structure of a JSON file."""
    tree, what = mutated(rng, json.loads(path.read_text()))
    path.write_bytes(sealed(rng, dumped(tree)) + b"\n")
    return f"{path.name}: {what}"


def change_lines(rng: random.Random, path: Path) -> str:
    """Change the structure of one line of a JSONL file."""
    lines = path.read_bytes().splitlines(keepends=True)
    if not lines:
        return change_bytes(rng, path)
    spot = rng.randrange(len(lines))
    tree, what = mutated(rng, json.loads(lines[spot]))
    lines[spot] = sealed(rng, dumped(tree)) + b"\n"
    path.write_bytes(b"".join(lines))
    return f"{path.name}, line {spot + 1}: {what}"


def change_toml(rng: random.Random, path: Path) -> str:
    """Change the structure of a TOML file."""
    import tomllib

    tree, what = mutated(rng, tomllib.loads(path.read_text()))
    path.write_bytes(toml(tree))
    return f"{path.name}: {what}"


def toml(tree: Any) -> bytes:
    """Return a tree as TOML; what TOML cannot say is left as JSON, which no reader takes."""
    try:
        text = tomli_w.dumps(tree)
    except (TypeError, AttributeError, ValueError):
        text = dumped(tree)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode(errors="surrogatepass")


def change_tensors(rng: random.Random, path: Path) -> str:
    """Change the header of a safetensors file: its metadata, or the types, shapes and places of its tensors."""
    header, body = split_tensors(path.read_bytes())
    metadata = header.get("__metadata__", {})
    texts = [name for name, text in metadata.items() if text[:1] in "{["]
    if texts and rng.random() < 0.7:
        name = rng.choice(texts)
        tree, what = mutated(rng, json.loads(metadata[name]))
        metadata[name] = dumped(tree)
        what = f"metadata {name}: {what}"
    else:
        header, what = mutated(rng, header)
    return write(path, tensors_file(rng, header, body), what)


def split_tensors(content: bytes) -> tuple[Any, bytes]:
    """Return the header of a safetensors file and its numbers."""
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def tensors_file(rng: random.Random, header: Any, body: bytes) -> bytes:
    """Return a safetensors file of a header and its numbers."""
    text = dumped(header).encode(errors="surrogatepass")
    text += b" " * (-len(text) % 8)
    return sealed(rng, len(text).to_bytes(8, "little") + text + body)


def sealed(rng: random.Random, content: str | bytes) -> bytes:
    """Return a file with the checksum that it has to have, as an attacker would; now and then with the old one."""
    content = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    found = CHECKSUM.search(content[:300])
    if found is None or rng.random() < 0.1:
        return content
    start, end = found.span(1)
    before, after = content[:start], content[end:]
    return before + hashlib.sha256(before + b"0" * 64 + after).hexdigest().encode() + after


STRUCTURE: dict[str, Damage] = {
    ".json": change_json, ".jsonl": change_lines, ".toml": change_toml, ".safetensors": change_tensors,
}  # fmt: skip


def change(rng: random.Random, path: Path, outside: Path | None = None) -> str:
    """Damage a file in any way."""
    kind = rng.random()
    structure = STRUCTURE.get(path.suffix)
    if structure and kind < 0.6:
        return structure(rng, path)
    if kind < 0.75:
        return change_kind(rng, path, outside)
    return change_bytes(rng, path) if kind < 0.92 else flip_bits(rng, path)
