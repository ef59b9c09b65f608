"""Custom ops that add or move rows of a tensor by an analysed index; gathers/scatters.py turns scatter-adds into them.

The sums are accumulated in fp32 (float64 for float64), in an order that depends only on the index.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.fx import working_dtype


@torch.library.custom_op("gradfuse::gather_sum", mutates_args=())
def gather_sum(values: Tensor, indices: Tensor | None, rows: int, times: int, strided: bool) -> Tensor:
    """Gather ``times`` rows of ``values`` for each of the ``rows`` rows of the result, and add them.

    values is [rows * times, ...]. indices is [rows * times] (integers, in range), or None for 0, 1, 2... Row s of the result
    [rows, ...] is the sum over j of ``values[indices[s * times + j]]``, or of ``values[indices[j * rows + s]]`` if
    ``strided``. The result has the dtype in which the sums are accumulated.
    """
    chosen = values if indices is None else values[indices]
    chosen = chosen.to(working_dtype(values.dtype))
    if strided:
        return chosen.unflatten(0, (times, rows)).sum(0)
    return chosen.unflatten(0, (rows, times)).sum(1)


@gather_sum.register_fake
def _(values: Tensor, indices: Tensor | None, rows: int, times: int, strided: bool) -> Tensor:
    return values.new_empty((rows, *values.shape[1:]), dtype=working_dtype(values.dtype))


@torch.library.custom_op("gradfuse::counted_order", mutates_args=())
def counted_order(keys: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sort keys by counting how often each of them occurs, without changing the order of equal ones.

    keys is [N], integers from -2 to rows - 1. Returns the order [N] (int64), so that ``keys[order]`` ascends, and the sorted
    keys [N] (int32).
    """
    ascending, order = keys.sort(stable=True)
    return order, ascending.to(torch.int32)


@counted_order.register_fake
def _(keys: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return keys.new_empty(keys.shape, dtype=torch.int64), keys.new_empty(keys.shape, dtype=torch.int32)


@torch.library.custom_op("gradfuse::segment_sum", mutates_args=())
def segment_sum(values: Tensor, order: Tensor, keys: Tensor, offset: int, rows: int, dtype: torch.dtype) -> Tensor:
    """A scatter-add by a sorted index into ``rows`` rows of zeros.

    Row r of the result is the sum of ``values[order[i]]`` over all i with ``keys[i] + offset == r``. values is [N, H], order
    [N] int64. keys is [N], integers in ascending order; a sum of -1 with the offset marks a row that is left out. (With an
    offset, a narrow dtype holds the keys of twice as many rows.) The result [rows, H] is rounded once, to ``dtype``.
    """
    wide = working_dtype(values.dtype)
    keys = keys.long() + offset
    kept = torch.where((keys >= 0).unsqueeze(1), values[order].to(wide), 0)
    total = torch.zeros((rows, values.shape[1]), dtype=wide, device=values.device)
    return total.index_add_(0, keys.clamp(min=0), kept).to(dtype)


@segment_sum.register_fake
def _(values: Tensor, order: Tensor, keys: Tensor, offset: int, rows: int, dtype: torch.dtype) -> Tensor:
    return values.new_empty((rows, values.shape[1]), dtype=dtype)


@torch.library.custom_op("gradfuse::entry_sums", mutates_args=())
def entry_sums(values: Tensor, index: Tensor, entries: int, parts: int) -> Tensor:
    """Add values by entry, by an index that is the same for all heads: the gradient of ``table[index[b, n], h]``.

    values is [B, H, N], index [B, N] or [1, N] (integers from 0 to entries - 1, or -1 for a value that is left out). The
    result is [H, entries], in the dtype in which the sums are accumulated: ``out[h, e]`` is the sum of ``values[b, h, n]``
    over all b and n with ``index[b, n] == e``. parts: into how many numbers of 8 bits (2 or 3) a kernel divides each value
    of fp32.
    """
    batch, heads, count = values.shape
    index = index.expand(batch, count).reshape(1, batch * count)
    return bin_sums(values.transpose(0, 1).reshape(heads, 1, batch * count), index, entries, parts)[:, 0].contiguous()


@entry_sums.register_fake
def _(values: Tensor, index: Tensor, entries: int, parts: int) -> Tensor:
    return values.new_empty((values.shape[1], entries), dtype=working_dtype(values.dtype))


@torch.library.custom_op("gradfuse::bin_sums", mutates_args=())
def bin_sums(values: Tensor, index: Tensor, bins: int, parts: int) -> Tensor:
    """Add the values of each row by bin, by an index that is the same in all slices: the gradient of ``t[r, index[r, n]]``.

    values is [..., R, N], index [R, N] (integers from 0 to bins - 1, or -1 for a value that is left out). The result is
    [..., R, bins], in the dtype in which the sums are accumulated: ``out[..., r, e]`` is the sum of ``values[..., r, n]``
    over all n with ``index[r, n] == e``. parts: as in ``entry_sums``.
    """
    *slices, rows, count = values.shape
    # Bin 0 is for what is left out. A number below -1 must not count as one from the end.
    chosen = torch.where(index < -1, bins + 1, index + 1).long()
    by_row = values.reshape(math.prod(slices), rows, count).permute(1, 2, 0).to(working_dtype(values.dtype))
    total = by_row.new_zeros((rows, bins + 1, by_row.shape[2]))
    total.index_put_((torch.arange(rows, device=values.device)[:, None], chosen), by_row, accumulate=True)
    return total[:, 1:].permute(2, 0, 1).reshape(*slices, rows, bins).contiguous()


@bin_sums.register_fake
def _(values: Tensor, index: Tensor, bins: int, parts: int) -> Tensor:
    return values.new_empty((*values.shape[:-1], bins), dtype=working_dtype(values.dtype))


@torch.library.custom_op("gradfuse::place_rows", mutates_args=())
def place_rows(values: Tensor, indices: Tensor) -> Tensor:
    """Compute ``out[indices[i]] = values[i]``. values and the result are [N, ...], indices [N] a permutation of 0 .. N-1."""
    return torch.empty_like(values, memory_format=torch.contiguous_format).index_copy_(0, indices.long(), values)


@place_rows.register_fake
def _(values: Tensor, indices: Tensor) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)
