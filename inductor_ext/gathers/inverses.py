"""The inverse of a permutation in a joint graph: what turns a scatter into a gather, and the other way round."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..core.joint_graph import Builder, value_of
from .permutations import argsorted

aten = torch.ops.aten


def inverse(build: Builder, permutation: Node) -> Node:
    """The inverse [N] of a permutation: found in the graph, or made right after it and shared."""
    key = inverse, permutation
    if key not in build.shared:
        with build.before(permutation.next, like=permutation):
            found = argsorted(permutation) or _stored(build, permutation)
            # Index ops take two integer types.
            index = value_of(found).dtype in (torch.int32, torch.int64)
            build.shared[key] = found if index else build.convert(found, torch.int64)
    return build.shared[key]


def _stored(build: Builder, permutation: Node) -> Node:
    """The inverse, made of an arange stored at the places that the permutation names."""
    length = build.product(build.sizes(permutation, range(value_of(permutation).dim())))
    flat = permutation if value_of(permutation).dim() == 1 else build.call(aten.view.default, permutation, [length])
    counted = build.count(length, value_of(permutation).device)
    return build.call(torch.ops.gradfuse.place_rows.default, counted, flat)
