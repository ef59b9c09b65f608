"""associative_scan along dim 0 of flat leaves.

It is one scan, or a scan in two levels where there are only few long rows, which would leave most of a GPU idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.fx import working_dtype
from ..torch_api.config import uses_triton_on_cpu
from ..torch_api.graph import pytree
from ..torch_api.higher_order import associative_scan_hop
from ..torch_api.sizes import size_hint

#: The number of times in a chunk. Inductor scans that many in one tile.
CHUNK = 1024
#: With this many channels or more, whole rows fill a GPU. With this many chunks or more, two levels are worth their three
#: kernels.
FEW_CHANNELS = 512
FEWEST_CHUNKS = 4


def in_memory_order(x: Tensor, change: Callable[[Tensor, int], Tensor]) -> Tensor:
    """``change(x, 0)``, with a result in the memory order of ``x``. ``change(x, dim)`` changes a tensor along a dim.

    torch and Inductor would lay the result out with dim 0 outermost, and would copy it if the user's tensors have another
    order.
    """
    strides = [size_hint(s) or 0 for s in x.stride()]
    order = sorted(range(x.dim()), key=lambda d: strides[d], reverse=True)
    changed = change(x.permute(order), order.index(0))
    return changed.permute([order.index(d) for d in range(x.dim())])


def padded(x: Tensor, before: int, after: Any) -> Tensor:
    """``x`` [T, ...] with ``before`` zeros in front of it and ``after`` zeros behind it along dim 0."""
    return in_memory_order(x, lambda y, d: torch.nn.functional.pad(y, [0, 0] * (y.dim() - 1 - d) + [before, after]))


def backwards(x: Tensor) -> Tensor:
    """``x`` [T, ...] flipped along dim 0."""
    return in_memory_order(x, lambda y, d: y.flip(d))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [T, ...] as ``dtype``, in the memory order of ``x``."""
    return x if x.dtype is dtype else in_memory_order(x, lambda y, _: y.to(dtype))


def first_of_all(x: Tensor, reverse: bool = False) -> Tensor:
    """A mask, bool [T, 1, ...], of the time that a scan of ``x`` [T, ...] along dim 0 reads first."""
    first = x.shape[0] - 1 if reverse else 0
    return (torch.arange(x.shape[0], device=x.device) == first).reshape(-1, *[1] * (x.dim() - 1))


def associative(combine: Callable[..., Any], xs: Sequence[Tensor], two_levels: bool) -> tuple[Tensor, ...]:
    """The leaves ``xs`` [T, ...], of one shape, scanned along dim 0 by ``combine``, in one level or in two."""
    dtypes = [x.dtype for x in xs]
    if torch.bool in dtypes and runs_triton(xs):
        ys = associative(_of_numbers(combine, dtypes), [_number(x) for x in xs], two_levels)
        return tuple(y.to(dtype) for y, dtype in zip(ys, dtypes, strict=True))
    if two_levels:
        return _in_two_levels(combine, xs)
    return tuple(associative_scan_hop(combine, list(xs), ()))


def runs_triton(xs: Sequence[Tensor]) -> bool:
    """Whether Inductor emits Triton for ops on these tensors."""
    return xs[0].is_cuda or uses_triton_on_cpu()


def _of_numbers(combine: Callable[..., Any], dtypes: Sequence[torch.dtype]) -> Callable[..., Any]:
    """``combine`` with conditions as numbers: Triton scans no tile of conditions ("Cannot bitcast ... of size 1")."""

    def combine_numbers(*flat: Tensor) -> list[Tensor]:
        leaves = (x != 0 if dtype is torch.bool else x for x, dtype in zip(flat, [*dtypes, *dtypes], strict=True))
        return [_number(y) for y in pytree.tree_leaves(combine(*leaves))]

    return combine_numbers


def _number(x: Tensor) -> Tensor:
    return x.to(torch.int32) if x.dtype is torch.bool else x


def long_and_few(xs: Sequence[Tensor]) -> bool:
    """Whether ``xs`` [T, ...] are few long rows. For one leaf the answer is no: stock scans it in chunks, by look-back."""
    if len(xs) == 1 or not runs_triton(xs):
        return False
    length, *channels = (size_hint(n) for n in xs[0].shape)
    return None not in (length, *channels) and length >= FEWEST_CHUNKS * CHUNK and math.prod(channels) < FEW_CHANNELS


def _in_two_levels(combine: Callable[..., Any], xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Scan each chunk, then the totals of the chunks, and combine the total before a chunk with each of its elements.

    Half precision is scanned in fp32, as within one kernel, and rounded at the end.
    """
    dtypes, length = [x.dtype for x in xs], xs[0].shape[0]
    xs = [x.to(working_dtype(x.dtype)) for x in xs]

    def wide(*flat: Tensor) -> list[Tensor]:
        results = pytree.tree_leaves(combine(*flat))
        return [y.to(x.dtype) for x, y in zip(xs, results, strict=True)]

    count = (length + CHUNK - 1) // CHUNK
    # The padding after the end has no effect on the elements before it.
    chunks = [padded(x, 0, count * CHUNK - length).unflatten(0, (count, CHUNK)).transpose(0, 1) for x in xs]
    inside = associative_scan_hop(wide, chunks, ())
    last = [y[-1] for y in inside]
    totals = associative(wide, last, long_and_few(last))
    before = [padded(total[:-1], 1, 0).expand(y.shape) for total, y in zip(totals, inside, strict=True)]
    joined = wide(*before, *inside)
    first = first_of_all(totals[0])
    ys = (torch.where(first, y, both) for y, both in zip(inside, joined, strict=True))
    return tuple(y.transpose(0, 1).flatten(0, 1)[:length].to(dtype) for y, dtype in zip(ys, dtypes, strict=True))
