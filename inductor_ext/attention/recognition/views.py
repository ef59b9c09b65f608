"""Views of Dynamo's graphs, read at one index: which element of which tensor is element ``index`` of a view?

``transpose``, ``unsqueeze``, ``expand``, slices and the like move the entries of an index. ``view`` and ``reshape`` count
the element in the block of dims that they change, and split that number by the dims of their operand.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
from torch.fx import Node

from ...core.fx import dtype_of, full_index, indices_of, shape_of
from ...core.terms import arg, is_one, is_tensor, op
from ...torch_api.sizes import statically_known_true
from .indices import ZERO, Ranges

#: One entry for each dim: an expression in the positions, or something else that computes a number for each score.
Index = tuple[Any, ...]


class NotAView(Exception):
    """A node is not a view of one tensor, or its elements are not those of the operand in an order that is understood."""


def source(node: Node, index: Index, ranges: Ranges) -> tuple[Node, Index]:
    """Return the operand of which ``node`` is a view, and the index of the element there. Raises NotAView for other ops."""
    name = op(node)
    # ``x.view(torch.int32)`` reads the same bytes as other numbers.
    known = set(node.kwargs) <= {"dim", "dims", "dim0", "dim1", "start", "length", "index", "repeats", "memory_format"}
    if (
        name not in VIEWS
        or not known
        or not node.args
        or not is_tensor(node.args[0])
        or dtype_of(node) is not dtype_of(node.args[0])
    ):
        raise NotAView
    return node.args[0], tuple(VIEWS[name](node, index, ranges))


def _same(node: Node, index: Index, ranges: Ranges) -> Index:
    return index


def _unsqueeze(node: Node, index: Index, ranges: Ranges) -> Index:
    dim = arg(node, 1, "dim") % len(index)
    return index[:dim] + index[dim + 1 :]


def _squeeze(node: Node, index: Index, ranges: Ranges) -> Index:
    sizes, dims = shape_of(node.args[0]), arg(node, 1, "dim")
    chosen = (
        range(len(sizes))
        if dims is None
        else [d % len(sizes) for d in (dims if isinstance(dims, (tuple, list)) else [dims])]
    )
    rest = iter(index)
    return tuple(ZERO if d in chosen and is_one(size) else next(rest) for d, size in enumerate(sizes))


def _permuted(index: Index, order: Sequence[int]) -> Index:
    """Return the index before dims were put into ``order``."""
    before = [ZERO] * len(index)
    for at, dim in enumerate(order):
        before[dim] = index[at]
    return tuple(before)


def _permute(node: Node, index: Index, ranges: Ranges) -> Index:
    order = node.args[1] if isinstance(arg(node, 1, "dims"), (list, tuple)) else node.args[1:] or node.kwargs["dims"]
    return _permuted(index, [d % len(index) for d in order])


def _transpose(node: Node, index: Index, ranges: Ranges) -> Index:
    order = list(range(len(index)))
    a, b = (arg(node, i, f"dim{i - 1}") % len(order) for i in (1, 2))
    order[a], order[b] = order[b], order[a]
    return _permuted(index, order)


def _matrix_transpose(node: Node, index: Index, ranges: Ranges) -> Index:
    if len(index) < 2 or (op(node) in (".T", "t") and len(index) != 2):
        raise NotAView
    return (*index[:-2], index[-1], index[-2])


def broadcast(index: Index, sizes: Sequence[Any]) -> Index:
    """Return the index of an element of an operand of these sizes that is broadcast to the rank of ``index``."""
    aligned = index[len(index) - len(sizes) :]
    return tuple(ZERO if is_one(size) else i for i, size in zip(aligned, sizes, strict=True))


def _expand(node: Node, index: Index, ranges: Ranges) -> Index:
    return broadcast(index, shape_of(node.args[0]))


def _repeat(node: Node, index: Index, ranges: Ranges) -> Index:
    sizes = shape_of(node.args[0])
    aligned = index[len(index) - len(sizes) :]
    after = shape_of(node)[len(index) - len(sizes) :]
    return tuple(_wrapped(i, n, grown, ranges) for i, n, grown in zip(aligned, sizes, after, strict=True))


def _wrapped(index: Any, size: Any, repeated: Any, ranges: Ranges) -> Any:
    if is_one(size):
        return ZERO
    if statically_known_true(size == repeated):
        return index
    return ranges.divided(_expression(index), _number(size))[1]


def _reshape(node: Node, index: Index, ranges: Ranges) -> Index:
    """Match dims of the view with dims of its operand, block by block of equally many elements."""
    before, after = shape_of(node.args[0]), shape_of(node)
    dims = [d for d, size in enumerate(before) if not is_one(size)]
    views = [d for d, size in enumerate(after) if not is_one(size)]
    found = [ZERO] * len(before)
    while dims and views:
        block, of_view = [dims.pop(0)], [views.pop(0)]
        while not statically_known_true(_count(before, block) == _count(after, of_view)):
            smaller = _number(_count(before, block)) < _number(_count(after, of_view))
            grown, rest = (block, dims) if smaller else (of_view, views)
            if not rest:
                raise NotAView
            grown.append(rest.pop(0))
        if len(block) == len(of_view) == 1:
            found[block[0]] = index[of_view[0]]
            continue
        flat = ranges.joined([_expression(index[d]) for d in of_view], [_number(after[d]) for d in of_view])
        for dim, i in zip(block, ranges.split(flat, [_number(before[d]) for d in block]), strict=True):
            found[dim] = i
    if dims or views:
        raise NotAView
    return tuple(found)


def _count(sizes: Sequence[Any], dims: Sequence[int]) -> Any:
    total: Any = 1
    for dim in dims:
        total = total * sizes[dim]
    return total


def _expression(index: Any) -> sympy.Expr:
    if not isinstance(index, sympy.Expr):
        raise NotAView
    return index


def _number(size: Any) -> int:
    if not isinstance(size, int):
        raise NotAView
    return size


def _getitem(node: Node, index: Index, ranges: Ranges) -> Index:
    """Integers, slices, None and an ellipsis in brackets."""
    sizes = shape_of(node.args[0])
    entries = full_index(indices_of(node), len(sizes))
    rest, found = iter(index), []
    dims = iter(sizes)
    for entry in entries:
        if entry is None:
            next(rest)
            continue
        size = next(dims)
        if isinstance(entry, slice):
            found.append(_sliced(entry, next(rest), size))
        elif isinstance(entry, int) and not isinstance(entry, bool):
            found.append(sympy.Integer(entry % _number(size) if entry < 0 else entry))
        else:
            raise NotAView
    return tuple(found)


def _sliced(entry: slice, index: Any, size: Any) -> Any:
    start, step = entry.start or 0, entry.step or 1
    if not isinstance(start, int) or not isinstance(step, int):
        raise NotAView
    if start < 0:
        start = max(start + _number(size), 0)
    return index if (start, step) == (0, 1) else _expression(index) * step + start


def _select(node: Node, index: Index, ranges: Ranges) -> Index:
    dim, at = arg(node, 1, "dim") % (len(index) + 1), arg(node, 2, "index")
    if not isinstance(at, int):
        raise NotAView
    at = at % _number(shape_of(node.args[0])[dim]) if at < 0 else at
    return (*index[:dim], sympy.Integer(at), *index[dim:])


def _narrow(node: Node, index: Index, ranges: Ranges) -> Index:
    dim, start = arg(node, 1, "dim") % len(index), arg(node, 2, "start")
    if not isinstance(start, int) or start < 0:
        raise NotAView
    return (*index[:dim], _expression(index[dim]) + start, *index[dim + 1 :])


def _repeat_interleave(node: Node, index: Index, ranges: Ranges) -> Index:
    repeats, dim = arg(node, 1, "repeats"), arg(node, 2, "dim")
    if not isinstance(repeats, int) or not isinstance(dim, int) or set(node.kwargs) - {"dim", "repeats"}:
        raise NotAView
    dim %= len(index)
    return (*index[:dim], ranges.divided(_expression(index[dim]), repeats)[0], *index[dim + 1 :])


VIEWS: dict[str, Callable[[Node, Index, Ranges], Index]] = {
    "contiguous": _same,
    "clone": _same,
    "view_as": _reshape,
    "reshape_as": _reshape,
    "view": _reshape,
    "flatten": _reshape,
    "unflatten": _reshape,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "permute": _permute,
    "transpose": _transpose,
    "t": _matrix_transpose,
    ".mT": _matrix_transpose,
    ".T": _matrix_transpose,
    "expand": _expand,
    "expand_as": _expand,
    "broadcast_to": _expand,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "select": _select,
    "narrow": _narrow,
    operator.getitem.__name__: _getitem,
}
