"""Make the tables for hoisted expressions of a score_mod. Torch ops compute them outside, and the score_mod reads them.

``Tables`` inserts the ops that compute a table into the outer (Dynamo) graph, and the operand and its read into the
score_mod's graph. All tables are fp32 (fp64 for fp64), so that autograd accumulates gradients in fp32 and rounds once.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from ..core.dynamo_graph import Inserter
from ..core.fx import cone, dtype_of, fake_tensor, indices_of, value_of, working_dtype
from . import stored  # noqa: F401  (registers gradfuse::stored)
from .canonical import placeholders
from .footprints import Footprint
from .kinds import FootprintKind
from .kinds.base import arithmetic
from .reductions import depends_on_position, factors, summed
from .score_mod import ScoreMod
from .shifts import Shift, shifted
from .table_slices import as_slices


@dataclass
class Tables:
    """The tables of one score_mod.

    outer: the Dynamo graph, with the tables computed at its insertion point. inner: the score_mod's graph.
    captured: the placeholders of captured tensors in ``inner``, with their values in ``outer``.
    inexact: the nodes of ``inner`` that wrap or round integers. masked: a mask may hide positions whose index is out of
    range, so lookups must not assert.
    hypothetical: reads whose value counts under a condition only, so that their index may be out of range elsewhere.
    row_lookups, shifts: see row_lookups.py and shifts.py.
    polynomials: the nodes of ``inner`` that are polynomials in b, h, q and k.
    operands: the tables, which the score_mod captures in addition to ``captured``. kinds: the kinds of these tables.
    """

    outer: Inserter
    inner: Graph
    query: Node
    key: Node
    captured: dict[Node, Any]
    inexact: set[Node]
    masked: bool
    hypothetical: set[Node] = field(default_factory=set)
    row_lookups: dict[Node, bool] = field(default_factory=dict)
    shifts: dict[Node, Shift] = field(default_factory=dict)
    polynomials: dict[Node, sympy.Expr] = field(default_factory=dict)
    operands: list[Node] = field(default_factory=list)
    kinds: dict[Node, FootprintKind] = field(default_factory=dict)
    _made: dict[Any, Node] = field(default_factory=dict)
    _grids: dict[Any, tuple[Any, ...]] = field(default_factory=dict)
    _cast: dict[Node, Node] = field(default_factory=dict)
    _keys: dict[Node, str] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)

    def read(self, group: list[tuple[int, Node]], footprint: Footprint) -> tuple[Node, str]:
        """Return a node of the score_mod that reads the table of a signed sum of nodes, and a note about the table."""
        key = tuple((sign, self._key(node)) for sign, node in group)
        if key not in self._made:
            self._made[key] = self._table(group, footprint)
        placeholder, shape = self._made[key]
        index = self._index(footprint)
        return self.inner.call_function(operator.getitem, (placeholder, index)), shape

    def rows(self, vector: Node, footprint: Footprint) -> Node:
        """Return a vector of the score_mod over the grid of a footprint, as [*grid, width], in the working dtype."""
        grid = self._grid(footprint)
        value = self._outside(vector, grid, {})
        return self.outer.function(torch.broadcast_to, value, [*grid[-1], fake_tensor(vector).shape[0]])

    def outside(self, node: Node, grid: tuple[Any, ...]) -> Node:
        """Return the values of a node of the score_mod on a grid.

        grid: b, h, q and k as nodes of the outer graph that broadcast, None if it does not depend on one, and their shape.
        """
        return self._outside(node, grid, {})

    # ------------------------------------------------ outside: the table

    def _table(self, group: list[tuple[int, Node]], footprint: Footprint) -> tuple[Node, str]:
        grid, dtype = self._grid(footprint), self._dtype()
        total: Any = None
        if group[0][1] in self.shifts:
            # Each element has one reader, so its gradient need not be added in fp32.
            ((_, node),) = group
            total, dtype, group = self._shifted(node, grid), fake_tensor(node).dtype, []
        for sign, node in group:
            value = self._outside(node, grid, self._slices(node, footprint))
            if total is None:
                total = value if sign > 0 else self.outer.function(operator.neg, value)
            else:
                total = self.outer.function(operator.add if sign > 0 else operator.sub, total, value)
        table = self.outer.function(torch.broadcast_to, total, grid[-1])
        table = self.outer.method("to", table, dtype)
        table = self.outer.method("contiguous", table)
        with self.inner.inserting_after(placeholders(self.inner)[-1]):
            placeholder = self.inner.placeholder(f"table_{len(self.operands)}")
        placeholder.meta = {"example_value": value_of(table)}
        # Another table may be computed from what is read of this one.
        self.captured[placeholder] = table
        self.kinds[table] = footprint.kind
        self.operands.append(table)
        return placeholder, self._describe(footprint, grid[-1], dtype)

    def _describe(self, footprint: Footprint, shape: tuple[Any, ...], dtype: torch.dtype) -> str:
        """Describe the axes of a table, and its size in bytes if the lengths are known."""
        names = [name for name, used in (("B", footprint.batch), ("H", footprint.head)) if used]
        axes = [*names, *footprint.kind.axes()] or ["1"]
        if not all(isinstance(n, int) for n in shape):
            return f"[{', '.join(axes)}]"
        return f"[{', '.join(axes)}] of {math.prod(shape) * dtype.itemsize:,} bytes"

    def _dtype(self) -> torch.dtype:
        return working_dtype(fake_tensor(self.query).dtype)

    def _size(self, of: str, dim: int) -> Any:
        value = fake_tensor(self.query if of == "query" else self.key).shape[dim]
        if isinstance(value, int):
            return value
        return self.outer.method("size", self.query if of == "query" else self.key, dim)

    def _shape(self, footprint: Footprint) -> list[Any]:
        """Return the shape of a footprint's table. Sizes that are not known are nodes of the outer graph."""
        queries, keys = self._size("query", 2), self._size("key", 2)
        lengths = [self._size("query", 0)] * footprint.batch + [self._size("query", 1)] * footprint.head
        along = footprint.kind.shape(self.outer, queries, keys)
        return [*lengths, *along] or [1]

    def _grid(self, footprint: Footprint) -> tuple[Any, ...]:
        """Return the outer nodes of b, h, q, k over the table, and the table's shape."""
        if footprint not in self._grids:
            shape = self._shape(footprint)
            axes = [self._range(axis, shape) for axis in range(len(shape))]
            b = axes.pop(0) if footprint.batch else None
            h = axes.pop(0) if footprint.head else None
            q, k = footprint.kind.coordinates(self.outer, axes, self._size("query", 2), self._size("key", 2))
            self._grids[footprint] = (b, h, q, k, tuple(shape))
        return self._grids[footprint]

    def _range(self, axis: int, shape: list[Any]) -> Node:
        device = fake_tensor(self.query).device
        arange = self.outer.function(torch.arange, shape[axis], dtype=torch.int32, device=device)
        return self.outer.method("view", arange, [-1 if a == axis else 1 for a in range(len(shape))])

    def _outside(self, node: Any, grid: tuple[Any, ...], done: dict[Node, Any]) -> Any:
        """Copy a node of the score_mod, with all its inputs, into the outer graph, over a table's grid."""
        if not isinstance(node, Node):
            return node
        if node in done:
            return done[node]
        if node in self.captured:
            done[node] = self._in_working_dtype(node)
        elif node.op == "placeholder":
            position = grid[ScoreMod.of(self.inner).positions.index(node)]
            # A position that the footprint does not have cancels (as in ``(q - k) + k``), so any value can be used.
            done[node] = position if position is not None else self._range(0, [1])
        elif node in self.row_lookups and grid[0] is not None and grid[1] is not None:
            done[node] = self._looked_up_in_rows(node, grid, done)
        elif node.target is operator.getitem:
            table, indices = node.args[0], indices_of(node)
            shape = fake_tensor(table).shape
            clamped = self.masked or node in self.hypothetical
            places = [self._outside(i, grid, done) for i in indices]
            safe = tuple(self._safe(i, shape[d], table, d) if clamped else i for d, i in enumerate(places))
            read = self.outer.function(operator.getitem, self._outside(table, grid, done), safe)
            number = fake_tensor(node).dim() == 0 and not any(isinstance(i, Node) for i in indices)
            done[node] = self._one_element(read) if number else read
        elif summed(node) is not None:
            done[node] = self._sum_of_vectors(node, grid, done)
        else:
            vector = fake_tensor(node) is not None and fake_tensor(node).dim() > 0
            inputs = {n: self._outside(n, grid, done) for n in node.all_input_nodes}
            for n in inputs if vector else ():
                if fake_tensor(n).dim() == 0:
                    inputs[n] = self.outer.function(torch.unsqueeze, inputs[n], -1)
            copied = self.outer.copy(node, lambda n: inputs[n])
            if node in self.inexact:
                copied = self.outer.function(torch.ops.gradfuse.stored.default, copied)
            done[node] = copied if node.all_input_nodes else self._one_element(copied)
        return done[node]

    def _slices(self, node: Node, footprint: Footprint) -> dict[Node, Any]:
        """Return the reads of captured tensors in the cone of a node that are slices on the grid of the footprint."""
        sizes = fake_tensor(self.query).shape
        lengths = (*sizes[:3], fake_tensor(self.key).shape[2])
        known = {i: x for i, x in self.polynomials.items() if dtype_of(i) in (torch.int32, torch.int64)}
        found = {}
        for read in cone(node):
            if read.target is operator.getitem and read.args[0] in self.captured and read not in self.row_lookups:
                table = read.args[0]
                indices = [i if type(i) is int else known.get(i) for i in indices_of(read)]
                made = functools.partial(self._in_working_dtype, table)
                found[read] = as_slices(self.outer, made, fake_tensor(table).shape, indices, footprint, lengths)
        return {read: slices for read, slices in found.items() if slices is not None}

    def _looked_up_in_rows(self, node: Node, grid: tuple[Any, ...], done: dict[Node, Any]) -> Node:
        """Insert a lookup in rows as a gather. The rows are those of the query, or of the key, which are then columns."""
        call, method = self.outer.function, self.outer.method
        by_key = self.row_lookups[node]
        table, place = node.args[0], indices_of(node)[-1]
        batch, heads, length, bins = fake_tensor(table).shape
        index = self._outside(place, grid, done)
        if self.masked:
            index = self._safe(index, bins, table, 3)
        else:
            index = call(torch.where, call(operator.lt, index, 0), call(operator.add, index, bins), index)
        columns = grid[-1][3]
        index = call(torch.broadcast_to, method("long", index), [1, 1, *grid[-1][2:]])
        if by_key:
            # The columns behind the last key, which pad the table's rows, have no row here.
            index = call(torch.transpose, method("narrow", index, 3, 0, length), 2, 3)
        found = call(torch.gather, self._outside(table, grid, done), 3, method("expand", index, batch, heads, -1, -1))
        if not by_key:
            return found
        found = call(torch.transpose, found, 2, 3)
        return found if columns == length else call(F.pad, found, (0, columns - length))

    def _shifted(self, node: Node, grid: tuple[Any, ...]) -> Node:
        """Insert the matrices of a relative shift, in the dtype of its tensor."""
        table = node.args[0]
        return shifted(self.outer, self.captured[table], self.shifts[node], fake_tensor(table).shape, grid[-1][3])

    def _sum_of_vectors(self, node: Node, grid: tuple[Any, ...], done: dict[Node, Any]) -> Node:
        """Insert a sum over vectors [*grid, D]. A vector has size 1 along the positions on which it does not depend."""
        call = self.outer.function
        if factors(node) is None:
            vectors = [self._outside(n, grid, done) for n in summed(node)]
            total = call(torch.sum, vectors[0] if len(vectors) == 1 else call(torch.mul, *vectors), -1)
            dtype = fake_tensor(node).dtype
            # The inner product of narrow integers wraps, and torch.sum counts in 64 bits.
            return total if dtype.is_floating_point else self.outer.method("to", total, dtype)
        sides = []
        for vector, other_axis in zip(factors(node), (-2, -3), strict=True):
            side = self._outside(vector, grid, done)
            if not depends_on_position(vector):
                side = call(torch.unsqueeze, call(torch.unsqueeze, side, 0), 0)
            sides.append(call(torch.select, side, other_axis, 0))
        rows, columns = sides
        return call(torch.matmul, rows, call(torch.transpose, columns, -1, -2))

    def _one_element(self, number: Node) -> Node:
        """Turn a 0-d tensor into a vector of one element, because the dtype of a 0-d tensor would not count in a result."""
        return self.outer.function(torch.unsqueeze, number, 0)

    def _in_working_dtype(self, node: Node) -> Any:
        operand, value = self.captured[node], fake_tensor(node)
        if value is None or not value.is_floating_point() or value.dtype in (self._dtype(), torch.float64):
            return operand
        if node not in self._cast:
            self._cast[node] = self.outer.method("to", operand, self._dtype())
        return self._cast[node]

    def widened(self, operand: Any) -> Any:
        """Return the cast of a learned operand from which a table was computed: its gradients are added unrounded."""
        casts = [cast for node, cast in self._cast.items() if self.captured[node] is operand]
        return casts[0] if casts and fake_tensor(operand).requires_grad else operand

    def _safe(self, index: Any, size: Any, table: Node, dim: int) -> Any:
        """Wrap and clamp an index. That of a position that a mask hides may be out of range, and must not assert."""
        if not isinstance(index, Node):
            return index
        if not isinstance(size, int):
            size = self.outer.method("size", self.captured[table], dim)
        negative = self.outer.function(operator.lt, index, 0)
        wrapped = self.outer.function(operator.add, index, size)
        index = self.outer.function(torch.where, negative, wrapped, index)
        last = arithmetic(self.outer, operator.sub, size, 1)
        return self.outer.method("clamp", index, min=0, max=last)

    def elements(self, footprint: Footprint) -> int | None:
        """Return the number of elements of a footprint's table, or None if lengths are dynamic."""
        lengths = [n for x in (self.query, self.key) for n in fake_tensor(x).shape]
        return math.prod(self._shape(footprint)) if all(isinstance(n, int) for n in lengths) else None

    # ------------------------------------------------ inside: the read

    def _index(self, footprint: Footprint) -> tuple[Any, ...]:
        b, h, q, k = ScoreMod.of(self.inner).positions
        heads = [b] * footprint.batch + [h] * footprint.head
        return (*heads, *footprint.kind.index(self.inner, q, k)) or (0,)

    def _key(self, node: Any) -> Any:
        """Return a key for the computation of a node, so that equal expressions share a table.

        It is a name, because a key with those of all operands in it would grow as 2**n if each of n nodes is used twice. It
        is not a number, which could not be told from a number among the operands.
        """
        if not isinstance(node, Node):
            return repr(node)
        if node not in self._keys:
            args = torch.fx.node.map_aggregate(
                (node.args, node.kwargs), lambda a: self._key(a) if isinstance(a, Node) else a
            )
            computation = str((node.op, node.name if node.op == "placeholder" else str(node.target), args))
            self._keys[node] = self._names.setdefault(computation, f"node {len(self._names)}")
        return self._keys[node]
