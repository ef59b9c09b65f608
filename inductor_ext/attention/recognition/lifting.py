"""Lifting: read a tensor that the graph materialises as a function of the position (b, h, q, k) of a score.

A bias ``[1, H, Q, K]`` that is looked up in a small table at bucketed distances becomes ``table[bucket(k - q), h]``, an
expression tree (``elements.py``) that a score_mod can compute. What the graph computes elementwise, by views, from
``arange`` or by indexing is followed. Everything else is read as the tensor it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch.fx import Node

from ...core.fx import HALF, dtype_of, fake_tensor, requires_grad, shape_of
from ...core.purity import is_pure
from ...core.report import user_line
from ...core.terms import CASTS, arg, calls_torch, is_tensor, number, op
from ...core.writes import Writes
from ...torch_api.sizes import size_hint
from ..footprints import is_pointwise
from ..functional import operands_out_of_place, out_of_place
from ..kinds import K, Q
from . import lookups, views
from .constants import folded
from .elements import Apply, Constant, Element, Position, Read, Score, as_stored, depends_on_scores, positions_in
from .indices import Ranges
from .products import Product, product_of

#: An element of more operations than this within each other is read as it is, because all of them are followed recursively.
_DEEPEST = 100


#: Elementwise ops whose result is a number of floating point, and changes in steps.
_STEPS = {"floor", "ceil", "round", "trunc", "fix", "frac", "sign", "sgn", "heaviside", "remainder", "fmod", "mod"}
_STEPS |= {"floor_divide", "floordiv", "copysign", "signbit", "nextafter"}


#: Elementwise ops of which a number is stored as it is.
_CHOICES = (torch.where, torch.masked_fill, "masked_fill")


class NotLifted(Exception):
    """An element of a node is not understood, so that the node is read as a tensor."""


class NotAttention(Exception):
    """Code that looks like an attention is none, or cannot be replaced. The message says why."""


class Lift:
    """The elements of the tensors of one attention.

    ranges: those of b, h, q and k. last: the node that the attention replaces, where all tensors are read. writes: those of
    its graph. product: that of query and key, after it was found. visited: the elements of the nodes that were followed.
    """

    def __init__(self, ranges: Ranges, last: Node, writes: Writes) -> None:
        self.ranges, self.last, self.writes = ranges, last, writes
        self._depth = 0
        self.product: Product | None = None
        self.visited: dict[tuple[Node, Any], Element] = {}

    def element(self, node: Node, index: views.Index) -> Element:
        """Return ``node[index]`` for the scores at all positions."""
        key = (node, index)
        if key not in self.visited:
            self._depth += 1
            try:
                self.visited[key] = self._computed(node, index)
            except (NotLifted, views.NotAView):
                self.visited[key] = self._read(node, index)
            finally:
                self._depth -= 1
        return self.visited[key]

    def whole(self, node: Node, index: views.Index) -> Element:
        """Return ``node[index]``, the element of a bias or of the scores.

        Raises NotAttention if a tensor that it reads is overwritten before the attention ends.
        """
        try:
            return self.element(node, index)
        except NotLifted as error:
            raise NotAttention(str(error)) from error

    # ------------------------------------------------ one node

    def _read(self, node: Node, index: views.Index) -> Read:
        # The kernels read it when the attention ends, and again in the backward.
        if self.writes.after(node):
            raise NotLifted(f"a tensor that its scores read is changed in place later ({line_of(node)})")
        return Read(node, index)

    def _computed(self, node: Node, index: views.Index) -> Element:
        self._check(node)
        name = op(node)
        if name == "arange":
            return self._arange(node, index)
        if name in _FILLS:
            return Constant(as_stored(_FILLS[name](node), dtype_of(node)), dtype_of(node))
        if (product := self._product(node, index)) is not None:
            return self._added(node, index, product) if name == "baddbmm" else product
        if name in CASTS:
            return self._cast(node, index)
        if name == "dropout" and drops_nothing(node):
            return self.element(arg(node, 0, "input"), index)
        if lookups.is_lookup(node):
            return self._lookup(node, index)
        if name in ("tril", "triu"):
            return self._triangle(node, index)
        if name == "pad":
            return self._padded(node, index)
        try:
            return self._through_view(node, *views.source(node, index, self.ranges), index)
        except views.NotAView:
            return self._pointwise(node, index)

    def _check(self, node: Node) -> None:
        """Raise NotLifted if the node cannot be computed again at the end of the attention, from its operands.

        It may not be pure, an operand may have changed in between, or its value may have no gradient where its operands do.
        """
        if self._depth > _DEEPEST or not calls_torch(node) or not is_tensor(node) or "input" in node.kwargs:
            raise NotLifted
        if not is_pure(node) and out_of_place(node) is None and not drops_nothing(node):
            raise NotLifted
        tensors = [n for n in node.all_input_nodes if is_tensor(n)]
        if any(self.writes.between(n, node) for n in tensors) or self.writes.in_place_by_position(node):
            raise NotLifted
        if op(node) in _FILLS:
            # It has no gradient because it reads no values.
            return
        # A value that is computed under no_grad, or detached, must not get a gradient.
        learns = requires_grad(node) and node not in self.writes.without_gradient
        if fake_tensor(node).is_floating_point() and not learns and any(map(requires_grad, tensors)):
            raise NotLifted

    def _through_view(self, node: Node, operand: Node, inside: views.Index, index: views.Index) -> Element:
        element = self.element(operand, inside)
        as_it_is = isinstance(element, Read) and element.node is operand
        if as_it_is and self._complex(operand, inside) and not self._complex(node, index):
            # The view itself is simpler to read.
            raise NotLifted
        return element

    def _complex(self, node: Node, index: views.Index) -> bool:
        """Return whether an index is more than positions and numbers."""
        sizes = shape_of(node)
        along = [(i, n) for i, n in zip(index, sizes, strict=True) if isinstance(i, sympy.Expr)]
        return not all(i.is_Integer or self.ranges.radix(i, n) is not None for i, n in along)

    def _product(self, node: Node, index: views.Index) -> Score | None:
        if self.product is not None and self.product.node is node:
            return Score(dtype_of(node)) if self.product.index == index else None
        if self.product is None:
            self.product = product_of(node, index, self.ranges)
            return Score(dtype_of(node)) if self.product is not None else None
        return None

    def _added(self, node: Node, index: views.Index, product: Element) -> Element:
        """Return an element of ``beta * input + alpha * product``, as baddbmm computes it."""
        beta, alpha = (number(node.kwargs.get(name, 1)) for name in ("beta", "alpha"))
        if not beta or alpha is None:
            # With a beta of 0 the input is not even read.
            raise NotLifted
        dtype, operand = dtype_of(node), node.args[0]
        terms = [product, self.element(operand, views.broadcast(index, shape_of(operand)))]
        scaled = [
            term if factor == 1 else Apply("call_function", operator.mul, (term, factor), {}, dtype)
            for term, factor in zip(terms, (alpha, beta), strict=True)
        ]
        return Apply("call_function", operator.add, tuple(scaled), {}, dtype)

    def _arange(self, node: Node, index: views.Index) -> Position:
        (i,) = index
        if not isinstance(i, sympy.Expr) or dtype_of(node) in (None, *HALF):
            raise NotLifted
        only_end = len(node.args) == 1 and "end" not in node.kwargs
        start = 0 if only_end else arg(node, 0, "start", 0)
        step = arg(node, 2, "step", 1)
        if not all(type(n) is int for n in (start, step)):
            raise NotLifted
        value = sympy.expand(i * step + start)
        if not self.ranges.fits_32_bits(value):
            raise NotLifted
        return Position(value, dtype_of(node))

    def _cast(self, node: Node, index: views.Index) -> Element:
        before, after = dtype_of(node.args[0]), dtype_of(node)
        element = self.element(node.args[0], views.broadcast(index, shape_of(node.args[0])))
        if before is after:
            return element
        if after in HALF and not before.is_floating_point and before is not torch.bool:
            # Large integers would be rounded by more than a score may be off.
            raise NotLifted
        if not after.is_floating_point:
            self._check_exact([element])
        return folded(Apply("call_method", "to", (element, after), {}, after), node)

    def _lookup(self, node: Node, index: views.Index) -> Element:
        """An element of a table at indices that are computed, or that are data."""
        table, entries = lookups.entries(node, index)
        found = tuple(self.element(*e) if isinstance(e, tuple) else e for e in entries)
        if self.writes.after(table):
            raise NotLifted
        if all(isinstance(e, Position) for e in found if isinstance(e, Element)):
            exact = tuple(e.value if isinstance(e, Position) else e for e in found)
            # A negative index counts from the end of the table, and not from the end of what that is a view of.
            if all(self._exists(i, n) for i, n in zip(exact, shape_of(table), strict=True)):
                return self.element(table, exact)
        return Read(table, found)

    def _exists(self, index: sympy.Expr, size: Any) -> bool:
        return isinstance(size, int) and self.ranges.interval(index).within(size)

    def _triangle(self, node: Node, index: views.Index) -> Element:
        diagonal = arg(node, 1, "diagonal", 0)
        row, column = index[-2:]
        if not (isinstance(row, sympy.Expr) and isinstance(column, sympy.Expr) and isinstance(diagonal, int)):
            raise NotLifted
        distance = Position(sympy.expand(column - row - diagonal), torch.int64)
        kept = Apply("call_function", operator.le if op(node) == "tril" else operator.ge, (distance, 0), {}, torch.bool)
        rest = Constant(0, dtype_of(node))
        return Apply("call_function", torch.where, (kept, self.element(node.args[0], index), rest), {}, dtype_of(node))

    def _padded(self, node: Node, index: views.Index) -> Element:
        """Return the element of ``pad(x, (left, right, ...))``, if only elements of x and none of the padding are read."""
        widths = list(arg(node, 1, "pad"))
        if arg(node, 2, "mode", "constant") != "constant" or not all(isinstance(w, int) for w in widths):
            raise NotLifted
        operand, inside = node.args[0], list(index)
        for d in range(len(widths) // 2):
            left, right = widths[2 * d : 2 * d + 2]
            at = len(index) - 1 - d
            if (left, right) == (0, 0):
                continue
            size = shape_of(operand)[at]
            if not isinstance(inside[at], sympy.Expr) or not isinstance(size, int):
                raise NotLifted
            inside[at] = inside[at] - left
            if not self.ranges.interval(inside[at]).within(size):
                raise NotLifted
        return self._through_view(node, operand, tuple(inside), index)

    def _is_dense(self, read: Read) -> bool:
        """Return whether a read has a float for about every pair of a query and a key."""
        along = [n for i, n in zip(read.index, shape_of(read.node), strict=True) if {Q, K} & positions_in(i)]
        sizes, lengths = ([size_hint(n) for n in ns] for ns in (along, (self.ranges.extents[Q], self.ranges.extents[K])))
        known = None not in (*sizes, *lengths)
        return dtype_of(read.node).is_floating_point and known and 2 * math.prod(sizes) > math.prod(lengths)

    # ------------------------------------------------ elementwise ops

    def _pointwise(self, node: Node, index: views.Index) -> Element:
        kind, target = (node.op, node.target) if is_pure(node) else out_of_place(node)
        name = target if isinstance(target, str) else target.__name__
        tensors = [n for n in node.all_input_nodes if is_tensor(n)]
        numbers = [a for a in (*node.args, *node.kwargs.values()) if not isinstance(a, Node)]
        if not is_pointwise(name, len(tensors)) or len(tensors) < len(node.all_input_nodes):
            raise NotLifted
        if any(isinstance(a, (list, tuple)) for a in numbers):
            raise NotLifted
        if self._promotes(tensors):
            raise NotLifted
        made = {n: self.element(n, views.broadcast(index, shape_of(n))) for n in tensors}
        args, kwargs = (torch.fx.map_arg(x, made.__getitem__) for x in operands_out_of_place(node))
        kwargs = {name: x for name, x in kwargs.items() if name != "memory_format"}
        element = _applied(kind, target, args, kwargs, dtype_of(node))
        self._check_reads(element)
        if not element.dtype.is_floating_point or element.name in _STEPS:
            self._check_exact(made.values())
        return folded(element, node)

    def _check_exact(self, operands: Iterable[Element]) -> None:
        """Raise NotLifted if a kernel would compute one of these numbers otherwise than the graph.

        It does not round to half precision, and a comparison, or an index, may then be of another number altogether.
        """
        for operand in operands:
            if any(not isinstance(e, Read) and e.dtype in HALF for e in operand.walk()):
                raise NotLifted

    def _promotes(self, tensors: list[Node]) -> bool:
        """Return whether the dtypes of 0-d and other operands differ: in a score_mod, all operands are 0-d."""
        values = [fake_tensor(n) for n in tensors if dtype_of(n) is not torch.bool]
        return len({x.dtype for x in values}) > 1 and len({x.dim() == 0 for x in values}) > 1

    def _check_reads(self, element: Apply) -> None:
        """Raise NotLifted if it is cheaper to read the result of an op than its operands: a sum of two tensors of pairs.

        The sum of a learned bias and a frozen one is lifted all the same, because the frozen one may be a mask.
        """
        dense = {e.node for e in element.walk() if isinstance(e, Read) and self._is_dense(e)}
        alike = len({requires_grad(n) for n in dense}) == 1
        if len(dense) > 1 and alike and not depends_on_scores(element):
            raise NotLifted


def _applied(kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Apply:
    """Return an elementwise op of elements, in the form that all later stages know."""
    if target == "where":
        # ``x.where(condition, y)``
        kind, target = "call_function", torch.where
        named = dict(zip(("input", "condition", "other"), args, strict=False)) | kwargs
        args, kwargs = tuple(named[name] for name in ("condition", "input", "other")), {}
    if target in _CHOICES:
        args, kwargs = tuple(as_stored(a, dtype) for a in args), {name: as_stored(a, dtype) for name, a in kwargs.items()}
    return Apply(kind, target, args, kwargs, dtype)


def line_of(node: Node) -> str:
    """Return the user's line of a node, or its name if the line is not known."""
    return user_line(node) or node.name


def drops_nothing(node: Node) -> bool:
    """Return whether a node is a dropout with probability 0, or one of inference."""
    # torch.dropout has another name for its last argument than the functional one.
    training = arg(node, 2, "training", node.kwargs.get("train", True))
    return op(node) == "dropout" and (number(arg(node, 1, "p", 0.5)) == 0.0 or training is False)


def _value_at(position: int, name: str) -> Any:
    def value(node: Node) -> Any:
        number = arg(node, position, name)
        if not isinstance(number, (bool, int, float)):
            raise NotLifted
        return number

    return value


_FILLS = {
    "zeros": lambda node: 0,
    "ones": lambda node: 1,
    "zeros_like": lambda node: 0,
    "ones_like": lambda node: 1,
    "new_zeros": lambda node: 0,
    "new_ones": lambda node: 1,
    "full": _value_at(1, "fill_value"),
    "full_like": _value_at(1, "fill_value"),
    "new_full": _value_at(2, "fill_value"),
    "tensor": _value_at(0, "data"),
}
