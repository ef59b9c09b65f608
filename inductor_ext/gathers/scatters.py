"""Rewrites the scatter-adds of the joint graph: fp32 sums that are rounded once, without atomics if provable or faster.

The gradient of a gather is a scatter-add, and stock accumulates it in the dtype of the tensor. Only the joint graph shows
how an index was computed (in the backward graph it is a placeholder), so this pass runs before AOTAutograd partitions it.

    scatter into rows 0 .. S-1                     becomes
    bins within rows, the same in many slices      bin_sums: the values of a bin added by products with one-hot matrices
    few elements of a matrix, many values each     entry_sums: the same (crowded.py)
    by an index that has every row k times         gather_sum: the k values of each row, read through the inverse, added
    by indices without duplicates                  a plain store (added to the base, if there is one)
    few rows, many values each, on a GPU           the same
    by anything else, on a GPU, if it is faster    segment_sum: the index sorted, the values of each row added in order
    by anything else                               the same scatter in fp32
    a sum of such scatters                         one sum in fp32, rounded once

All but "the same scatter in fp32" are bitwise reproducible. With ``deterministic``, segment_sum is used wherever a GPU can
run it.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ..core.fx import DECOMPOSED_VIEWS, HALF, cast_of, same_shape, same_sizes, value_of, working_dtype
from ..core.joint_graph import Builder
from ..core.kernels import FEWEST_SLICES, SUPPORTED_DTYPES
from ..core.report import record, user_line
from ..core.target import Target
from ..options import Options
from ..torch_api.sizes import guarded_true, size_hint
from . import counted_order
from .crowded import add_by_entry
from .entry_sums import MOST_ENTRIES
from .inverses import inverse
from .permutations import names_once, repeated
from .rows import by_row, expanded, flat, from_rows, in_bounds, index_shape, values_shape, view
from .scatter_adds import Binned, ScatterAdd, is_zero, match, match_binned, narrow_source, row_mask, unscaled

NAME = "scatters"

aten = torch.ops.aten
gradfuse = torch.ops.gradfuse

#: The largest number of rows, and of elements of an index: the kernels count both in 32 bits.
_MOST = 2**31 - 2**10

#: The largest product of a row's values and bins: ``bin_sums`` compares each value with every bin, unless neighbours have
#: neighbouring bins.
_MOST_PAIRS = 2**21

#: ``entry_sums`` adds to at most so many rows, because it compares each index with every row. It is for at least so many
#: values in all and for each row, and rows of at least so many.
_FEW_ROWS, _MANY_VALUES, _CROWD, _WIDE = 64, 2**18, 16, 16

#: What a form of the sum returns: the sum (in fp32 for half precision), the path and the reason.
_Found = tuple[Node, str, str]


def rewrite(build: Builder, options: Options) -> None:
    """Rewrite, in place, every scatter-add of a joint graph (or of an inference graph)."""
    rewriter = _Rewriter(build, options)
    for node in list(build.graph.nodes):
        binned = match_binned(node)
        if binned is not None and rewriter.worth_binning(binned):
            rewriter.bins(binned)
            continue
        found = match(node) or rewriter.by_elements(node)
        if found is not None:
            rewriter.scatter(found)
        elif node.target in _SAME_OP_IN_FP32 and value_of(node).dtype in HALF:
            rewriter.same_op_in_fp32(node)
    rewriter.merge_sums()
    rewriter.round_in_kernel()


#: Element-wise scatters. They do not add whole rows, but in fp32 they are exact.
_SAME_OP_IN_FP32 = (aten.scatter_add.default, aten.scatter_reduce.two)


class _Rewriter:
    """Rewrites one graph. ``rounded`` maps each node that is an fp32 sum rounded to half precision to that sum."""

    def __init__(self, build: Builder, options: Options) -> None:
        self.graph = build.graph
        self.build = build
        self.deterministic = options.deterministic
        self.counts = options.enabled(counted_order.NAME)
        self.rounded: dict[Node, Node] = {}
        self._sorted: dict[Any, tuple[Node, Node, int]] = {}

    def scatter(self, found: ScatterAdd) -> None:
        """Replace one scatter-add by the first form of the same sum that applies."""
        with self.build.before(found.node):
            if found.factor != 1:
                values = self.build.call(aten.mul.Tensor, self.build.wide(found.values), found.factor)
                found = replace(found, values=values, factor=1)
            forms = (self._gathered, self._stored, self._crowded, self._by_entry, self._segmented, self._widened)
            result = next(filter(None, (form(found) for form in forms)), None)
            if result is not None:
                self._replace(found.node, *result)

    def worth_binning(self, found: Binned) -> bool:
        """Whether a GPU should compute the sum by matmuls, which need many slices, and rows that are not too long."""
        value, values = value_of(found.node), value_of(found.values)
        sizes = [size_hint(n) for n in (*values.shape, value.shape[-1])]
        if None in sizes or 0 in sizes or not {value.dtype, values.dtype} <= set(SUPPORTED_DTYPES):
            return False
        *slices, rows, count, bins = sizes
        suits = math.prod(slices) >= FEWEST_SLICES and rows > 1 and count * bins <= _MOST_PAIRS
        suits = suits and guarded_true(value.shape[-1] <= MOST_ENTRIES)
        return suits and max(math.prod(sizes[:-1]), rows * bins) <= _MOST and Target.of(value.device).triton

    def bins(self, found: Binned) -> None:
        """Replace a scatter-add into bins of rows by ``bin_sums``."""
        with self.build.before(found.node):
            *_, rows, count = self.build.sizes(found.values, range(value_of(found.values).dim()))
            bins = self.build.size(found.base, value_of(found.base).dim() - 1)
            index = in_bounds(self.build, view(self.build, found.index, [rows, count]), bins)
            values, scale = unscaled(self.build, found.values)
            total = self.build.call(gradfuse.bin_sums.default, values, index, bins, 3)
            total = self._onto(found.base, scale.of(self.build, total) if scale else total)
            self._replace(found.node, total, "bins", "the index is the same in all slices, and its bins are within a row")

    def by_elements(self, node: Node) -> ScatterAdd | None:
        """An element-wise sum that must be deterministic on a GPU, as a scatter-add with one index for each dim."""
        if not self.deterministic or not _adds_elements(node):
            return None
        value = value_of(node)
        if not value.dim() or not Target.of(value.device).triton:
            return None
        base, dim, index, source = node.args[:4]
        dim %= value.dim()
        with self.build.before(node):
            sizes = self.build.sizes(index, range(value.dim()))
            if node.kwargs.get("include_self", True) is not True and not is_zero(base):
                base = self.build.call(aten.scatter.value, base, dim, index, 0)
            for d, size in enumerate(sizes):
                if not same_sizes([value_of(index).shape[d]], [value_of(source).shape[d]]):
                    source = self.build.call(aten.slice.Tensor, source, d, 0, size)
            counted = [self.build.count(size, value.device) for size in sizes]
            along = [[-1 if a == d else 1 for a in range(value.dim())] for d in range(value.dim())]
            indices = [
                index if d == dim else self.build.call(aten.view.default, counted[d], along[d]) for d in range(value.dim())
            ]
        return ScatterAdd(node, base, tuple(indices), source)

    def same_op_in_fp32(self, node: Node) -> None:
        """Compute an element-wise scatter-add of half precision in fp32."""
        if node.target is aten.scatter_reduce.two and node.args[4] not in ("sum", "mean"):
            return
        with self.build.before(node):
            base, dim, index, source, *rest = node.args
            wide = self._wide_base(base), dim, index, self.build.wide(source)
            self._replace(
                node, self.build.call(node.target, *wide, *rest, **node.kwargs), "fp32", "the result is rounded once"
            )

    # ------------------------------------------------ the forms; each returns None if it does not apply

    def _gathered(self, found: ScatterAdd) -> _Found | None:
        """If the index has every row equally often: gather the values of each row and add them."""
        proof = repeated(found.indexed[0]) if len(found.indexed) == 1 and found.keep is None else None
        if proof is None or not proof.covers(value_of(found.base).shape[found.dim]):
            return None
        indices = inverse(self.build, proof.permutation) if proof.permutation is not None else None
        values = by_row(self.build, found, found.values)
        if proof.times == 1 and indices is not None:
            total = self.build.wide(self.build.call(aten._unsafe_index.Tensor, values, [indices]))
        else:
            rows = self.build.size(found.base, found.dim)
            total = self.build.call(gradfuse.gather_sum.default, values, indices, rows, proof.times, proof.strided)
        why = "the index is a permutation" if proof.times == 1 else f"the index has every row {proof.times} times"
        return self._onto(found.base, from_rows(self.build, found, total)), "gather", why

    def _stored(self, found: ScatterAdd) -> _Found | None:
        """If the indices have no duplicates: store, because each element gets at most one value."""
        if found.keep is not None or not names_once(found.indices):
            return None
        zeros = self._zeros(found.base, value_of(found.values).dtype)
        stored = self.build.call(aten.index_put.default, zeros, list(found.indices), found.values, False)
        return self._onto(found.base, self.build.wide(stored)), "store", "the indices have no duplicates"

    def _crowded(self, found: ScatterAdd) -> _Found | None:
        """On a GPU, if few elements of a matrix get many values each: add these by ``entry_sums``."""
        total = add_by_entry(self.build, found)
        return None if total is None else (self._onto(found.base, total), "bins", "few elements get many values each")

    def _by_entry(self, found: ScatterAdd) -> _Found | None:
        """On a GPU, if there are few rows: add the values of all of them in one pass, without sorting."""
        values, left_out = _narrowed(found)
        if not _worth_matmuls(found, value_of(values).dtype):
            return None
        call, dims = self.build.call, range(found.dim, found.dim + len(found.indexed))
        shape = [value_of(found.base).shape[d] for d in dims]
        keys = self.build.convert(self._keys(found, left_out), torch.int32)
        values = by_row(self.build, found, values)
        kept = self.build.sizes(values, range(1, value_of(values).dim()))
        values = view(self.build, values, [self.build.size(values, 0), self.build.product(kept)])
        values = call(aten.unsqueeze.default, call(aten.permute.default, values, [1, 0]), 0)
        index = call(aten.unsqueeze.default, keys, 0)
        total = call(gradfuse.entry_sums.default, values, index, math.prod(shape), 3)
        total = view(self.build, call(aten.permute.default, total, [1, 0]), [*shape, *kept])
        return self._onto(found.base, from_rows(self.build, found, total)), "entries", "few rows get many values each"

    def _segmented(self, found: ScatterAdd) -> _Found | None:
        """On a GPU, if it is faster than atomics or required: sort the index, and add the values of each row in order."""
        values, left_out = _narrowed(found)
        if not found.indexed or not _has_kernels(found) or not self._worth_sorting(found, value_of(values).dtype):
            return None
        order, keys, offset = self._sort(found, left_out)
        dims = range(found.dim, found.dim + len(found.indexed))
        rows = self.build.product(self.build.sizes(found.base, dims))
        values = by_row(self.build, found, values)
        kept = self.build.sizes(values, range(1, value_of(values).dim()))
        values = view(self.build, values, [self.build.size(values, 0), self.build.product(kept)])
        wide = working_dtype(value_of(values).dtype)
        total = self.build.call(gradfuse.segment_sum.default, values, order, keys, offset, rows, wide)
        total = view(self.build, total, [*self.build.sizes(found.base, dims), *kept])
        why = "the values of a row are added in a fixed order" if self.deterministic else "sorting is faster than atomics"
        return self._onto(found.base, from_rows(self.build, found, total)), "segments", why

    def _widened(self, found: ScatterAdd) -> _Found | None:
        """In half precision: compute the same scatter-add in fp32."""
        if value_of(found.node).dtype not in HALF or found.keep is not None:
            return None
        base, values = self._wide_base(found.base), self.build.wide(found.values)
        total = self.build.call(aten.index_put.default, base, list(found.indices), values, True)
        return total, "fp32", "the result is rounded once"

    # ------------------------------------------------ sorting

    def _worth_sorting(self, found: ScatterAdd, dtype: torch.dtype) -> bool:
        """Whether to sort: it is faster than fp32 atomics by an estimate, or the sum must be reproducible."""
        base, values, index = value_of(found.base).shape, values_shape(found), index_shape(found)
        if any(size_hint(n) in (None, 0) for n in (*base, *values, *index)):
            return False
        cells, elements, entries = (math.prod(map(size_hint, shape)) for shape in (base, values, index))
        rows = math.prod(size_hint(n) for n in base[found.dim : found.dim + len(found.indexed)])
        if max(rows, entries) > _MOST:
            return False
        if self.deterministic:
            return True
        rounding = 6 if dtype in HALF else 0
        atomics = elements / Target.atomics + cells * (4 + rounding) / Target.bandwidth
        sorting = Target.sort_seconds + (elements + 2 * cells) * dtype.itemsize / Target.bandwidth
        return found.dim == 0 and sorting < atomics

    def _sort(self, found: ScatterAdd, left_out: Node | None) -> tuple[Node, Node, int]:
        """The order [N] that sorts the flattened index, the sorted index [N] less an offset, and that offset.

        Scatter-adds by one index share them.
        """
        shape = tuple(value_of(found.base).shape[found.dim : found.dim + len(found.indexed)])
        known = (found.indexed, str(shape), found.keep, left_out)
        if known not in self._sorted:
            self._sorted[known] = self._ascending(self._keys(found, left_out), math.prod(shape))
        return self._sorted[known]

    def _ascending(self, keys: Node, rows: Any) -> tuple[Node, Node, int]:
        """Sort keys below ``rows`` as ``_sort`` does: by counting, or by PyTorch's sort, a pass for each byte of a key."""
        call = self.build.call
        if self.counts and counted_order.suits(value_of(keys).shape[0], rows):
            both = call(gradfuse.counted_order.default, self.build.convert(keys, torch.int32), rows)
            return call(operator.getitem, both, 0), call(operator.getitem, both, 1), 0
        dtype, offset = _narrowest(rows if isinstance(rows, int) else None)
        if offset:
            keys = call(aten.sub.Tensor, keys, offset)
        both = call(aten.sort.stable, self.build.convert(keys, dtype), stable=True, dim=0, descending=False)
        return call(operator.getitem, both, 1), call(operator.getitem, both, 0), offset

    def _keys(self, found: ScatterAdd, left_out: Node | None) -> Node:
        """The row of every value: [N], int64, -2 if the index is out of bounds, -1 if the value is left out.

        If several dims are indexed, they count as one flattened dim.
        """
        call, total, bad = self.build.call, None, None
        for d, index in enumerate(found.indexed, start=found.dim):
            size = self.build.size(found.base, d)
            place = self.build.convert(flat(self.build, expanded(self.build, index, found)), torch.int64)
            negative = call(aten.lt.Scalar, place, 0)
            place = call(aten.where.self, negative, call(aten.add.Tensor, place, size), place)
            outside = call(aten.bitwise_or.Tensor, call(aten.lt.Scalar, place, 0), call(aten.ge.Scalar, place, size))
            bad = outside if bad is None else call(aten.bitwise_or.Tensor, bad, outside)
            total = place if total is None else call(aten.add.Tensor, call(aten.mul.Tensor, total, size), place)
        keys = call(aten.where.self, bad, self.build.full([], -2, torch.int64, value_of(total).device), total)
        minus_one = self.build.full([], -1, torch.int64, value_of(keys).device)
        for mask, dropped in ((found.keep, False), (left_out, True)):
            if mask is not None:
                mask = flat(self.build, mask)
                keys = call(aten.where.self, mask, *((minus_one, keys) if dropped else (keys, minus_one)))
        return keys

    # ------------------------------------------------ sums

    def merge_sums(self) -> None:
        """Turn each half-precision sum of rounded sums into one sum in fp32 that is rounded once."""
        for node in list(self.graph.nodes):
            if node.target is not aten.add.Tensor or node.kwargs or value_of(node).dtype not in HALF:
                continue
            terms = node.args
            if not all(isinstance(t, Node) for t in terms) or not any(t in self.rounded for t in terms):
                continue
            if any(t in self.rounded and len(t.users) > 1 for t in terms):
                continue
            with self.build.before(node):
                wide = [self.rounded[t] if t in self.rounded else self.build.wide(t) for t in terms]
                self._replace(node, self._merged(*wide))

    def _merged(self, first: Node, second: Node) -> Node:
        """The sum of two fp32 tensors. A scatter-add into zeros of the same shape is added to the other directly."""
        for one, other in ((second, first), (first, second)):
            on_zeros = one.target is aten.index_put.default and is_zero(one.args[0]) and one.args[3]
            if same_shape(one, other) and on_zeros and len(one.users) <= 1:
                return self.build.call(aten.index_put.default, other, *one.args[1:])
        return self.build.call(aten.add.Tensor, first, second)

    def round_in_kernel(self) -> None:
        """Let segment_sum store half precision if its result is only rounded, perhaps after a change of shape."""
        for node in self.graph.find_nodes(op="call_function", target=gradfuse.segment_sum.default):
            chain = [node]
            while len(chain[-1].users) == 1 and next(iter(chain[-1].users)).target in DECOMPOSED_VIEWS:
                chain.append(next(iter(chain[-1].users)))
            (user, *others) = chain[-1].users
            if others or cast_of(user) is None or value_of(user).dtype not in HALF:
                continue
            dtype = value_of(user).dtype
            node.args = (*node.args[:-1], dtype)
            for link in chain:
                link.meta["val"] = value_of(link).to(dtype)
            user.replace_all_uses_with(chain[-1])
            self.graph.erase_node(user)

    def _onto(self, base: Node, total: Node) -> Node:
        return total if is_zero(base) else self.build.call(aten.add.Tensor, self.build.wide(base), total)

    def _wide_base(self, base: Node) -> Node:
        return self._zeros(base, torch.float32) if is_zero(base) else self.build.wide(base)

    def _zeros(self, like: Node, dtype: torch.dtype) -> Node:
        sizes = self.build.sizes(like, range(value_of(like).dim()))
        return self.build.full(sizes, 0, dtype, value_of(like).device)

    def _replace(self, node: Node, total: Node, path: str = "", why: str = "") -> None:
        if path:
            record(NAME, str(node.target), path, why, user_line(node))
        result = self.build.convert(total, value_of(node).dtype)
        if result is not total:
            self.rounded[result] = total
        self.build.replace(node, result)


