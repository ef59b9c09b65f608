"""The inverse of a permutation in a joint graph: it turns a scatter into a gather, and a gather into a scatter."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..core.fx import value_of
from ..core.joint_graph import Builder
from .permutations import argsorted

aten = torch.ops.aten


def inverse(build: Builder, permutation: Node) -> Node:
    """The inverse [N] of a permutation, int32 or int64.

    If the graph already has the inverse, it is used; otherwise it is computed right after the permutation. It is shared by
    all rewrites of the graph.
    """
    key = inverse, permutation
    if key not in build.shared:
        with build.before(permutation.next, like=permutation):
            found = argsorted(permutation) or _stored(build, permutation)
            # Index ops take only two integer types, int32 and int64.
            index = value_of(found).dtype in (torch.int32, torch.int64)
            build.shared[key] = found if index else build.convert(found, torch.int64)
    return build.shared[key]


def _stored(build: Builder, permutation: Node) -> Node:
    """The inverse, computed by storing an arange at the indices that the permutation holds."""
    length = build.product(build.sizes(permutation, range(value_of(permutation).dim())))
    flat = permutation if value_of(permutation).dim() == 1 else build.call(aten.view.default, permutation, [length])
    counted = build.count(length, value_of(permutation).device)
    return build.call(torch.ops.gradfuse.place_rows.default, counted, flat)
