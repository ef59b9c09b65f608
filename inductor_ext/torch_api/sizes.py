"""Sizes that may be symbolic, and functions in their expressions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch._inductor.virtualized import V
from torch.fx import Node, Proxy
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false, statically_known_true
from torch.utils._sympy.functions import CeilDiv, FloatTrueDiv, FloorDiv, IntTrueDiv, Mod, RoundToInt, ToFloat
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

__all__ = ["CeilDiv", "FloorDiv", "Mod", "ValueRanges", "bound_sympy", "statically_known_true"]


def hint(value: Any) -> int:
    """Return the size that autotuning assumes for a symbolic integer."""
    sizevars = V.graph.sizevars
    read = getattr(sizevars, "optimization_hint", None) or sizevars.size_hint
    return int(read(value))


def length(size: Any) -> int:
    """Return the value that a size of Dynamo's graph had when that was traced. No guard is added."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def known_at_most(value: Any, most: int) -> bool:
    """Return whether a size is known to be at most ``most``."""
    return V.graph.sizevars.statically_known_leq(value, most)


def is_unbacked(values: Sequence[Any]) -> bool:
    """Return whether one of these numbers, or a size of one of these tensors, depends on data."""
    return bool(free_unbacked_symbols([x for x in values if isinstance(x, (torch.SymInt, torch.Tensor))]))


def size_hint(size: Any) -> int | None:
    """Return the value that an int or SymInt of a graph had when it was traced, or None if it depends on data."""
    return size if isinstance(size, int) else size.node.hint


def has_all_symbols(sizes: Iterable[Any]) -> bool:
    """Return whether each symbol in symbolic sizes, as in ``4 * s``, is one of the sizes itself."""
    expressions = [n.node.expr for n in sizes if isinstance(n, torch.SymInt)]
    return {s for e in expressions for s in e.free_symbols} <= {e for e in expressions if e.is_Symbol}


def composed(size: torch.SymInt, read: Callable[[torch.SymInt], Node | None]) -> Node | None:
    """Insert nodes that compute a size, as ``4 * s``, from those that ``read`` finds for its symbols, and return the last.

    It is None if a symbol has no node, or if the expression rounds floats (``int(0.75 * s)``), which no node can be made of.
    """
    if any(isinstance(e, (FloatTrueDiv, IntTrueDiv, RoundToInt, ToFloat)) for e in sympy.preorder_traversal(size.node.expr)):
        return None
    symbols = {s: read(size.node.shape_env.create_symintnode(s, hint=None)) for s in size.node.expr.free_symbols}
    if None in symbols.values():
        return None
    return sympy_interp(PythonReferenceAnalysis, {s: Proxy(n) for s, n in symbols.items()}, size.node.expr).node


def guarded_true(condition: Any) -> bool:
    """Return whether a condition on sizes holds.

    If sizes are symbolic and the condition holds for the traced sizes, a guard is added. If it does not hold for the traced
    sizes, the result is False, without a guard.
    """
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    if statically_known_true(condition):
        return True
    return condition.node.hint is True and guard_or_false(condition)
