"""Which index tensors of an FX graph hold a permutation, every row equally often, or no value twice.

A proof from the graph alone: the joint graph of AOTAutograd is functional, so whatever overwrites a part of an index makes a
new node, of which nothing is known. Everything here is about the *values* of an integer tensor, flattened:

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

from ..core.integers import CASTS, SAME_VALUES, SORTS, holds_integers, sorted_dim, value_range
from ..torch_api.sizes import guarded_true, statically_known_true

aten = torch.ops.aten
prims = torch.ops.prims

_DIVISIONS = {aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default}
_REMAINDERS = {aten.remainder.Scalar, aten.remainder.Tensor, aten.fmod.Scalar}


@dataclass(frozen=True)
class Repeated:
    """``permutation // times``, or ``permutation % (length / times)`` if ``strided``.

    permutation: the node of the permutation of ``length`` values; None for 0, 1, 2... times: an int, or the node of a
    symbolic one.
    """

    permutation: Node | None
    length: Any
    times: int | Node
    strided: bool = False

    def covers(self, rows: Any) -> bool:
        """Whether the rows that come are provably 0 .. rows-1."""
        times = self.times.meta["val"] if isinstance(self.times, Node) else self.times
        return guarded_true(rows * times == self.length)


def _size(node: Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def numel(node: Node) -> Any:
    """The number of elements of a node's tensor, an int or a symbolic one."""
    total: Any = 1
    for n in _size(node):
        total = total * n
    return total


def _orders_all(call: Node) -> bool:
    """Whether a sort, argsort or topk runs over all elements of its input at once."""
    shape = _size(call.args[0])
    return not shape or _same(shape[sorted_dim(call)], numel(call.args[0]))


