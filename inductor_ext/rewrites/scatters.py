"""Scatter-adds of half precision, on the joint graph: accumulated in fp32 and rounded once, without atomics where provable.

The gradient of a gather is a scatter-add, which stock accumulates in the tensor's own dtype. Where an index comes from is
visible only here (in the backward graph it is a placeholder), so this runs before AOTAutograd partitions the graph.

    scatter into rows 0 .. S-1                     becomes
    by ``permutation // k``, every row k times     values[inverse].view(S, k, ...).sum(1) in fp32: a gather
    by indices without duplicates                  a plain store (added to the base, if there is one)
    by anything else                               the same scatter in fp32
    a sum of such scatters                         one sum in fp32, rounded once

The inverse of a permutation is made once (``inverse[permutation] = arange``) and shared by all that use it; that of an
argsort of a permutation is the permutation sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from ..analysis.permutations import is_injective, repeated, same_values, sorted_tensor
from ..compat import detect_fake_mode, statically_known_true
from ..options import Options
from ..report import record, user_line

NAME = "scatters"

aten = torch.ops.aten
prims = torch.ops.prims
_HALF = (torch.bfloat16, torch.float16)
_ZEROS = (aten.full.default, aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default, aten.full_like.default)


@dataclass(frozen=True)
class _Scatter:
    """``base[indices] += values``: indices as index_put takes them, one for each leading dim, None for a whole dim."""

    node: Node
    base: Node
    indices: tuple[Node | None, ...]
    values: Node


def rewrite(graph: Graph, own: Options) -> None:
    """Rewrite, in place, every scatter-add of a joint graph (or of an inference graph)."""
    if not own.enabled(NAME):
        return
    fake_mode = detect_fake_mode([n.meta["val"] for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)])
    if fake_mode is None:
        return
    with fake_mode:
        rewriter = _Rewriter(graph)
        for node in list(graph.nodes):
            scatter = _match(node)
            if scatter is not None:
                rewriter.scatter(scatter)
        rewriter.merge_sums()
        if rewriter.changed:
            graph.eliminate_dead_code()
            graph.lint()


def _value(node: Node) -> torch.Tensor:
    return node.meta["val"]


def _match(node: Node) -> _Scatter | None:
    """A scatter-add of floats as one along leading dims."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if not _value(node).is_floating_point():
        return None
    if node.target in (aten.index_put.default, aten._unsafe_index_put.default):
        base, indices, values, *accumulate = node.args
        return _Scatter(node, base, tuple(indices), values) if any(accumulate) else None
    if node.target is aten.index_add.default and node.kwargs.get("alpha", 1) == 1:
        base, dim, index, values = node.args
        dim %= max(_value(base).dim(), 1)
        return _Scatter(node, base, (*[None] * dim, index), values) if _value(index).dim() == 1 else None
    if node.target is aten.scatter_add.default:
        base, dim, index, values = node.args
        rows = _row_index(index, values)
        if dim == 0 and rows is not None and _value(base).shape[1:] == _value(values).shape[1:]:
            return _Scatter(node, base, (rows,), values)
    return None


def _row_index(index: Node, values: Node) -> Node | None:
    """The row indices [N] that ``index`` [N, ...] repeats along all other dims of ``values``."""
    if index.target is not aten.expand.default or _value(index).shape != _value(values).shape:
        return None
    rows = index.args[0]
    if not all(statically_known_true(n == 1) for n in _value(rows).shape[1:]):
        return None
    inner = same_values(rows)
    return inner if _value(inner).dim() == 1 else None


