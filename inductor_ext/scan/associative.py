"""associative_scan along dim 0 of flat leaves: in one scan, or in two levels where few long rows would leave a GPU idle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_api.config import uses_triton_on_cpu
from ..torch_api.graph import pytree
from ..torch_api.higher_order import associative_scan_hop
from ..torch_api.sizes import size_hint

#: Times a chunk: as much as Inductor scans in one tile.
CHUNK = 1024
#: From this many channels on, whole rows fill a GPU; from this many chunks on, two levels are worth their three kernels.
FEW_CHANNELS = 512
FEWEST_CHUNKS = 4


def in_memory_order(x: Tensor, change: Callable[[Tensor, int], Tensor]) -> Tensor:
    """``change(x, 0)``, which changes a tensor along a dim, with a result in the memory order of ``x``.

    torch and Inductor would lay the result out with dim 0 outermost, and copy it where the user's tensors are not so.
    """
    strides = [size_hint(s) or 0 for s in x.stride()]
    order = sorted(range(x.dim()), key=lambda d: strides[d], reverse=True)
    changed = change(x.permute(order), order.index(0))
    return changed.permute([order.index(d) for d in range(x.dim())])


def padded(x: Tensor, before: int, after: Any) -> Tensor:
    """``x`` [T, ...] with zeros before and after it along dim 0."""
    return in_memory_order(x, lambda y, d: torch.nn.functional.pad(y, [0, 0] * (y.dim() - 1 - d) + [before, after]))


def backwards(x: Tensor) -> Tensor:
    """``x`` [T, ...] flipped along dim 0."""
    return in_memory_order(x, lambda y, d: y.flip(d))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [T, ...] as ``dtype``."""
    return x if x.dtype is dtype else in_memory_order(x, lambda y, _: y.to(dtype))


def first_of_all(x: Tensor, reverse: bool = False) -> Tensor:
    """True at what a scan of ``x`` [T, ...] along dim 0 takes first; [T, 1, ...]."""
    first = x.shape[0] - 1 if reverse else 0
    return (torch.arange(x.shape[0], device=x.device) == first).reshape(-1, *[1] * (x.dim() - 1))


def associative(combine: Callable[..., Any], xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The leaves ``xs`` [T, ...], of one shape, scanned along dim 0 by ``combine``."""
    if _long_and_few(xs):
        return _in_two_levels(combine, xs)
    return tuple(associative_scan_hop(combine, list(xs), ()))


def _long_and_few(xs: Sequence[Tensor]) -> bool:
    """Whether to scan in chunks. Stock does so itself for one leaf, by look-back."""
    if len(xs) == 1 or not (xs[0].is_cuda or uses_triton_on_cpu()):
        return False
    length, *channels = (size_hint(n) for n in xs[0].shape)
    return None not in (length, *channels) and length >= FEWEST_CHUNKS * CHUNK and math.prod(channels) < FEW_CHANNELS


def _in_two_levels(combine: Callable[..., Any], xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Chunks by themselves, then their totals, then what comes before a chunk into each of its elements.

    Half precision is scanned in fp32, as within one kernel, and rounded at the end.
    """
    dtypes, length = [x.dtype for x in xs], xs[0].shape[0]
    xs = [x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x for x in xs]

    def wide(*flat: Tensor) -> list[Tensor]:
        results = pytree.tree_leaves(combine(*flat))
        return [y.to(x.dtype) for x, y in zip(xs, results, strict=True)]

    count = (length + CHUNK - 1) // CHUNK
    # What is put after the end reaches no element before it.
    chunks = [padded(x, 0, count * CHUNK - length).unflatten(0, (count, CHUNK)).transpose(0, 1) for x in xs]
    inside = associative_scan_hop(wide, chunks, ())
    totals = associative(wide, [y[-1] for y in inside])
    before = [padded(total[:-1], 1, 0).expand(y.shape) for total, y in zip(totals, inside, strict=True)]
    joined = wide(*before, *inside)
    first = first_of_all(totals[0])
    ys = (torch.where(first, y, both) for y, both in zip(inside, joined, strict=True))
    return tuple(y.transpose(0, 1).flatten(0, 1)[:length].to(dtype) for y, dtype in zip(ys, dtypes, strict=True))
