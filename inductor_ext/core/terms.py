"""Expresses a tensor of Dynamo's graph as a sum of terms ``± base``, where each term is a view of its base.

A view only moves dims. So a matrix that is written ``F[..., None] - F[..., None, :] + i.unsqueeze(-2)`` has the same three
terms if it is written with ``repeat``, ``transpose`` and slices, or with ``expand``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ..torch_api.graph import is_torch
from .fx import called, fake_tensor, full_index, indices_of, shape_of, value_of, value_or_none

_ALIASES = {
    "truediv": "div",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
    "multiply": "mul",
    "absolute": "abs",
    "negative": "neg",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "invert": "not",
    "logical_not": "not",
    "bitwise_not": "not",
    "log_sigmoid": "logsigmoid",
    "bmm": "matmul",
    "mT": ".mT",
    "T": ".T",
    "numpy_T": ".T",
    "reshape": "view",
    "greater_equal": "ge",
    "less_equal": "le",
    "greater": "gt",
    "less": "lt",
}


#: The names of ops that only change the dtype of their operand, or return it.
CASTS = {"to", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int", "bool"}


def canonical_name(name: str) -> str:
    """The one name that stands for all names of an op, which may be an operator's method (``__eq__``)."""
    plain = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    return _ALIASES.get(plain, plain)


def op(node: Any) -> str:
    """The name of a node's op, the same for a function, a method and an attribute; "" for anything that is not an op."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return ""
    if node.target is getattr:
        return f".{node.args[1]}"
    return canonical_name(called(node))


def arg(node: Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a node by position or by name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def calls_torch(node: Node) -> bool:
    """Whether a node calls a function or method of torch or an operator, and no other function of the same name."""
    if node.op == "call_method" or node.target is getattr:
        return True
    return node.op == "call_function" and is_torch(node.target)


def is_tensor(node: Any) -> bool:
    """Whether a node computes one tensor."""
    return fake_tensor(node) is not None


def number(x: Any) -> float | None:
    """The value of a Python number of the graph; None for anything else. A symbolic number is specialised to its value."""
    value = value_or_none(x)
    return float(value) if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) else None


def reads_shape(node: Node, operand: Node) -> bool:
    """Whether a node reads only the shape (or the dtype) of one of its operands."""
    if op(node) in ("view_as", "reshape_as", "expand_as", "type_as"):
        return node.args[0] is not operand
    return op(node) in ("size", ".shape", "sym_size", "dim")


def binary(node: Any, name: str) -> bool:
    """Whether a node is the op ``name`` with two operands and no other argument (no ``alpha``, no ``rounding_mode``)."""
    return op(node) == name and len(node.args) == 2 and not node.kwargs


def maximum_of(node: Any) -> tuple[Node, list[Node]] | None:
    """``max`` or ``amax`` of which a node is the result, and the nodes that belong to it; None for other nodes."""
    nodes = [node]
    if op(node) in ("getitem", ".values"):
        if op(node) == "getitem" and node.args[1] != 0:
            return None
        nodes.append(node.args[0])
    return (nodes[-1], nodes) if op(nodes[-1]) in ("max", "amax") else None


def is_along_last(reduction: Node) -> bool:
    """Whether a reduction is along the last dim of its operand."""
    return arg(reduction, 1, "dim") in (-1, len(shape_of(arg(reduction, 0, "input"))) - 1, [-1], (-1,))


def is_one(size: Any) -> bool:
    """Whether a size is the number 1 (a symbolic one is not)."""
    return isinstance(size, int) and size == 1


@dataclass(frozen=True)
class Term:
    """``sign * base``: dim d of the sum is dim ``dims[d]`` of the base, from index ``starts[d]`` on (None: broadcast)."""

    sign: int
    base: Any
    dims: tuple[int | None, ...]
    starts: tuple[int, ...]


class NotASum(Exception):
    """A node is not a view that only moves dims."""


def whole(node: Node, sign: int = 1) -> Term:
    """A node as a single term whose base is the node itself."""
    sizes = shape_of(node)
    return Term(sign, node, tuple(None if is_one(s) else d for d, s in enumerate(sizes)), (0,) * len(sizes))


def terms(node: Node, opaque: Callable[[Node], list[Term] | None] = lambda node: None) -> list[Term]:
    """The terms of ``node``. If ``opaque`` returns terms for a node, they are used and the node is not analysed."""
    known = opaque(node)
    if known is not None:
        return known
    name = op(node)
    if name in ("add", "sub") and all(is_tensor(a) for a in node.args) and len(node.args) == 2 and not node.kwargs:
        rank = len(shape_of(node))
        first, second = (_aligned(terms(a, opaque), rank) for a in node.args)
        return first + ([replace(t, sign=-t.sign) for t in second] if name == "sub" else second)
    if name == "neg":
        return [replace(t, sign=-t.sign) for t in terms(node.args[0], opaque)]
    if name in ("contiguous", "clone") or (name in ("float", "double", "to") and _widens(node)):
        return terms(node.args[0], opaque)
    if name == "cat" and (behind := _behind_zeros(node)) is not None:
        moved = terms(behind[0], opaque)
        # A slice that begins after the first row has lost it, and zeros in its place do not bring it back.
        if all(t.starts[behind[1]] <= 0 for t in moved):
            return [_shift(t, behind[1]) for t in moved]
        return [whole(node)]
    if name in _VIEWS and is_tensor(node.args[0]):
        try:
            return [_VIEWS[name](node, t) for t in terms(node.args[0], opaque)]
        except NotASum:
            return [whole(node)]
    return [whole(node)]


def view_of(node: Node) -> Term:
    """``node`` as a view of one base, without an analysis of signs and sums."""
    return views_of(node)[-1]


def views_of(node: Node) -> list[Term]:
    """``node`` as a view of itself, of its operand, of that one's operand, and so on to the last base."""
    name = op(node)
    if name in ("contiguous", "clone") or (name in ("float", "double", "to") and _widens(node)):
        return [whole(node), *views_of(node.args[0])]
    if name in _VIEWS and is_tensor(node.args[0]):
        try:
            return [whole(node), *(_VIEWS[name](node, term) for term in views_of(node.args[0]))]
        except NotASum:
            pass
    return [whole(node)]


