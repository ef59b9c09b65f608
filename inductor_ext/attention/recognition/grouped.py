"""Grouped heads: a head of keys and values serves several heads of queries.

Models repeat the heads of keys and values before the products (``repeat_kv``, ``repeat_interleave``). The kernels read a
shared head where it is and sum its gradient themselves, so that nothing needs to be repeated, saved or summed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ...core.fx import shape_of
from ...core.outside import Outside
from ...core.terms import calls_torch
from ...torch_api.sizes import size_hint, statically_known_true
from . import views
from .attentions import WIDTH, Attention, Side
from .elements import positions_in
from .indices import B, H, K, Quotient, Ranges

#: A program of the backward kernel has 64 or 128 keys of one head, and loops over the heads of queries that share it. With
#: fewer keys than this, there would be less than one program for each multiprocessor of an H100.
FEWEST_KEYS = 2**14


@dataclass(frozen=True)
class KeysAndValues:
    """The operands as the kernel reads them. ranges: the positions, where h counts the heads of keys and values."""

    key: Side
    value: Side
    ranges: Ranges


def keys_and_values(attention: Attention) -> KeysAndValues:
    """Return the keys and values of an attention as they were before their heads were repeated, if that is faster."""
    ranges = attention.lift.ranges
    as_they_are = KeysAndValues(attention.key, attention.value, ranges)
    sides = [_Repeated.of(side, attention) for side in (attention.key, attention.value)]
    if None in sides or sides[0].times != sides[1].times:
        return as_they_are
    if not statically_known_true(ranges.extents[H] % sides[0].times == 0):
        return as_they_are
    shared = ranges.of_groups(sides[0].times)
    keys = [size_hint(shared.extents[p]) for p in (B, H, K)]
    if not any(side.is_repeated_by_kernel for side in sides) and None not in keys and math.prod(keys) < FEWEST_KEYS:
        return as_they_are
    return KeysAndValues(sides[0].side, sides[1].side, shared)


@dataclass(frozen=True)
class _Repeated:
    """An operand of which each head serves ``times`` heads of queries. side: the node before the heads were repeated.

    is_repeated_by_kernel: nothing repeats them in the graph.
    """

    side: Side
    times: int
    is_repeated_by_kernel: bool

    @staticmethod
    def of(side: Side, attention: Attention) -> _Repeated | None:
        """Follow an operand through views to where its heads are not repeated; None if they never are."""
        node, index = side
        lift = attention.lift
        ranges = lift.ranges
        if WIDTH in index:
            ranges = ranges.including(WIDTH, shape_of(node)[index.index(WIDTH)])
        while (times := _times(index)) is None:
            if not calls_torch(node) or node in lift.writes.without_gradient:
                return None
            try:
                node, index = views.source(node, index, ranges)
            except views.NotAView:
                return None
        if node is not side[0] and not _stays(node, attention):
            return None
        return _Repeated((node, tuple(_group(i) for i in index)), times, node is side[0])


def _times(index: views.Index) -> int | None:
    """Return n if an index depends on the head as ``h // n`` only, otherwise None."""
    of_head = [i for i in index if H in positions_in(i)]
    if len(of_head) != 1 or not isinstance(of_head[0], Quotient) or of_head[0].args[0] != H:
        return None
    return int(of_head[0].args[1])


def _group(index: Any) -> Any:
    return H if isinstance(index, Quotient) and index.args[0] == H else index


def _stays(node: Node, attention: Attention) -> bool:
    """Return whether a tensor keeps its values until the backward, for which a kernel saves it. Eager mode saves a copy."""
    return not Outside(node.graph).has(node) and not attention.lift.writes.after(node)
