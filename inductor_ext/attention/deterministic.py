"""Captured gradients without atomics: every program writes its totals to a workspace, which is summed in a fixed order.

    index of a contribution     workspace (fp32)                 what is done with it afterwards
    neither query nor key       [B, H, key tiles]                it is summed
    query                       [B, H, Q]                        it is summed over b or h if the index does not depend on it
    key                         [B, H, K]                        the same
    both                        [B, H, Q, K]                     the same
    a diagonal                  [parts, B, H, query tiles, Q+K-1]  the same, also over parts and tiles (attention/kinds)

This is enough where each index is a position or a constant (``t[h, k]``), or the distance of a hoisted diagonal. Where an
index is the same for all heads and has few values, ``entry_sums`` adds the sums (pair_entries.py). For every other index,
ATen's sorted ``index_put`` scatters the sums to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule

from ..core import subgraphs
from ..torch_api.ir import add_in_order, contiguous_strides, full, stored
from ..torch_api.lowering import empty_strided, lowerings
from .captured_grads import Contribution

aten = torch.ops.aten

#: The shortest tile of keys that a program may work on. There are at most K / 16 key programs.
SHORTEST_TILE = 16


def key_tiles(keys: Any) -> Any:
    """Return the largest possible number of key programs."""
    return (keys + SHORTEST_TILE - 1) // SHORTEST_TILE


def workspace(axes: Sequence[bool], extents: Sequence[Any], device: torch.device, zeroed: bool) -> Any:
    """Allocate the workspace of a contribution whose index depends on ``axes`` of (b, h, q, k), which have these extents."""
    size = list(extents[:2]) + [n for n, used in zip(extents[2:], axes[2:], strict=True) if used]
    if len(size) == 2:
        size.append(key_tiles(extents[3]))
        zeroed = True
    if zeroed:
        return full(size, 0, torch.float32, device)
    return empty_strided(size, contiguous_strides(size), dtype=torch.float32, device=device)


def summed(partials: Any, axes: Sequence[bool]) -> Any:
    """Sum a workspace over the axes that the index does not depend on; the result has the shape [b?, h?, q?, k?]."""
    gone = [axis for axis in (0, 1) if not axes[axis]] + ([] if any(axes[2:]) else [2])
    return lowerings[aten.sum](partials, axis=gone) if gone else partials


def with_indices(total: Any, contribution: Contribution, extents: Sequence[Any], shape: Sequence[Any]) -> Any:
    """Turn ``total`` [b?, h?, q?, k?] into a gradient of ``shape``.

    The dims are put into the order of the indices, and the elements that no index reaches are zero. ``extents`` are the
    lengths of b, h, q and k.
    """
    kept = [p for p in contribution.positions if p is not None]
    order = sorted(kept)
    total = lowerings[aten.permute](total, [order.index(p) for p in kept]) if kept else lowerings[aten.reshape](total, [])
    padding: list[Any] = []
    dims = zip(contribution.indices, contribution.positions, shape, strict=True)
    for dim, (index, position, size) in enumerate(dims):
        if position is not None:
            padding = [0, size - extents[position], *padding]
        else:
            start = index + size if index < 0 else index
            total = lowerings[aten.unsqueeze](total, dim)
            padding = [start, size - 1 - start, *padding]
    return lowerings[aten.constant_pad_nd](total, padding, 0.0) if any(p != 0 for p in padding) else total


def over_positions(
    address: GraphModule, sizes: Sequence[Any], captured: Sequence[Any], device: torch.device
) -> tuple[Any, Any]:
    """Return the offset and whether it is in bounds, by ``address``, for all positions: tensors of the four ``sizes``.

    ``address`` returns ``(offset, in_bounds)`` for b, h, q and k (bounds.address). It runs on all positions at once.
    """
    positions = []
    for axis, n in enumerate(sizes):
        iota = lowerings[torch.ops.prims.iota](n, start=0, step=1, dtype=torch.int32, device=device, requires_grad=False)
        # What Inductor computes from iota, it computes by sympy, where casts to narrow integers do not wrap.
        positions.append(lowerings[aten.reshape](stored(iota), [n if a == axis else 1 for a in range(4)]))
    nothing = lowerings[aten.full]([], 0.0, dtype=torch.float32, device=device)
    offset, inside = subgraphs.over_tensors(address, [nothing, *positions, nothing, *captured], device)
    offset, inside = (lowerings[aten.expand](x, list(sizes)) for x in (offset, inside))
    zero = lowerings[aten.full]([], 0, dtype=torch.int64, device=device)
    return lowerings[aten.where](inside, lowerings[torch.ops.prims.convert_element_type](offset, torch.int64), zero), inside


def scattered(total: Any, axes: Sequence[bool], address: GraphModule, captured: Sequence[Any], shape: Sequence[Any]) -> Any:
    """Turn ``total`` [b?, h?, q?, k?] into a gradient of ``shape``, where ``address`` gives the offset of each element."""
    size = iter(total.get_size())
    device = total.get_device()
    kept = [next(size) if used else 1 for used in axes]
    offset, inside = over_positions(address, kept, captured, device)
    numel = sympy.prod(list(kept))
    total = lowerings[aten.expand](lowerings[aten.reshape](total, kept), kept)
    nothing = lowerings[aten.full]([], 0.0, dtype=torch.float32, device=device)
    total = lowerings[aten.where](inside, total, nothing)
    flat = full([sympy.prod(list(shape))], 0, torch.float32, device)
    offsets, values = (lowerings[aten.reshape](x, [numel]) for x in (offset, total))
    return lowerings[aten.reshape](add_in_order(flat, offsets, values), list(shape))
