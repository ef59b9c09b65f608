"""Sizes that may be symbolic, and the expressions that they are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Mod
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

__all__ = ["CeilDiv", "FloorDiv", "Mod", "ValueRanges", "bound_sympy", "statically_known_true"]


def hint(value: Any) -> int:
    """The size that autotuning assumes for a symbolic integer."""
    sizevars = V.graph.sizevars
    read = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint
    return int(read(value))


def length(size: Any) -> int:
    """A size of Dynamo's graph as it was when that was traced, without a guard on it."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def known_at_most(value: Any, most: int) -> bool:
    """Whether a size is known to be at most ``most``."""
    return V.graph.sizevars.statically_known_leq(value, most)


def size_hint(size: Any) -> int | None:
    """The size that an int or SymInt of a graph had when it was traced; None where data decides it."""
    return size if isinstance(size, int) else size.node.hint


def guarded_true(condition: Any) -> bool:
    """Whether a condition on sizes holds; where they are symbolic and it holds for the traced ones, a guard makes it so.

    A condition that does not hold for the traced sizes is False without a guard.
    """
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    if statically_known_true(condition):
        return True
    return condition.node.hint is True and guard_or_false(condition)
