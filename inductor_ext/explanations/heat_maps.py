"""Draw grids of numbers as PNG files in data URIs, with the standard library only. Each pixel is one palette index."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

Colour = tuple[int, int, int]

#: The colour with index 0 in a palette of values: NaN or an infinity.
NOT_FINITE: Colour = (150, 150, 150)
#: The largest number of other colours in a palette with one byte for each pixel.
SHADES = 255
#: The colours of a mask: hidden, shown by the mask_mod, shown in a full block.
CATEGORIES: tuple[Colour, ...] = ((245, 245, 245), (126, 170, 214), (33, 84, 141))
_BLUE, _WHITE, _RED, _DARK = (33, 84, 141), (250, 250, 250), (178, 34, 34), (40, 40, 60)


def css(colour: Colour) -> str:
    """Format a colour for CSS."""
    return "#" + bytes(colour).hex()


def limits(values: Tensor) -> tuple[float, float]:
    """Return the least and the greatest finite value, or zeros if there is none."""
    finite = values[values.isfinite()]
    return (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)


def shades(values: Tensor) -> Tensor:
    """Return the palette index of each value: 0 if it is not finite, otherwise 1 (the least) to 255 (the greatest)."""
    least, most = limits(values)
    span = most - least
    scaled = (values - least) / span * (SHADES - 1) if span > 0 else torch.full_like(values, (SHADES - 1) / 2)
    return torch.where(values.isfinite(), scaled.nan_to_num().round() + 1, 0).to(torch.uint8)


def palette(least: float, most: float) -> list[Colour]:
    """Return the colours: blue for negative values, white for zero, red for positive ones, stronger for larger values."""
    largest = max(abs(least), abs(most)) or 1.0
    colours = [NOT_FINITE]
    for i in range(SHADES):
        share = (least + (most - least) * i / (SHADES - 1)) / largest
        colours.append(_mixed(_WHITE, _RED if share > 0 else _BLUE, abs(share)))
    return colours


def _mixed(first: Colour, second: Colour, share: float) -> Colour:
    return tuple(round(a + (b - a) * min(share, 1.0)) for a, b in zip(first, second, strict=True))  # type: ignore[return-value]


def png_of(values: Tensor) -> str:
    """Draw a heat map of real numbers."""
    return data_uri(shades(values), palette(*limits(values)))


def scale_png(least: float, most: float) -> str:
    """Draw the colours between two values as a bar."""
    return data_uri(torch.arange(1, SHADES + 1, dtype=torch.uint8)[None, :], palette(least, most))


def categories_png(values: Tensor) -> str:
    """Draw the states of a mask."""
    return data_uri(values.to(torch.uint8), CATEGORIES)


def schematic_png(pattern: Tensor) -> str:
    """Draw which values are equal, in shades of grey."""
    most = max(int(pattern.max()), 1)
    return data_uri(pattern.to(torch.uint8), [_mixed(_WHITE, _DARK, 0.15 + 0.6 * i / most) for i in range(most + 1)])


def data_uri(indices: Tensor, colours: Sequence[Colour]) -> str:
    """Return a PNG file as a data URI. ``indices`` [rows, columns] are indices into a list of at most 256 colours."""
    height, width = indices.shape
    # Each row begins with the number of its filter; 0 means no filter.
    rows = b"".join(b"\0" + bytes(row) for row in indices.tolist())
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", bytes(c for colour in colours for c in colour)))
    chunks += ((b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    file = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)
    return "data:image/png;base64," + base64.b64encode(file).decode()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
