"""Proves which index tensors of an FX graph hold a permutation, every row equally often, or no value twice.

The proofs need only the graph. The joint graph of AOTAutograd is functional, so an op that overwrites a part of an index
creates a new node, and nothing is known about this node. All proofs are about the *values* of a flattened integer tensor:

    permutation   each of 0 .. n-1 once           sort and argsort indices, randperm, arange, flips, compositions, inverses
    repeated      each of 0 .. n/k-1 k times      ``permutation // k``, ``permutation % (n / k)``, repeated aranges
    injective     no value twice                  parts of permutations, topk indices, the indices of one nonzero, masks
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ..core.fx import CASTS, MASKS, SAME_ORDER, fake_tensor, same_shape, shape_of, value_of, value_or_none
from ..core.integers import SORTS, holds_integers, sorted_dim, value_range
from ..torch_api.sizes import guarded_true, statically_known_true

aten = torch.ops.aten
prims = torch.ops.prims

_DIVISIONS = {aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default}
_REMAINDERS = {aten.remainder.Scalar, aten.remainder.Tensor, aten.fmod.Scalar}


@dataclass(frozen=True)
class Repeated:
    """``permutation // times``, or ``permutation % (length / times)`` if ``strided``.

    permutation: the node of the permutation; None for 0, 1, 2... length: the number of its values. times: how often every
    row occurs, an int or the node of a symbolic one.
    """

    permutation: Node | None
    length: Any
    times: int | Node
    strided: bool = False

    def covers(self, rows: Any) -> bool:
        """Whether the rows that occur are provably 0 .. rows-1."""
        return guarded_true(rows * value_of(self.times) == self.length)


def numel(node: Node) -> Any:
    """The number of elements of a node's tensor, an int or a symbolic one."""
    total: Any = 1
    for n in shape_of(node):
        total = total * n
    return total


def _orders_all(call: Node) -> bool:
    """Whether a sort, argsort or topk runs over all elements of its input at once."""
    shape = shape_of(call.args[0])
    return not shape or _same(shape[sorted_dim(call)], numel(call.args[0]))


