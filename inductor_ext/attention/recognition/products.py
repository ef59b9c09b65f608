"""Matrix products of Dynamo's graphs with their operands: ``matmul``, ``bmm``, ``@``, ``einsum``, ``baddbmm``."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ...core.fx import fake_tensor, shape_of
from ...core.terms import arg, is_tensor, op
from ...torch_api.sizes import statically_known_true
from ..kinds import K, Q
from .indices import Ranges
from .views import Index


@dataclass(frozen=True)
class Operand:
    """One operand of a product. order: the dims of the node, as [batch dims of the product, its own dim, summed dim]."""

    node: Node
    order: tuple[int | None, ...]


@dataclass(frozen=True)
class Product:
    """``query @ key^T`` at ``index``: the dims of ``node`` that are neither queries nor keys are ``batch``, in order.

    query, key: operands with the dims ``[*batch, length, head dim]``; None stands for a batch dim that the operand lacks.
    """

    node: Node
    index: Index
    batch: tuple[int, ...]
    query: Operand
    key: Operand


def product_of(node: Node, index: Index, ranges: Ranges) -> Product | None:
    """Return ``node`` as a product of queries and keys, if element ``index`` of it is for the query q and the key k."""
    at = {i: dim for dim, i in enumerate(index)}
    if Q not in at or K not in at or fake_tensor(node) is None:
        return None
    letters = equation(node)
    if letters is None:
        return None
    first, second, out = letters
    of_q, of_k = out[at[Q]], out[at[K]]
    own = {letter: [x for x in (0, 1) if letter in (first, second)[x]] for letter in (of_q, of_k)}
    if sorted(x for xs in own.values() for x in xs) != [0, 1]:
        return None
    summed = (set(first) | set(second)) - set(out)
    if len(summed) != 1 or not summed <= set(first) & set(second):
        return None
    sizes = [dict(zip(x, shape_of(f), strict=True)) for x, f in zip((first, second), node_operands(node), strict=True)]
    (width,) = summed
    if not statically_known_true(sizes[0][width] == sizes[1][width]):
        return None
    batch = [letter for letter in out if letter not in (of_q, of_k)]
    operands = {}
    for letter in (of_q, of_k):
        which = own[letter][0]
        dims, operand = (first, second)[which], node_operands(node)[which]
        order = [*batch, letter, *summed]
        if not set(dims) <= set(order) or len(set(dims)) != len(dims):
            return None
        operands[letter] = Operand(operand, tuple(dims.index(x) if x in dims else None for x in order))
    return Product(node, index, tuple(out.index(x) for x in batch), operands[of_q], operands[of_k])


def node_operands(node: Node) -> tuple[Node, Node]:
    """Return both factors of a product."""
    return tuple(_factors(node))


def _factors(node: Node) -> list[Any]:
    if op(node) == "baddbmm":
        return [arg(node, 1, "batch1"), arg(node, 2, "batch2")]
    if op(node) == "einsum":
        rest = node.args[1:]
        return list(rest[0]) if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else list(rest)
    return list(node.args[:2]) if len(node.args) >= 2 else [arg(node, 0, "input"), arg(node, 1, "other")]


def _without_ellipses(first: str, second: str, out: str, ranks: Sequence[int]) -> tuple[str, str, str] | None:
    """The letters of an einsum with one for each dim that ``...`` stands for, counted from the last of these dims."""
    hidden = [rank - len(x.replace("...", "")) for rank, x in zip(ranks, (first, second), strict=True)]
    free = "".join(x for x in string.ascii_letters if x not in first + second)[: max(hidden, default=0)]
    counts = (*hidden, len(free))
    letters = tuple(x.replace("...", free[len(free) - n :]) for x, n in zip((first, second, out), counts, strict=True))
    return None if "." in "".join(letters) else letters


def equation(node: Node) -> tuple[str, str, str] | None:
    """Return the letters of the dims of both factors and of a product, or None if ``node`` is no product of two tensors."""
    name = op(node)
    if name == "einsum":
        text = node.args[0].replace(" ", "") if isinstance(node.args[0], str) else ""
        factors = _factors(node)
        sides = text.split("->")
        if len(sides) != 2 or len(factors) != 2 or sides[0].count(",") != 1 or not all(map(is_tensor, factors)):
            return None
        return _without_ellipses(*sides[0].split(","), sides[1], [len(shape_of(x)) for x in factors])
    if name not in ("matmul", "baddbmm") or len(_factors(node)) != 2 or any(fake_tensor(x) is None for x in _factors(node)):
        return None
    ranks = [len(shape_of(x)) for x in _factors(node)]
    if min(ranks) < 2:
        return None
    batch = "abcdefgh"[: max(ranks) - 2]
    first, second = batch[len(batch) - ranks[0] + 2 :] + "xz", batch[len(batch) - ranks[1] + 2 :] + "zy"
    return first, second, batch + "xy"
