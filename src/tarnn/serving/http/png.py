"""Images as PNG: eight bits a value, grey or colour, no filters.

A dozen lines, because pillow comes with `tarnn[images]`, which brings scikit-learn too; a server needs neither.
"""

import struct
import zlib

import numpy as np
from jaxtyping import UInt8

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOUR_TYPES = {1: 0, 3: 2}  # channels → grey, RGB
NO_FILTER = 0  # the byte before each row


def png(pixels: UInt8[np.ndarray, "height width channels"]) -> bytes:
    """The file of an image with one channel (grey) or three (red, green, blue)."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    rows = np.full((height, 1 + width * channels), NO_FILTER, np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")
    return SIGNATURE + b"".join(chunk(name, data) for name, data in parts)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
