"""A minimal PNG writer, for images inside the page."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np

CHANNELS = (1, 3)  # greyscale and RGB


def encode(shape: Sequence[int], pixels: bytes) -> bytes:
    """Return a PNG file of uint8 pixels of shape (channels, height, width), with 1 or 3 channels."""
    channels, height, width = shape
    rows = np.frombuffer(pixels, np.uint8).reshape(channels, height, width).transpose(1, 2, 0)
    # Every row starts with the number of its filter: 0 for none.
    scanlines = np.zeros((height, 1 + width * channels), np.uint8)
    scanlines[:, 1:] = rows.reshape(height, width * channels)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(scanlines.tobytes(), 9))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
