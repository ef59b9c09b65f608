"""Recognise sums over rows of captured tensors in a score_mod.

Examples are ``torch.dot(a[b, h, q], c[b, k])`` and ``(a[h, q] * c[h, k]).sum(-1)``.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..core.fx import called, cone, dtype_of, fake_tensor
from .score_mod import ScoreMod

_DOTS = {"dot", "vdot", "inner", "matmul"}
_PRODUCTS = {"mul", "multiply"}


def summed(node: Node) -> tuple[Any, ...] | None:
    """Return the vector that ``node`` sums, or the two vectors whose products it sums, or None for anything else."""
    if _rank(node) != 0:
        return None
    if called(node) in _DOTS and len(node.args) == 2 and not node.kwargs and all(_rank(x) == 1 for x in node.args):
        return tuple(node.args)
    dims = (*node.args[1:], *node.kwargs.values())
    if called(node) == "sum" and _rank(node.args[0]) == 1 and all(d in (0, -1, (0,), (-1,), [0], [-1]) for d in dims):
        return (node.args[0],)
    return None


def factors(node: Node) -> tuple[Node, Node] | None:
    """Return the vectors of the query and of the key if ``node`` is their inner product, otherwise None.

    Products of integers may wrap before they are added, which no matmul does in the same way.
    """
    terms = summed(node)
    if terms is not None and len(terms) == 1 and called(terms[0]) in _PRODUCTS and not terms[0].kwargs:
        terms = terms[0].args
    if terms is None or len(terms) != 2 or any(_rank(x) != 1 for x in terms):
        return None
    if not all(dtype_of(x).is_floating_point for x in terms):
        return None
    inputs = ScoreMod.of(node.graph)
    reached = [cone(x) for x in terms]
    for first, second in ((0, 1), (1, 0)):
        if inputs.k not in reached[first] and inputs.q not in reached[second]:
            return terms[first], terms[second]
    return None


def depends_on_position(node: Node) -> bool:
    """Return whether ``node`` is computed from any of b, h, q and k."""
    return not cone(node).isdisjoint(ScoreMod.of(node.graph).positions)


def _rank(node: Any) -> int | None:
    value = fake_tensor(node)
    return None if value is None else value.dim()
