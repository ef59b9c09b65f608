"""Find out which scores are added to one element of a captured tensor's gradient.

The indices of a contribution *determine* a position if two scores with different values of it are never added to the same
element. ``t[h, q, k]`` determines h, q and k, and so does ``t[h, q, q - k + 9]``: if q is known, the last index gives k. A
gradient whose indices determine all positions has one writer for each element.

A clamped distance, ``t[h, q, clamp(q - k, -c, c)]``, determines the key strictly between the bounds, and those elements have
one writer. The elements at the bounds have many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..core.fx import cone
from ..torch_api.sizes import statically_known_true
from .affine import Clamp, affine, clamp_of, span
from .bounds import interval
from .captured_grads import Contribution
from .score_mod import ScoreMod
from .tile_inputs import coordinate_of

#: With as many scores of a row for each element, the atomic adds to a row are few.
COARSE = 16


@dataclass(frozen=True)
class Writers:
    """determined: for each of b, h, q, k, whether the indices determine it. query_cycle, key_cycle: a number w such that an
    index is ``q % w`` (``k % w``), or 0. Such an index determines the position within a tile whose length divides w.
    keys_repeat: the indices depend on the key only by ``k % key_cycle``. coarse: they determine either the query or the key,
    and depend on the other only by a quotient, so that many scores of a row (column) share an element. clamps: if not empty,
    the indices determine all positions strictly between the bounds of these, and no score at a bound has an element of one
    that is between.
    """

    determined: tuple[bool, ...]
    query_cycle: int
    key_cycle: int
    keys_repeat: bool
    coarse: bool
    clamps: tuple[Clamp, ...] = ()


def writers(contribution: Contribution, inputs: ScoreMod, lengths: Sequence[Any]) -> Writers:
    """Return which positions the indices of a contribution determine. ``lengths``: the lengths of b, h, q and k."""
    ranges = inputs.ranges(lengths)
    indices = [(i, n) for i, n in zip(contribution.indices, contribution.shape, strict=True) if isinstance(i, Node)]
    determined = _determined(indices, inputs, ranges)
    clamps: list[Clamp] = []
    if len(determined) == 4 or len(_determined(indices, inputs, ranges, clamps)) < 4:
        clamps = []
    cyclic = {i: c for i, _ in indices if (c := coordinate_of(i, inputs)) and c.operation == "mod"}
    cycles = {c.axis: c.divisor for c in cyclic.values()}
    by_key = [i for i, _ in indices if inputs.k in cone(i) or contribution.on_score]
    repeat = "k" in cycles and all(i in cyclic and cyclic[i].divisor == cycles["k"] for i in by_key)
    known = tuple(p in determined for p in inputs.positions)
    other = inputs.positions[2 + known[2]]
    coarse = known[2] != known[3] and not contribution.on_score and _by_quotient(indices, inputs, other)
    return Writers(known, cycles.get("q", 0), cycles.get("k", 0), repeat, coarse, tuple(dict.fromkeys(clamps)))


def _by_quotient(indices: Sequence[tuple[Node, Any]], inputs: ScoreMod, position: Node) -> bool:
    """Whether indices depend on a position only as ``position // n``, where n is at least ``COARSE``."""
    found = [coordinate_of(i, inputs) for i, _ in indices if position in cone(i)]
    return all(c is not None and c.operation == "div" and c.divisor >= COARSE for c in found)


def _determined(
    indices: Sequence[tuple[Node, Any]], inputs: ScoreMod, ranges: dict[Node, Any], clamps: list[Clamp] | None = None
) -> set[Node]:
    """Return the positions that indices determine. With ``clamps``: strictly between the bounds that are put into it."""
    determined: set[Node] = set()
    # An index may determine a position only after another index has determined the other positions in it.
    for _ in indices:
        for index, size in indices:
            passed: list[Clamp] | None = None if clamps is None else []
            found = affine(index, inputs, passed)
            terms = {p: n for p, n in zip(inputs.positions, found.factors, strict=True) if n} if found else {}
            new = set(terms) - determined
            if passed:
                separates = _beside_clamps(index, inputs) <= determined and _stays_inside(index, passed, inputs, ranges)
            else:
                separates = _separates(index, terms, size, ranges)
            if len(new) == 1 and separates:
                determined |= new
                if passed:
                    clamps += passed
    return determined


def _beside_clamps(index: Node, inputs: ScoreMod) -> set[Node]:
    """Return the positions in an index that are not operands of a clamp: at its bounds the index still depends on them."""
    found, pending = set(), [index]
    while pending:
        node = pending.pop()
        if node in inputs.positions:
            found.add(node)
        elif clamp_of(node) is None:
            pending += node.all_input_nodes
    return found


def _stays_inside(index: Node, clamps: list[Clamp], inputs: ScoreMod, ranges: dict[Node, Any]) -> bool:
    """Whether a clamped index is not negative, and nothing in it wraps."""
    if len(clamps) > 1 or not all(isinstance(n, int) for n in ranges.values()):
        return False
    (clamp,) = clamps
    operand = affine(clamp.node, inputs)
    low, _ = interval(index, ranges)
    exact = operand is not None and interval(clamp.node, ranges) == span(operand, list(ranges.values()))
    return exact and low is not None and low >= 0


def _separates(index: Node, terms: dict[Node, int], size: Any, ranges: dict[Node, Any]) -> bool:
    """Whether different values of an index are different elements: a negative index is counted from the end.

    ``terms``: the factors of its positions.
    """
    if index in ranges:
        # Where the position is beyond the size, nothing is written.
        return True
    low, high = interval(index, ranges)
    if low is None or high is None or not all(isinstance(ranges[p], int) for p in terms):
        return False
    # An interval of another width is that of a sum that wraps.
    width = sum(abs(n) * (ranges[p] - 1) for p, n in terms.items())
    return high - low == width and statically_known_true(width < size)
