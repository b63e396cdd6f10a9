"""The PNG writer, read back by hand."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from pfedbayes.report import png


def chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    """Kind and content of every chunk, with its checksum verified."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    found, at = [], 8
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length) == (zlib.crc32(kind + content),)
        found.append((kind, content))
        at += 12 + length
    return found


@pytest.mark.parametrize(("channels", "colour_type"), [(1, 0), (3, 2)])
def test_pixels_survive_the_round_trip(channels: int, colour_type: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (channels, 5, 7), dtype=np.uint8)
    (_, header), (_, body), (last, _) = chunks(png.encode(pixels.shape, pixels.tobytes()))
    assert struct.unpack(">IIBBBBB", header) == (7, 5, 8, colour_type, 0, 0, 0)
    rows = np.frombuffer(zlib.decompress(body), np.uint8).reshape(5, 1 + 7 * channels)
    assert (rows[:, 0] == 0).all()  # no filter
    np.testing.assert_array_equal(rows[:, 1:].reshape(5, 7, channels).transpose(2, 0, 1), pixels)
    assert last == b"IEND"
