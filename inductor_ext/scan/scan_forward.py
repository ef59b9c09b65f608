"""An associative scan over many channels with any combine_fn, as an op that has a kernel in gradfuse.

    y_0 = x_0,          y_t = c(y_{t-1}, x_t)          for k leaves, element by element

Stock's kernel combines each element about once for every level of a tree over a tile, and it has the tiles of reductions.
This kernel combines each element twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import channels
from ..core.fx import working_dtype
from ..core.sources import function_of, source_of
from ..torch_api.graph import pytree
from ..torch_api.tracing import trace_apart

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.bool)
#: The values of more leaves do not fit into the registers together.
MOST_LEAVES = 8


def combination(combine: Callable[..., Any], dtypes: Sequence[torch.dtype]) -> str | None:
    """The source of ``combine`` on leaves of ``dtypes``, in the dtypes of ``working_dtype``.

    It is None if the graph of ``combine`` contains tensors of its own.
    """
    kinds = [working_dtype(dtype) for dtype in dtypes]

    def combined(*flat: Tensor) -> list[Tensor]:
        results = pytree.tree_leaves(combine(*flat))
        return [y.to(kind) for y, kind in zip(results, kinds, strict=True)]

    module = trace_apart(combined, [*kinds, *kinds])
    return None if module.graph.find_nodes(op="get_attr") else source_of(module)


@torch.library.custom_op("gradfuse::scan_forward", mutates_args=())
def scan_forward(xs: list[Tensor], source: str, shape: list[int], dim: int, reverse: bool) -> list[Tensor]:
    """The scan of the k leaves ``xs`` [P, T, L] along T; it runs from the end if ``reverse``.

    source: a function that takes 2k leaves of the dtypes of ``working_dtype`` and returns k of them; see ``sources.py``. The
    results have the dtypes of ``xs`` and are rounded once. They are contiguous and have the shape ``shape``: T is at
    ``dim``, and P and L are one dim or several dims before and behind it, as in ``linear_scan``.
    """
    combine = function_of(source, xs[0].device)
    wide = [x.to(working_dtype(x.dtype)) for x in xs]
    ys = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in wide]
    times = range(xs[0].shape[1])
    total: list[Tensor] = []
    for t in reversed(times) if reverse else times:
        now = [x[:, t] for x in wide]
        total = combine(*total, *now) if total else now
        for y, part in zip(ys, total, strict=True):
            y[:, t] = part
    return [y.to(x.dtype).reshape(shape) for x, y in zip(xs, ys, strict=True)]


@scan_forward.register_fake
def _(xs: list[Tensor], source: str, shape: list[int], dim: int, reverse: bool) -> list[Tensor]:
    return [x.new_empty(shape) for x in xs]


def supported(xs: Sequence[Tensor]) -> bool:
    """Whether the op's kernel should scan ``xs`` [T, ...] along dim 0.

    Along the innermost dim, and over few channels, stock's kernel is as fast.
    """
    if not channels.runs_kernels(xs[0]) or len(xs) > MOST_LEAVES or any(x.dtype not in DTYPES for x in xs):
        return False
    return xs[0].shape[0] > 1 and channels.enough_channels(xs)


def scanned(source: str, xs: Sequence[Tensor], reverse: bool) -> list[Tensor]:
    """``scan_forward`` of tensors [T, ...] of any rank and of one shape; the results have that shape."""
    split = channels.innermost(xs)
    shape = channels.unfolded(xs[0], split)
    results = scan_forward([channels.slices(x, split) for x in xs], source, shape, split - 1, reverse)
    return [y.movedim(split - 1, 0) for y in results]
