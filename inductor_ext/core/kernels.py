"""What all kernels with matmuls have in common: their dtypes, the largest tile, and the precision of fp32 products."""

from __future__ import annotations

from typing import Any

import torch

from .target import Target

#: A tile of ours has at most this many rows or columns. Every tile length divides this number, so a tensor whose length is
#: a multiple of it needs no bounds check.
LARGEST_TILE = 128
#: The fewest slices (batch elements times heads, for example) that share an index for a product with the one-hot matrix of
#: that index. With fewer, the product would be mostly empty.
FEWEST_SLICES = 16
SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def longest_tile(kernel_options: dict[str, Any]) -> int:
    """The number that every tile length divides: ``LARGEST_TILE``, or a longer tile of the user's kernel options."""
    return max([LARGEST_TILE, *tiles_asked_for(kernel_options)])


def tiles_asked_for(kernel_options: dict[str, Any]) -> list[int]:
    """The lengths of tiles that the user's kernel options ask for."""
    return [n for name, n in kernel_options.items() if "BLOCK_" in name and type(n) is int]


def float32_precision(target: Target) -> str:
    """The precision that torch uses for fp32 matmuls, as a constant of a template: ``'ieee'`` or ``'tf32'``, in quotes."""
    precision = torch.backends.cuda.matmul.fp32_precision
    exact = precision in ("ieee", "none") if precision != "none" else torch.get_float32_matmul_precision() == "highest"
    return "'ieee'" if exact or not target.tf32 else "'tf32'"