@dataclass
class _Rewriter:
    """graph: what is rewritten. rounded: nodes that are an fp32 sum rounded to half precision, with that sum."""

    graph: Graph
    changed: bool = False
    rounded: dict[Node, Node] = field(default_factory=dict)
    _inverses: dict[Node, Node] = field(default_factory=dict)

    def scatter(self, found: _Scatter) -> None:
        """Replace one scatter-add by what can be proven to be the same sum."""
        self._before = found.node
        total, path, why = self._gathered(found) or self._stored(found) or self._widened(found) or (None, "", "")
        if total is None:
            return
        self._replace(found.node, total)
        record(NAME, str(found.node.target), path, why, user_line(found.node))

    # ------------------------------------------------ the three forms; each returns the sum, in fp32 for half precision

    def _gathered(self, found: _Scatter) -> tuple[Node, str, str] | None:
        """By ``permutation // k`` into all rows: gather the k values of each row and add them."""
        rows, values = self._rows(found), found.values
        proof = repeated(rows) if rows is not None else None
        if proof is None or not statically_known_true(_value(found.node).shape[0] * proof.times == proof.length):
            return None
        inverse = self._inverse(proof.permutation)
        total = self._wide(self._call(aten.index.Tensor, values, [inverse]))
        if not statically_known_true(proof.times == 1):
            shape = [_value(found.node).shape[0], proof.times, *_value(values).shape[1:]]
            total = self._call(aten.sum.dim_IntList, self._call(aten.view.default, total, self._sizes(shape)), [1])
        return self._onto(found.base, total), "gather", f"the index is a permutation // {proof.times}"

    def _stored(self, found: _Scatter) -> tuple[Node, str, str] | None:
        """Without duplicates: each place gets one value at most."""
        rows = self._rows(found)
        if rows is None or not is_injective(rows):
            return None
        zeros = self._zeros(found.node, _value(found.values).dtype)
        stored = self._call(aten.index_put.default, zeros, [rows], found.values, False)
        return self._onto(found.base, self._wide(stored)), "store", "no index comes twice"

    def _widened(self, found: _Scatter) -> tuple[Node, str, str] | None:
        """Half precision: the same scatter in fp32."""
        if _value(found.node).dtype not in _HALF:
            return None
        base = self._zeros(found.node, torch.float32) if _is_zero(found.base) else self._wide(found.base)
        values = self._wide(found.values)
        return self._call(aten.index_put.default, base, list(found.indices), values, True), "fp32", "rounded once"

    def merge_sums(self) -> None:
        """A half-precision sum of two rounded sums becomes one in fp32, rounded once."""
        for node in list(self.graph.nodes):
            if node.target is not aten.add.Tensor or node.kwargs or _value(node).dtype not in _HALF:
                continue
            terms = node.args
            if not all(isinstance(t, Node) for t in terms) or not any(t in self.rounded for t in terms):
                continue
            if any(t in self.rounded and len(t.users) > 1 for t in terms):
                continue
            self._before = node
            wide = [self.rounded[t] if t in self.rounded else self._wide(t) for t in terms]
            self._replace(node, self._merged(*wide))

    def _merged(self, first: Node, second: Node) -> Node:
        """The sum of two fp32 tensors; a scatter into zeros goes on top of another of its shape instead."""
        for one, other in ((second, first), (first, second)):
            if _value(one).shape != _value(other).shape:
                continue
            if one.target is aten.index_put.default and _is_zero(one.args[0]) and len(one.users) <= 1 and one.args[3]:
                return self._call(aten.index_put.default, other, *one.args[1:])
        return self._call(aten.add.Tensor, first, second)

    # ------------------------------------------------ pieces

    def _rows(self, found: _Scatter) -> Node | None:
        """The index, where the scatter is by rows: one 1-D index of dim 0, one row of values for each of its elements."""
        if len(found.indices) != 1 or found.indices[0] is None:
            return None
        (index,) = found.indices
        whole = _value(index).dim() == 1 and _value(index).dtype is not torch.bool
        shape = (*_value(index).shape, *_value(found.base).shape[1:])
        return index if whole and tuple(_value(found.values).shape) == shape else None

    def _inverse(self, permutation: Node) -> Node:
        """The inverse of a permutation, made right after it and shared."""
        if permutation not in self._inverses:
            source = sorted_tensor(permutation)
            source = same_values(source) if source is not None else None
            proof = repeated(source) if source is not None else None
            if proof is not None and statically_known_true(proof.times == 1):
                self._inverses[permutation] = source
            else:
                before, self._before = self._before, permutation.next
                length = _value(permutation).numel()
                flat = self._call(aten.view.default, permutation, self._sizes([length]))
                options = {"dtype": torch.int64, "device": _value(permutation).device}
                places = self._call(
                    prims.iota.default, *self._sizes([length]), start=0, step=1, requires_grad=False, **options
                )
                empty = self._call(aten.full.default, self._sizes([length]), 0, **options)
                self._inverses[permutation] = self._call(aten.index_put.default, empty, [flat], places, False)
                for node in (flat, places, empty, self._inverses[permutation]):
                    self._copy_meta(permutation, node)
                self._before = before
        return self._inverses[permutation]

    def _onto(self, base: Node, total: Node) -> Node:
        return total if _is_zero(base) else self._call(aten.add.Tensor, self._wide(base), total)

    def _zeros(self, like: Node, dtype: torch.dtype) -> Node:
        value = _value(like)
        return self._call(aten.full.default, self._sizes(value.shape), 0, dtype=dtype, device=value.device)

    def _wide(self, node: Node) -> Node:
        if _value(node).dtype not in _HALF:
            return node
        return self._call(prims.convert_element_type.default, node, torch.float32)

    def _sizes(self, sizes: Sequence[Any]) -> list[Any]:
        """Sizes as graph arguments: ints, or the nodes of symbolic ones."""
        return [self._size(n) for n in sizes]

    def _size(self, size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and node.op == "placeholder" and statically_known_true(value == size):
                return node
            if isinstance(value, torch.Tensor) and node.op == "placeholder":
                for dim, n in enumerate(value.shape):
                    if isinstance(n, torch.SymInt) and statically_known_true(n == size):
                        return self._call(aten.sym_size.int, node, dim)
        raise LookupError(f"no input of this graph has the size {size}")

    def _replace(self, node: Node, total: Node) -> None:
        self.changed = True
        dtype = _value(node).dtype
        result = total
        if dtype in _HALF:
            result = self._call(prims.convert_element_type.default, total, dtype)
            self.rounded[result] = total
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node before the one that is being replaced, with its metadata and a fake value of its own."""
        with self.graph.inserting_before(self._before):
            node = self.graph.call_function(target, args, kwargs)
        self._copy_meta(self._before, node)
        fakes = torch.fx.node.map_aggregate((args, kwargs), lambda a: a.meta["val"] if isinstance(a, Node) else a)
        node.meta["val"] = target(*fakes[0], **fakes[1])
        return node

    def _copy_meta(self, source: Node, target: Node) -> None:
        kept = {k: v for k, v in source.meta.items() if k not in ("val", "tensor_meta", "eager_input_vals")}
        target.meta.update(kept)


def _is_zero(node: Any) -> bool:
    """Whether a node is a tensor of zeros."""
    if node.target not in _ZEROS:
        return False
    return node.target not in (aten.full.default, aten.full_like.default) or node.args[1] == 0
