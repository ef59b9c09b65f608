"""Find out which scores are added to one element of a captured tensor's gradient.

The indices of a contribution *determine* a position if two scores with different values of it are never added to the same
element. ``t[h, q, k]`` determines h, q and k, and so does ``t[h, q, q - k + 9]``: if q is known, the last index gives k. A
gradient whose indices determine all positions has one writer for each element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..core.fx import CASTS_AND_COPIES, cone, dtype_of
from ..torch_api.sizes import statically_known_true
from .bounds import interval
from .captured_grads import Contribution, constant_of
from .score_mod import ScoreMod
from .tile_inputs import coordinate_of

aten = torch.ops.aten
#: An integer expression that is a sum of multiples of positions: the factor of each. Its constant is left out.
Multiples = dict[Node, int]


@dataclass(frozen=True)
class Writers:
    """determined: for each of b, h, q, k, whether the indices determine it. query_cycle, key_cycle: a number w such that an
    index is ``q % w`` (``k % w``), or 0. Such an index determines the position within a tile whose length divides w.
    keys_repeat: the indices depend on the key only by ``k % key_cycle``.
    """

    determined: tuple[bool, ...]
    query_cycle: int
    key_cycle: int
    keys_repeat: bool


def writers(contribution: Contribution, inputs: ScoreMod, lengths: Sequence[Any]) -> Writers:
    """Return which positions the indices of a contribution determine. ``lengths``: the lengths of b, h, q and k."""
    ranges = inputs.ranges(lengths)
    determined: set[Node] = set()
    indices = [(i, n) for i, n in zip(contribution.indices, contribution.shape, strict=True) if isinstance(i, Node)]
    # An index may determine a position only after another index has determined the other positions in it.
    for _ in indices:
        for index, size in indices:
            terms = _multiples(index, inputs.positions) or {}
            new = set(terms) - determined
            if len(new) == 1 and _separates(index, terms, size, ranges):
                determined |= new
    cyclic = {i: c for i, _ in indices if (c := coordinate_of(i, inputs)) and c.operation == "mod"}
    cycles = {c.axis: c.divisor for c in cyclic.values()}
    by_key = [i for i, _ in indices if inputs.k in cone(i) or contribution.on_score]
    repeat = "k" in cycles and all(i in cyclic and cyclic[i].divisor == cycles["k"] for i in by_key)
    return Writers(tuple(p in determined for p in inputs.positions), cycles.get("q", 0), cycles.get("k", 0), repeat)


def _separates(index: Node, terms: Multiples, size: Any, ranges: dict[Node, Any]) -> bool:
    """Whether different sums of ``terms`` are different elements: a negative index is counted from the end."""
    if index in ranges:
        # Where the position is beyond the size, nothing is written.
        return True
    low, high = interval(index, ranges)
    if low is None or high is None or not all(isinstance(ranges[p], int) for p in terms):
        return False
    # An interval of another width is that of a sum that wraps.
    width = sum(abs(n) * (ranges[p] - 1) for p, n in terms.items())
    return high - low == width and statically_known_true(width < size)


def _multiples(node: Any, positions: Sequence[Node]) -> Multiples | None:
    """Return an expression as multiples of positions, or None if it is something else."""
    if constant_of(node) is not None:
        return {}
    if node in positions:
        return {node: 1}
    # Positions are int32, and a narrower integer would be another number.
    if not isinstance(node, Node) or dtype_of(node) not in (torch.int32, torch.int64) or node.kwargs.get("alpha", 1) != 1:
        return None
    if node.target in CASTS_AND_COPIES:
        return _multiples(node.args[0], positions)
    if node.target is aten.neg.default:
        return _scaled(_multiples(node.args[0], positions), -1)
    if node.target is aten.mul.Tensor:
        x, factor = node.args if constant_of(node.args[1]) is not None else reversed(node.args)
        return _scaled(_multiples(x, positions), constant_of(factor))
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        x, y = (_multiples(a, positions) for a in node.args)
        return _sum(x, _scaled(y, -1 if node.target is aten.sub.Tensor else 1))
    return None


def _scaled(terms: Multiples | None, factor: int | None) -> Multiples | None:
    return None if terms is None or factor is None else {p: n * factor for p, n in terms.items() if n * factor}


def _sum(x: Multiples | None, y: Multiples | None) -> Multiples | None:
    if x is None or y is None:
        return None
    total = {p: x.get(p, 0) + y.get(p, 0) for p in (*x, *y)}
    return {p: n for p, n in total.items() if n}
