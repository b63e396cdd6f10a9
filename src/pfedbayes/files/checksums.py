"""A checksum inside every file that is written and read back, to notice damage.

A JSON object begins with the field "checksum", and so do the metadata of a safetensors file. Its value is the SHA-256
digest of the whole content, computed with zeros in its place. Anyone can compute it: it detects damage, not malice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

FIELD = "checksum"
BLANK = "0" * 64
MISMATCH = "its checksum does not match its content"
_OF_JSON = re.compile(rb'\{\s*"checksum":\s*"([0-9a-f]{64})"')
_OF_TENSORS = re.compile(rb'.{8}\{"__metadata__":\s*\{"checksum":\s*"([0-9a-f]{64})"', re.DOTALL)
LONGEST_PREFIX = 256  # the first bytes of a file that hold its checksum

log = logging.getLogger("pfedbayes")


def dump_json(value: Mapping[str, Any], indent: int | None = None) -> str:
    """Return an object as JSON that begins with its checksum and ends with a line break."""
    blank = {FIELD: BLANK} | dict(value) | {FIELD: BLANK}
    return seal(json.dumps(blank, indent=indent, allow_nan=False, ensure_ascii=False)) + "\n"


def seal(text: str) -> str:
    """Return a JSON object, whose first field is a checksum of zeros, with its checksum."""
    return text.replace(BLANK, hashlib.sha256(text.encode()).hexdigest(), 1)


def check_json(content: bytes) -> bool:
    """Return whether a JSON text has a checksum; raise ValueError if it has a wrong one.

    Line breaks of another system, and white space around the text, do not matter.
    """
    plain = content.replace(b"\r\n", b"\n").strip()
    found = _OF_JSON.match(plain)
    return found is not None and _check(found, [plain])


def check_tensors(pieces: Iterable[bytes]) -> bool:
    """Return whether a safetensors file, given in pieces, has a checksum; raise ValueError if it has a wrong one.

    The first piece has at least `LONGEST_PREFIX` bytes, or is the whole file.
    """
    iterator = iter(pieces)
    first = next(iterator, b"")
    found = _OF_TENSORS.match(first)
    return found is not None and _check(found, (piece for group in ([first], iterator) for piece in group))


def _check(found: re.Match[bytes], pieces: Iterable[bytes]) -> bool:
    start, end = found.span(1)
    hashed = hashlib.sha256()
    for number, piece in enumerate(pieces):
        hashed.update(piece if number else piece[:start] + BLANK.encode() + piece[end:])
    if hashed.hexdigest().encode() != found[1]:
        raise ValueError(MISMATCH)
    return True


@cache
def note_unchecked(where: str) -> None:
    """Tell the user, once per file or folder, that its content cannot be checked."""
    log.warning("note: %s was written by an earlier version, without checksums: damage to it is not noticed", where)