def _same(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def same_values(node: Node) -> Node:
    """The node that ``node`` is a view, copy or wide enough integer cast of, flattened order kept."""
    while True:
        if node.target in SAME_VALUES or (node.target in CASTS and _keeps_integers(node)):
            node = node.args[0]
        else:
            return node


def _keeps_integers(cast: Node) -> bool:
    """Whether an integer cast keeps every index: the new type must hold every value that there can be.

    Not bool and uint8, which index as masks.
    """
    before, after = cast.args[0].meta["val"].dtype, cast.meta["val"].dtype
    if any(d.is_floating_point or d.is_complex or d in (torch.bool, torch.uint8) for d in (before, after)):
        return False
    return holds_integers(after, *value_range(cast.args[0]))


def is_permutation(node: Node) -> bool:
    """Whether the values of ``node``, flattened, are 0 .. numel-1 in some order."""
    node = same_values(node)
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if sorted_tensor(node) is not None or node.target is aten.randperm.default:
        return True
    if node.target in (aten.argsort.default, aten.argsort.stable):
        return _orders_all(node)
    if _is_iota(node) or _is_rotated_iota(node):
        return True
    if node.target in (aten.flip.default, prims.rev.default):
        return is_permutation(node.args[0])
    if node.target is aten.index.Tensor:
        table, (index, *others) = node.args
        whole = isinstance(index, Node) and not others and len(_size(table)) == 1
        return whole and _same(numel(table), numel(index)) and is_permutation(table) and is_permutation(index)
    return stored_inverse(node) is not None


def _is_iota(node: Node) -> bool:
    if node.target is prims.iota.default:
        counts = node.kwargs.get("start") == 0 and node.kwargs.get("step") == 1
    else:
        counts = node.target is aten.arange.default and len(node.args) == 1
    return counts and holds_integers(node.meta["val"].dtype, 0, numel(node) - 1)


def _is_rotated_iota(node: Node) -> bool:
    """Whether ``node`` is ``(arange(n) + c) % n``, by which ``roll`` is decomposed."""
    if node.target not in _REMAINDERS or not _same(node.args[1], numel(node)):
        return False
    total = node.args[0]
    if total.target is not aten.add.Tensor or total.kwargs or not isinstance(total.args[1], int) or total.args[1] < 0:
        return False
    # The sum must not wrap, and fmod is the remainder of what is not negative.
    return _is_iota(total.args[0]) and holds_integers(total.meta["val"].dtype, 0, numel(node) + total.args[1])


def sorted_tensor(node: Node) -> Node | None:
    """What ``node`` holds the sorting permutation of: it is result 1 of a sort over all elements."""
    if node.target is not operator.getitem or node.args[1] != 1 or node.args[0].target not in SORTS:
        return None
    return node.args[0].args[0] if _orders_all(node.args[0]) else None


def argsorted(node: Node) -> Node | None:
    """The permutation [N] that ``node`` is the ascending argsort, and so the inverse, of."""
    source = sorted_tensor(node)
    if source is None:
        return None
    sort = node.args[0]
    descending = sort.kwargs.get("descending", len(sort.args) > 2 and sort.args[2])
    source = same_values(source)
    return source if not descending and len(_size(source)) == 1 and is_permutation(source) else None


def stored_inverse(node: Node) -> Node | None:
    """The permutation that ``node`` is the inverse of, made by storing an arange (or a permutation) at its places.

    ``empty[p] = arange(n)``: every element is overwritten, since p names each place once.
    """
    if node.target in (aten.index_put.default, aten._unsafe_index_put.default):
        base, indices, values, *accumulate = node.args
        if any(accumulate) or len(indices) != 1 or not isinstance(indices[0], Node):
            return None
        place = indices[0]
    elif node.target is aten.scatter.src:
        base, _, place, values = node.args
    else:
        return None
    one_dim = isinstance(values, Node) and len(_size(base)) == 1 == len(_size(values))
    if one_dim and _same(numel(base), numel(place)) and _same(numel(values), numel(place)):
        return place if is_permutation(place) and is_permutation(values) else None
    return None


def repeated(node: Node) -> Repeated | None:
    """Proof that ``node`` names every row equally often (once, if it is a permutation)."""
    node = same_values(node)
    if is_permutation(node):
        return Repeated(node, numel(node), 1)
    if node.target is aten.index.Tensor:
        table, (index, *others) = node.args
        base = _repeated_iota(same_values(table)) if isinstance(index, Node) and not others else None
        if base is not None and len(_size(table)) == 1 and _same(numel(index), base.length) and is_permutation(index):
            return replace(base, permutation=same_values(index))
        return None
    return _divided(node) or _repeated_iota(node)


def _divided(node: Node) -> Repeated | None:
    """``permutation // k`` and ``permutation % rows``."""
    if node.target not in (*_DIVISIONS, *_REMAINDERS) or not isinstance(node.args[0], Node):
        return None
    inner, length = same_values(node.args[0]), numel(node)
    divisor = node.args[1].meta.get("val") if isinstance(node.args[1], Node) else node.args[1]
    whole = not node.meta["val"].dtype.is_floating_point
    if not whole or not isinstance(divisor, (int, torch.SymInt)) or not is_permutation(inner):
        return None
    # The division runs in the dtype of its operand, to which the divisor is cast first.
    if not statically_known_true(divisor > 0) or not holds_integers(node.args[0].meta["val"].dtype, 0, divisor):
        return None
    if node.target in _REMAINDERS:
        static = isinstance(divisor, int) and isinstance(length, int)
        return Repeated(inner, length, length // divisor, strided=True) if static and length % divisor == 0 else None
    floor = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") == "floor"
    return Repeated(inner, length, node.args[1]) if floor else None


def _repeated_iota(node: Node) -> Repeated | None:
    """An arange with every element, or the whole of it, repeated: [S], [S, 1] or [1, S] expanded, or ``repeat(k)``."""
    if node.target is aten.repeat.default and _is_iota(same_values(node.args[0])) and len(node.args[1]) == 1:
        times = node.args[1][0]
        return Repeated(None, numel(node), times, strided=True) if isinstance(times, int) and times > 0 else None
    if node.target is not aten.expand.default or not _is_iota(same_values(node.args[0])):
        return None
    before, after = _size(node.args[0]), _size(node)
    if len(before) > 2 or len(after) != 2 or not all(isinstance(n, int) for n in (*before, *after)):
        return None
    # ``expand`` aligns on the right; of the two dims one is the arange's own and stays as it is.
    before = (1,) * (2 - len(before)) + before
    if before[1] == after[1] and before[0] == 1 and after[0] > 0:
        return Repeated(None, numel(node), after[0], strided=True)
    if before[0] == after[0] and before[1] == 1 and after[1] > 0:
        return Repeated(None, numel(node), after[1])
    return None


def names_once(indices: Sequence[Node | None]) -> bool:
    """Whether a tuple of indices, as ``index_put`` takes them, names no place twice."""
    chosen = [i for i in indices if i is not None]
    if len(chosen) == 1:
        mask = chosen[0].meta["val"].dtype in (torch.bool, torch.uint8)
        return mask or is_injective(chosen[0])
    columns = [_nonzero_column(i) for i in chosen]
    sizes = [_size(i) for i in chosen]
    alike = all(len(s) == len(sizes[0]) and all(map(_same, s, sizes[0])) for s in sizes)
    if not alike or None in columns or len({source for source, _ in columns}) > 1:
        return False
    return {at for _, at in columns} == set(range(len(_size(columns[0][0].args[0]))))


def _nonzero_column(node: Node) -> tuple[Node, int] | None:
    """The nonzero call, and which of its columns ``node`` is."""
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
    """Whether no value of ``node``, flattened, comes twice."""
    node = same_values(node)
    if is_permutation(node):
        return True
    if node.target is aten.slice.Tensor:
        return is_injective(node.args[0])
    if node.target is operator.getitem and node.args[1] == 1 and node.args[0].target is aten.topk.default:
        return _orders_all(node.args[0])
    if node.target is aten.index.Tensor:
        table, (index, *others) = node.args
        whole = isinstance(index, Node) and not others and len(_size(table)) == 1
        return whole and is_injective(table) and is_injective(index)
    column = _nonzero_column(node)
    return column is not None and len(_size(column[0].args[0])) == 1
