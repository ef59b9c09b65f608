"""What every kernel with matmuls needs to know: dtypes, the largest tile, the precision of single-precision products."""

from __future__ import annotations

import torch

#: The most rows or columns of a tile. Tile lengths divide this, so a length that it divides needs no bounds check.
LARGEST_TILE = 128
SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def next_power_of_two(n: int) -> int:
    """The least power of two that is not under ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def float32_precision() -> str:
    """The precision of fp32 matmuls that torch is set to, as a template's constant."""
    precision = torch.backends.cuda.matmul.fp32_precision
    exact = precision in ("ieee", "none") if precision != "none" else torch.get_float32_matmul_precision() == "highest"
    return "'ieee'" if exact or torch.version.hip else "'tf32'"
