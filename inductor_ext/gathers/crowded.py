"""The gradient of a lookup in a matrix with few elements: ``table[bucket(d), h]`` for all distances d and heads h, as in T5.

Each element gets the values of hundreds of distances. Atomic additions to one element, and to its neighbours in memory, wait
for each other, so the values are added by products with one-hot matrices (entry_sums.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from ..core.fx import same_sizes, shape_of, value_of
from ..core.joint_graph import Builder
from ..core.kernels import SUPPORTED_DTYPES
from ..core.target import Target
from .entry_sums import MOST_ENTRIES
from .permutations import is_iota, same_values
from .rows import in_bounds
from .scatter_adds import ScatterAdd

aten = torch.ops.aten

#: The fewest values in all, the fewest for each element, and the most pairs of a value and an element, which take 50 us.
MANY, CROWD, MOST_PAIRS = 2**16, 16, 2**27


@dataclass(frozen=True)
class _Lookup:
    """``base[index[n], h] += values[h, n]`` (``by`` is 0) or ``base[h, index[n]] += values[h, n]`` (1), for all h and n."""

    index: Node
    by: int


def _match(found: ScatterAdd) -> _Lookup | None:
    base, values = value_of(found.base), value_of(found.values)
    if found.keep is not None or len(found.indexed) != 2 or base.dim() != 2 or values.dim() != 2:
        return None
    heads, count = values.shape
    for by, (index, other) in enumerate((found.indices, found.indices[::-1])):
        shapes = same_sizes(shape_of(index), [1, count]) and same_sizes(shape_of(other), [heads, 1])
        if shapes and is_iota(same_values(other)) and same_sizes([base.shape[1 - by]], [heads]):
            return _Lookup(index, by)
    return None


def add_by_entry(build: Builder, found: ScatterAdd) -> Node | None:
    """Return the sum of the values in fp32, without the base, or None if something else is better."""
    lookup, value = _match(found), value_of(found.values)
    if lookup is None or value.dtype not in SUPPORTED_DTYPES or not Target.of(value.device).triton:
        return None
    sizes = (*value.shape, value_of(found.base).shape[lookup.by])
    if not all(isinstance(n, int) for n in sizes):
        return None
    heads, count, bins = sizes
    if heads * count < MANY or count < CROWD * bins or count * bins > MOST_PAIRS or bins > MOST_ENTRIES:
        return None
    index = build.call(aten.view.default, lookup.index, [1, count])
    wrapped = build.call(aten.add.Tensor, index, bins)
    index = build.call(aten.where.self, build.call(aten.lt.Scalar, index, 0), wrapped, index)
    index = in_bounds(build, index, bins)
    values = build.call(aten.unsqueeze.default, found.values, 0)
    total = build.call(torch.ops.gradfuse.entry_sums.default, values, index, bins, 3)
    return total if lookup.by else build.call(aten.permute.default, total, [1, 0])
