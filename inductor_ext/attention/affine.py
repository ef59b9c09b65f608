"""Integer expressions that are sums of multiples of the positions b, h, q and k and of a constant: ``q - k + 1023``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from ..core.fx import CASTS_AND_COPIES, dtype_of
from .bounds import interval
from .captured_grads import constant_of
from .score_mod import ScoreMod

aten = torch.ops.aten
#: The factors of b, h, q and k.
Factors = tuple[int, int, int, int]
NO_FACTORS: Factors = (0, 0, 0, 0)


@dataclass(frozen=True)
class Affine:
    """``sum(factor * position) + constant``, if no operation of the expression wraps."""

    factors: Factors
    constant: int

    def __add__(self, other: Affine) -> Affine:
        factors = tuple(x + y for x, y in zip(self.factors, other.factors, strict=True))
        return Affine(factors, self.constant + other.constant)

    def __mul__(self, number: int) -> Affine:
        return Affine(tuple(x * number for x in self.factors), self.constant * number)


@dataclass(frozen=True)
class Clamp:
    """``clamp(node, low, high)``: of several clamps, the tightest bounds. An end may be None."""

    node: Node
    low: int | None
    high: int | None


def clamp_of(node: Node) -> Clamp | None:
    """Return the clamp that a node is, or None if it is none or its bounds are not constants."""
    position = {aten.clamp.default: (1, 2), aten.clamp_min.default: (1, None), aten.clamp_max.default: (None, 1)}
    if node.target not in position or node.kwargs:
        return None
    low, high = (node.args[i] if i is not None and i < len(node.args) else None for i in position[node.target])
    if not all(x is None or type(x) is int for x in (low, high)):
        return None
    within = clamp_of(node.args[0])
    if within is None:
        return Clamp(node.args[0], low, high)
    lows, highs = ([x for x in ends if x is not None] for ends in ((low, within.low), (high, within.high)))
    return Clamp(within.node, max(lows, default=None), min(highs, default=None))


def affine(node: Any, inputs: ScoreMod, clamps: list[Clamp] | None = None) -> Affine | None:
    """Return an index of a score_mod as multiples of its positions, or None if it is something else.

    With a list of ``clamps``, the result holds where none of the clamps that are put into this list changes its operand.
    """
    constant = constant_of(node)
    if constant is not None:
        return Affine(NO_FACTORS, constant)
    if node in inputs.positions:
        return Affine(tuple(int(node is p) for p in inputs.positions), 0)
    # Positions are int32, and a narrower integer would be another number.
    if not isinstance(node, Node) or dtype_of(node) not in (torch.int32, torch.int64) or node.kwargs.get("alpha", 1) != 1:
        return None
    if clamps is not None and clamp_of(node) is not None:
        clamps.append(clamp_of(node))
        return affine(clamps[-1].node, inputs, clamps)
    if node.target in CASTS_AND_COPIES:
        return affine(node.args[0], inputs, clamps)
    if node.target is aten.neg.default:
        return _times(affine(node.args[0], inputs, clamps), -1)
    if node.target is aten.mul.Tensor:
        x, factor = node.args if constant_of(node.args[1]) is not None else reversed(node.args)
        return _times(affine(x, inputs, clamps), constant_of(factor))
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        x, y = (affine(a, inputs, clamps) for a in node.args)
        y = _times(y, -1) if node.target is aten.sub.Tensor else y
        return None if x is None or y is None else x + y
    return None


def _times(x: Affine | None, number: int | None) -> Affine | None:
    return None if x is None or number is None else x * number


def span(found: Affine, lengths: Sequence[int]) -> tuple[int, int]:
    """Return the least and the greatest value. ``lengths`` are those of b, h, q and k."""
    spans = [factor * (length - 1) for factor, length in zip(found.factors, lengths, strict=True)]
    return found.constant + sum(min(n, 0) for n in spans), found.constant + sum(max(n, 0) for n in spans)


def address(
    indices: Sequence[Any], shape: Sequence[Any], strides: Sequence[Any], inputs: ScoreMod, lengths: Sequence[Any]
) -> Affine | None:
    """Return the offset of ``tensor[indices]`` in elements, or None if it is not affine or not known to be in bounds.

    ``lengths`` are those of b, h, q and k. Nothing is known of symbolic sizes.
    """
    ranges = inputs.ranges(lengths)
    total = Affine(NO_FACTORS, 0)
    for index, size, stride in zip(indices, shape, strides, strict=True):
        term = affine(index, inputs)
        numbers = all(isinstance(n, (int, sympy.Integer)) for n in (size, stride, *lengths))
        if term is None or not numbers:
            return None
        low, high = span(term, lengths)
        # The interval of a sum that wraps is another one, and a negative index counts from the end.
        if interval(index, ranges) != (low, high) or low < 0 or high >= size:
            return None
        total += term * int(stride)
    return total