def _same(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def same_values(node: Node) -> Node:
    """Skip views, copies and wide enough integer casts: the node that has the same values in the same flattened order."""
    while True:
        if node.target in SAME_ORDER or (node.target in CASTS and _keeps_integers(node)):
            node = node.args[0]
        else:
            return node


def _keeps_integers(cast: Node) -> bool:
    """Whether an integer cast keeps every index: the new type must hold every value that can occur.

    False for bool and uint8, because such tensors index as masks.
    """
    before, after = value_of(cast.args[0]).dtype, value_of(cast).dtype
    if any(d.is_floating_point or d.is_complex or d in MASKS for d in (before, after)):
        return False
    return holds_integers(after, *value_range(cast.args[0]))


def is_permutation(node: Node) -> bool:
    """Whether the values of ``node``, flattened, are 0 .. numel-1 in some order."""
    node = same_values(node)
    if node.op != "call_function" or fake_tensor(node) is None:
        return False
    if sorted_tensor(node) is not None:
        return True
    if node.target is aten.randperm.default:
        return holds_integers(value_of(node).dtype, 0, numel(node) - 1)
    if node.target in (aten.argsort.default, aten.argsort.stable):
        return _orders_all(node)
    if is_iota(node) or _is_rotated_iota(node):
        return True
    if node.target in (aten.flip.default, prims.rev.default):
        return is_permutation(node.args[0])
    if node.target is aten.index.Tensor:
        table, (index, *others) = node.args
        whole = isinstance(index, Node) and not others and len(shape_of(table)) == 1
        return whole and _same(numel(table), numel(index)) and is_permutation(table) and is_permutation(index)
    return stored_inverse(node) is not None


def is_iota(node: Node) -> bool:
    """Whether ``node`` is 0, 1, 2..."""
    if node.target is prims.iota.default:
        counts = node.kwargs.get("start") == 0 and node.kwargs.get("step") == 1
    else:
        counts = node.target is aten.arange.default and len(node.args) == 1
    return counts and holds_integers(value_of(node).dtype, 0, numel(node) - 1)


def _is_rotated_iota(node: Node) -> bool:
    """Whether ``node`` is ``(arange(n) + c) % n``, the decomposition of ``roll``."""
    if node.target not in _REMAINDERS or not _same(node.args[1], numel(node)):
        return False
    total = node.args[0]
    if total.target is not aten.add.Tensor or total.kwargs or not isinstance(total.args[1], int) or total.args[1] < 0:
        return False
    # The sum must not overflow. No value is negative, so fmod is the remainder.
    return is_iota(total.args[0]) and holds_integers(value_of(total).dtype, 0, numel(node) + total.args[1])


def sorted_tensor(node: Node) -> Node | None:
    """The sorted tensor, if ``node`` is the indices (result 1) of a sort over all elements."""
    if node.target is not operator.getitem or node.args[1] != 1 or node.args[0].target not in SORTS:
        return None
    return node.args[0].args[0] if _orders_all(node.args[0]) else None


def argsorted(node: Node) -> Node | None:
    """The permutation [N], if ``node`` is its ascending argsort and therefore its inverse."""
    source = sorted_tensor(node)
    if source is None:
        return None
    sort = node.args[0]
    descending = sort.kwargs.get("descending", len(sort.args) > 2 and sort.args[2])
    source = same_values(source)
    return source if not descending and len(shape_of(source)) == 1 and is_permutation(source) else None


def stored_inverse(node: Node) -> Node | None:
    """The permutation p, if ``node`` is computed by storing an arange (or a permutation) at the indices in p.

    For an arange the result is the inverse of p, ``empty[p] = arange(n)``. Every element is overwritten, because p has every
    index once.
    """
    if node.target in (aten.index_put.default, aten._unsafe_index_put.default):
        base, indices, values, *accumulate = node.args
        if any(accumulate) or len(indices) != 1 or not isinstance(indices[0], Node):
            return None
        index = indices[0]
    elif node.target is aten.scatter.src:
        base, _, index, values = node.args
    else:
        return None
    one_dim = isinstance(values, Node) and len(shape_of(base)) == 1 == len(shape_of(values))
    if one_dim and _same(numel(base), numel(index)) and _same(numel(values), numel(index)):
        return index if is_permutation(index) and is_permutation(values) else None
    return None


def repeated(node: Node) -> Repeated | None:
    """The proof that ``node`` has every row equally often (once, if it is a permutation); None if there is no proof."""
    node = same_values(node)
    if is_permutation(node):
        return Repeated(node, numel(node), 1)
    if node.target is aten.index.Tensor:
        table, (index, *others) = node.args
        base = _repeated_iota(same_values(table)) if isinstance(index, Node) and not others else None
        if base is not None and len(shape_of(table)) == 1 and _same(numel(index), base.length) and is_permutation(index):
            return replace(base, permutation=same_values(index))
        return None
    return _divided(node) or _repeated_iota(node)


def _divided(node: Node) -> Repeated | None:
    """The proof for ``permutation // k`` and ``permutation % rows``."""
    if node.target not in (*_DIVISIONS, *_REMAINDERS) or not isinstance(node.args[0], Node):
        return None
    inner, length = same_values(node.args[0]), numel(node)
    divisor = value_or_none(node.args[1])
    whole = not value_of(node).dtype.is_floating_point
    if not whole or not isinstance(divisor, (int, torch.SymInt)) or not is_permutation(inner):
        return None
    # The division is computed in the dtype of its operand. The divisor is cast to this dtype first.
    if not statically_known_true(divisor > 0) or not holds_integers(value_of(node.args[0]).dtype, 0, divisor):
        return None
    if node.target in _REMAINDERS:
        # Nothing is 0 times every row, of any number of rows.
        static = isinstance(divisor, int) and isinstance(length, int) and length > 0
        return Repeated(inner, length, length // divisor, strided=True) if static and length % divisor == 0 else None
    floor = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") == "floor"
    return Repeated(inner, length, node.args[1]) if floor else None


def _repeated_iota(node: Node) -> Repeated | None:
    """The proof for a repeated arange, by element or as a whole: [S], [S, 1] or [1, S] expanded, or ``repeat(k)``."""
    if node.target is aten.repeat.default and is_iota(same_values(node.args[0])) and len(node.args[1]) == 1:
        times = node.args[1][0]
        return Repeated(None, numel(node), times, strided=True) if isinstance(times, int) and times > 0 else None
    if node.target is not aten.expand.default or not is_iota(same_values(node.args[0])):
        return None
    before, after = shape_of(node.args[0]), shape_of(node)
    if len(before) > 2 or len(after) != 2 or not all(isinstance(n, int) for n in (*before, *after)):
        return None
    # ``expand`` aligns dims on the right. One of the two dims belongs to the arange and keeps its size.
    before = (1,) * (2 - len(before)) + before
    if before[1] == after[1] and before[0] == 1 and after[0] > 0:
        return Repeated(None, numel(node), after[0], strided=True)
    if before[0] == after[0] and before[1] == 1 and after[1] > 0:
        return Repeated(None, numel(node), after[1])
    return None


def names_once(indices: Sequence[Node | None]) -> bool:
    """Whether a tuple of indices, as ``index_put`` takes them, selects no element twice."""
    chosen = [i for i in indices if i is not None]
    if len(chosen) == 1:
        return value_of(chosen[0]).dtype in MASKS or is_injective(chosen[0])
    columns = [_nonzero_column(i) for i in chosen]
    alike = all(same_shape(i, chosen[0]) for i in chosen)
    if not alike or None in columns or len({source for source, _ in columns}) > 1:
        return False
    return {at for _, at in columns} == set(range(len(shape_of(columns[0][0].args[0]))))


def _nonzero_column(node: Node) -> tuple[Node, int] | None:
    """The call of ``nonzero`` and the number of its column, if ``node`` is one of its columns."""
    node = same_values(node)
    if node.target is operator.getitem and node.args[0].target is aten.unbind.int:
        (source, *dim), at = node.args[0].args, node.args[1]
        dim = dim[0] if dim else 0
    elif node.target is aten.select.int:
        source, dim, at = node.args
    else:
        return None
    return (source, at) if source.target is aten.nonzero.default and dim in (1, -1) else None


def is_injective(node: Node) -> bool:
    """Whether no value of ``node``, flattened, occurs twice."""
    node = same_values(node)
    if is_permutation(node):
        return True
    if node.target is aten.slice.Tensor:
        return is_injective(node.args[0])
    if node.target is operator.getitem and node.args[1] == 1 and node.args[0].target is aten.topk.default:
        return _orders_all(node.args[0])
    if node.target is aten.index.Tensor:
        table, (index, *others) = node.args
        whole = isinstance(index, Node) and not others and len(shape_of(table)) == 1
        return whole and is_injective(table) and is_injective(index)
    column = _nonzero_column(node)
    return column is not None and len(shape_of(column[0].args[0])) == 1