def _widens(node: Node) -> bool:
    before, after = value_of(node.args[0]), value_of(node)
    return before.device == after.device and torch.promote_types(before.dtype, after.dtype) == after.dtype


def _aligned(sum_: Sequence[Term], rank: int) -> list[Term]:
    pad = [rank - len(t.dims) for t in sum_]
    return [replace(t, dims=(None,) * p + t.dims, starts=(0,) * p + t.starts) for t, p in zip(sum_, pad, strict=True)]


def _behind_zeros(node: Node) -> tuple[Node, int] | None:
    """X and the dim if ``node`` is ``cat([one row of zeros, X], dim)``; otherwise None."""
    parts, dim = list(arg(node, 0, "tensors")), arg(node, 1, "dim", 0)
    dim %= len(shape_of(node))
    if len(parts) == 2 and op(parts[0]) in ("zeros", "new_zeros", "zeros_like") and is_one(shape_of(parts[0])[dim]):
        return parts[1], dim
    return None


def _shift(term: Term, dim: int) -> Term:
    return _started(term, [-(d == dim) for d in range(len(term.dims))])


def _started(term: Term, more: Sequence[int]) -> Term:
    """``term`` with ``more[d]`` added to the start of each dim d that is not broadcast."""
    moved = zip(term.dims, term.starts, more, strict=True)
    return replace(term, starts=tuple(0 if dim is None else start + by for dim, start, by in moved))


def _pick(term: Term, order: Sequence[int | None]) -> Term:
    """The dims of ``term`` in a new order, in which None is a new dim."""
    dims = tuple(None if d is None else term.dims[d] for d in order)
    return replace(term, dims=dims, starts=tuple(0 if d is None else term.starts[d] for d in order))


def _unsqueeze(node: Node, term: Term) -> Term:
    order: list[int | None] = list(range(len(term.dims)))
    order.insert(arg(node, 1, "dim") % (len(order) + 1), None)
    return _pick(term, order)


def _transpose(node: Node, term: Term) -> Term:
    order = list(range(len(term.dims)))
    a, b = (arg(node, i, f"dim{i - 1}", node.kwargs.get(f"axis{i - 1}")) % len(order) for i in (1, 2))
    order[a], order[b] = order[b], order[a]
    return _pick(term, order)


def _matrix_transpose(node: Node, term: Term) -> Term:
    order = list(range(len(term.dims)))
    if len(order) < 2 or (op(node) == ".T" and len(order) != 2):
        raise NotASum
    return _pick(term, [*order[:-2], order[-1], order[-2]])


def _permute(node: Node, term: Term) -> Term:
    first = arg(node, 1, "dims")
    order = first if isinstance(first, (list, tuple)) else node.args[1:]
    return _pick(term, [d % len(term.dims) for d in order])


def _reshaped(node: Node, term: Term) -> Term:
    """A view that inserts, removes, broadcasts or repeats dims of size one. Raises NotASum for any other view."""
    before, after = shape_of(node.args[0]), shape_of(node)
    source = [d for d, size in enumerate(before) if not is_one(size)]
    target = [d for d, size in enumerate(after) if not is_one(size)]
    order: list[int | None] = [None] * len(after)
    if op(node) in ("expand", "repeat", "expand_as"):
        added = len(after) - len(before)
        for d, size in enumerate(before):
            grown = after[d + added] is not size and after[d + added] != size
            if grown and not is_one(size):
                raise NotASum
            order[d + added] = d
    elif [before[d] for d in source] == [after[d] for d in target]:
        for d, at in zip(source, target, strict=True):
            order[at] = d
    else:
        raise NotASum
    return _pick(term, order)


def _getitem(node: Node, term: Term) -> Term:
    index = indices_of(node)
    if not is_tensor(node.args[0]) or any(isinstance(i, (int, Node, list)) for i in index):
        raise NotASum
    index = full_index(index, len(term.dims))
    order: list[int | None] = []
    starts: list[int] = []
    dim = 0
    for i in index:
        if i is None:
            order.append(None)
            starts.append(0)
            continue
        if i.stop is not None or i.step not in (None, 1) or i.start not in (None, 0, 1):
            raise NotASum
        order.append(dim)
        starts.append(i.start or 0)
        dim += 1
    return _started(_pick(term, order), starts)


_VIEWS: dict[str, Callable[[Node, Term], Term]] = {
    "unsqueeze": _unsqueeze,
    "transpose": _transpose,
    "t": _matrix_transpose,
    ".mT": _matrix_transpose,
    ".T": _matrix_transpose,
    "permute": _permute,
    "view": _reshaped,
    "squeeze": _reshaped,
    "expand": _reshaped,
    "expand_as": _reshaped,
    "repeat": _reshaped,
    operator.getitem.__name__: _getitem,
}
