"""Rows of a tensor, added up or moved by an index that was analysed: what scatter-adds become (gathers/scatters.py).

The sums accumulate in fp32 (float64 for float64), in an order that depends on the index alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of ``dtype`` are accumulated in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@torch.library.custom_op("gradfuse::gather_sum", mutates_args=())
def gather_sum(values: Tensor, places: Tensor | None, rows: int, times: int, strided: bool) -> Tensor:
    """``times`` rows of ``values`` added up for each of ``rows`` rows of the result.

    values [rows * times, ...]; places [rows * times] (integers, in range) or None for 0, 1, 2... Row s of the result
    [rows, ...] adds ``values[places[s * times + j]]`` over j, or ``values[places[j * rows + s]]`` if ``strided``. The result
    has the accumulator's dtype.
    """
    chosen = values if places is None else values[places]
    chosen = chosen.to(accumulator(values.dtype))
    if strided:
        return chosen.unflatten(0, (times, rows)).sum(0)
    return chosen.unflatten(0, (rows, times)).sum(1)


@gather_sum.register_fake
def _(values: Tensor, places: Tensor | None, rows: int, times: int, strided: bool) -> Tensor:
    return values.new_empty((rows, *values.shape[1:]), dtype=accumulator(values.dtype))


@torch.library.custom_op("gradfuse::segment_sum", mutates_args=())
def segment_sum(values: Tensor, order: Tensor, keys: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """A scatter-add into ``rows`` rows of zeros, its index sorted: row r adds ``values[order[i]]`` over ``keys[i] == r``.

    values [N, H]; order [N] int64; keys [N] integers in ascending order, -1 for a row to leave out. The result [rows, H]
    is rounded to ``dtype`` once.
    """
    wide = accumulator(values.dtype)
    kept = torch.where((keys >= 0).unsqueeze(1), values[order].to(wide), 0)
    total = torch.zeros((rows, values.shape[1]), dtype=wide, device=values.device)
    return total.index_add_(0, keys.clamp(min=0).long(), kept).to(dtype)


@segment_sum.register_fake
def _(values: Tensor, order: Tensor, keys: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    return values.new_empty((rows, values.shape[1]), dtype=dtype)


@torch.library.custom_op("gradfuse::place_rows", mutates_args=())
def place_rows(values: Tensor, places: Tensor) -> Tensor:
    """``out[places[i]] = values[i]``: values [N, ...], places [N] a permutation of 0 .. N-1."""
    return torch.empty_like(values, memory_format=torch.contiguous_format).index_copy_(0, places.long(), values)


@place_rows.register_fake
def _(values: Tensor, places: Tensor) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)