def _narrowed(found: ScatterAdd) -> tuple[Node, Node | None]:
    """The values before they are widened or masked, and the mask of those that are left out, if that is possible."""
    values, masked = narrow_source(found.values)
    left_out = row_mask(masked, found.indices, found.base) if masked is not None else None
    return (found.values if masked is not None and left_out is None else values), left_out


def _has_kernels(found: ScatterAdd) -> bool:
    """Whether a kernel can read all of its operands: an index of a tensor on a GPU may be on the CPU."""
    device = value_of(found.base).device
    return Target.of(device).triton and all(value_of(i).device == device for i in found.indexed)


def _worth_matmuls(found: ScatterAdd, dtype: torch.dtype) -> bool:
    """Whether a scatter-add on a GPU has few rows that get many values each."""
    base = value_of(found.base)
    if not found.indexed or dtype not in SUPPORTED_DTYPES or not _has_kernels(found):
        return False
    sizes = (*base.shape, *values_shape(found), *index_shape(found))
    if base.dtype is torch.float64 or not all(isinstance(n, int) for n in sizes):
        return False
    rows = math.prod(base.shape[found.dim : found.dim + len(found.indexed)])
    count = math.prod(index_shape(found))
    width = math.prod(base.shape) // max(rows, 1)
    return 0 < rows <= _FEW_ROWS and width >= _WIDE and count >= _CROWD * rows and _MANY_VALUES <= count * width <= _MOST


def _adds_elements(node: Node) -> bool:
    """Whether a node adds floating-point elements, each with its own index along one dim."""
    if node.target not in _SAME_OP_IN_FP32 or not value_of(node).is_floating_point():
        return False
    return node.target is aten.scatter_add.default or node.args[4] == "sum"


def _narrowest(rows: int | None) -> tuple[torch.dtype, int]:
    """The narrowest dtype that holds -2 .. rows less an offset, and that offset. Each byte is a pass of a radix sort."""
    for dtype in (torch.int8, torch.int16):
        least, greatest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        if rows is not None and rows <= greatest:
            return dtype, 0
        if rows is not None and rows <= greatest - least - 2:
            return dtype, -2 - least
    return torch.int32, 0
