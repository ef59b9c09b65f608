"""Find out on what an expression in a score_mod depends.

Every node of a score_mod's FX graph gets a **footprint**: whether it depends on the batch, on the head, on the score, and
one element of this lattice (attention/kinds) for the query and key positions:

                 PAIR                          both, in no simpler form that we know
      /      /          \\        \\
     |      |         IMAGE        \\               the distances of rows and columns of an image
     |      |           |           |
    ROW   COLUMN    DIAGONAL   ANTIDIAGONAL     query only, key only, k - q only, k + q only
      \\      \\          /        /
                 NONE

The analysis is an abstract interpretation. A node whose value is exact integer arithmetic carries a sympy polynomial in b,
h, q, k and opaque atoms. So ``k - q`` is a diagonal however it is written: if ``k = q + d`` is substituted, q cancels. Every
other pointwise op joins the footprints of its inputs, and indexing joins those of its indices. An expression that is not
understood is ``unknown``: it may depend on anything. A footprint that is too large is a missed optimisation, and one that is
too small is a wrong gradient.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx import Graph, Node

from ..core.equal_graphs import contents
from ..core.fx import dtype_of, indices_of, name_of, value_or_none
from ..core.integers import exact_integers
from ..torch_api.sizes import ValueRanges, bound_sympy
from .kinds import COLUMN, NONE, PAIR, ROW, FootprintKind, K, Q, join, recognise
from .kinds.images import image_row
from .reductions import factors, summed
from .score_mod import ScoreMod


@dataclass(frozen=True)
class Footprint:
    """The inputs on which a scalar of a score_mod depends. ``unknown``: it may depend on anything, or not be repeatable."""

    batch: bool = False
    head: bool = False
    kind: FootprintKind = NONE
    score: bool = False
    unknown: bool = False

    def join(self, other: Footprint) -> Footprint:
        """Return the least upper bound."""
        return Footprint(
            self.batch or other.batch,
            self.head or other.head,
            join(self.kind, other.kind),
            self.score or other.score,
            self.unknown or other.unknown,
        )

    @property
    def has_key(self) -> bool:
        """Whether it may differ along a row of scores. If not, softmax cancels it as an additive term."""
        return self.unknown or self.score or self.kind not in (NONE, ROW)

    def __str__(self) -> str:
        if self.unknown:
            return "unknown"
        axes = [name for name, used in (("batch", self.batch), ("head", self.head), ("score", self.score)) if used]
        return "+".join([*axes, str(self.kind)])


NOTHING = Footprint()
UNKNOWN = Footprint(True, True, PAIR, True, True)
_PAIRS = Footprint(batch=True, head=True, kind=PAIR)

B, H = sympy.symbols("b h", integer=True)


class _Value(NamedTuple):
    """The abstract value of a node: its footprint and, if it is exact integer arithmetic, a polynomial.

    The value is that of the polynomial in the integers, wrapped to the dtype if that is an integer dtype. Sums, differences
    and products of wrapped operands wrap to the same value. A cast does not, so it keeps a polynomial only if nothing
    wrapped.
    """

    footprint: Footprint
    polynomial: sympy.Expr | None = None


def names(text: str) -> frozenset[str]:
    """Split a text into a set of names."""
    return frozenset(text.split())


#: The names (of functions or methods) of ops that compute their result element by element from tensor inputs.
POINTWISE = names("""
    abs absolute acos acosh add and_ asin asinh atan atan2 atanh bfloat16 bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor bool ceil celu clamp clamp_max clamp_min clip clone contiguous copysign cos
    cosh detach div divide double elu eq erf erfc exp exp2 expm1 fix float float_power floor floor_divide floordiv fmax fmin
    fmod frac ge gelu greater greater_equal gt half hardsigmoid hardswish hardtanh heaviside hypot int inv invert isfinite
    isinf isnan ldexp le leaky_relu lerp less less_equal log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not
    logical_or logical_xor logit logsigmoid long lshift lt masked_fill maximum minimum mish mod mul multiply ne neg negative
    not_ not_equal or_ pos positive pow reciprocal relu relu6 remainder round rshift rsqrt rsub selu sgn short sigmoid sign
    silu sin sinc sinh softplus softsign sqrt square sub subtract tan tanh tanhshrink threshold to true_divide truediv trunc
    type type_as where xlogy xor
""")
#: Ops that are pointwise only with two tensor operands; with one operand they are reductions.
_BINARY_ONLY = frozenset({"max", "min"})
#: Ops whose result is one value, which does not depend on the values of the tensor operands.
_CONSTANT = frozenset({"full", "full_like", "ones_like", "zeros_like", "new_full", "new_ones", "new_zeros", "scalar_tensor"})
#: Ops that return their operand, perhaps in another dtype: "to" and similar methods, and their ATen names.
_CASTS = names(
    "to _to_copy convert_element_type clone detach alias lift_fresh_copy contiguous pos positive int long float double"
)
_NARROW_CASTS = names("char byte short half bfloat16")
#: Casts that may make a bool of an integer.
TRUTH_CASTS = names("to _to_copy convert_element_type bool type type_as")
#: Ops that are the row of a position in an image, and its column. A position is not negative, so they agree on it.
_DIVISIONS, _REMAINDERS = names("floordiv floor_divide"), names("mod remainder fmod")
#: The dtypes whose sums and products are followed. Those of floats are exact within the integers that the dtype represents.
_FOLLOWED = {torch.int32, torch.int64, torch.float32, torch.float64}
#: The abstract values of the nodes of score_mods, by all that they depend on, and the ranges of their symbols.
_interpretations: dict[Any, tuple[list[_Value | None], Ranges]] = {}
_MOST_INTERPRETATIONS = 256
#: The bound of a position whose length is symbolic. Positions are 32-bit integers, and the sum of two does not wrap.
_MOST_POSITIONS = 2**30


def footprints(
    graph: Graph, extents: Sequence[Any] = (None,) * 4, assumed: Mapping[Node, sympy.Expr] = MappingProxyType({})
) -> dict[Node, Footprint]:
    """Return the footprint of every node of a score_mod graph ``(score, b, h, q, k, *captured)``.

    Works on Dynamo's graphs (``operator``, ``torch`` functions, tensor methods) and on ATen's. Nodes carry a fake
    tensor in ``meta["example_value"]`` or ``meta["val"]``, whose dtype says what is exact. ``extents`` are the lengths of
    the ranges of b, h, q and k. A length that is no int is not known. ``assumed``: nodes that count as these polynomials.
    Their symbols besides the positions are unknown numbers: what depends on one of them depends on the pair.
    """
    return {node: value.footprint for node, value in _interpret(graph, Ranges(extents), assumed).items()}


def polynomials(graph: Graph, extents: Sequence[Any] = (None,) * 4) -> dict[Node, sympy.Expr]:
    """Return the nodes of a score_mod that are polynomials in b, h, q and k alone, with these.

    extents: as for ``footprints``.
    """
    values = _interpret(graph, Ranges(extents))
    found = {node: value.polynomial for node, value in values.items() if value.polynomial is not None}
    return {node: x for node, x in found.items() if x.free_symbols <= {B, H, Q, K}}


def inexact_integers(graph: Graph, extents: Sequence[Any] = (None,) * 4) -> set[Node]:
    """Return the nodes of a score_mod graph that wrap or round integers, or may do so.

    These are results of 8 or 16 bits for which no bound is known, and polynomials in the positions that exceed the range of
    their dtype. Single precision is not among them, because it represents every position.
    """
    ranges = Ranges(extents)
    values = _interpret(graph, ranges)
    return {node for node, value in values.items() if _may_differ(node, value, values, ranges)}


def _may_differ(node: Node, value: _Value, values: dict[Node, _Value], ranges: Ranges) -> bool:
    dtype = dtype_of(node)
    integers = [n for n in node.all_input_nodes if n in values and not _is_float(n)]
    if dtype is None or node.op not in ("call_function", "call_method") or not integers or _reads(node):
        return False
    if dtype is torch.bool:
        return name_of(node) in TRUTH_CASTS and any(dtype_of(n) is not torch.bool for n in integers)
    cast = name_of(node) in _CASTS | _NARROW_CASTS
    if dtype.itemsize <= 2 and (cast or not _is_float(node)):
        polynomial = values[integers[0]].polynomial if cast else None
        return polynomial is None or not ranges.fits(polynomial, dtype)
    of_positions = value.polynomial is not None and value.polynomial.free_symbols <= {B, H, Q, K}
    return not _is_float(node) and of_positions and not ranges.fits(value.polynomial, dtype)


def _reads(node: Node) -> bool:
    """Return whether a node reads an element of a tensor."""
    return node.target is operator.getitem or name_of(node) in ("index", "mod_index")


def _is_float(node: Node) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point


def _interpret(
    graph: Graph, ranges: Ranges, assumed: Mapping[Node, sympy.Expr] = MappingProxyType({})
) -> dict[Node, _Value]:
    """Return the abstract value of every node, and add the range of every new symbol to ``ranges``.

    Layers of a model have equal score_mods, and several analyses of one ask the same, so the values are kept.
    """
    if any(_size_symbol(c) is not None for c in ScoreMod.of(graph).captured):
        # A symbol for a size has the name of its node.
        return _evaluated(graph, ranges, assumed)
    nodes = [*graph.nodes]
    key = (contents(graph), ranges.key(), tuple((nodes.index(n), x) for n, x in assumed.items()))
    known = _interpretations.get(key)
    if known is None:
        values = _evaluated(graph, ranges, assumed)
        known = [values.get(n) for n in nodes], ranges
        if len(_interpretations) >= _MOST_INTERPRETATIONS:
            _interpretations.clear()
        _interpretations[key] = known
    ranges.take(known[1])
    return {node: value for node, value in zip(nodes, known[0], strict=True) if value is not None}


def _evaluated(graph: Graph, ranges: Ranges, assumed: Mapping[Node, sympy.Expr]) -> dict[Node, _Value]:
    inputs = ScoreMod.of(graph)
    values = {
        inputs.score: _Value(Footprint(score=True)),
        inputs.b: _Value(Footprint(batch=True), B),
        inputs.h: _Value(Footprint(head=True), H),
        inputs.q: _Value(Footprint(kind=ROW), Q),
        inputs.k: _Value(Footprint(kind=COLUMN), K),
        **{c: _Value(NOTHING, _size_symbol(c)) for c in inputs.captured},
        **{node: _Value(_PAIRS, x) for node, x in assumed.items()},
    }
    unknown = {symbol for x in assumed.values() for symbol in x.free_symbols} - {B, H, Q, K}
    atoms: dict[sympy.Symbol, Footprint] = dict.fromkeys(unknown, _PAIRS)
    rows: dict[sympy.Symbol, sympy.Expr] = {}
    counter = itertools.count()
    for node in graph.nodes:
        if node not in values and node.op != "output":
            value = _evaluate(node, values, atoms, rows, ranges)
            if value.polynomial is None and _exact(node) and value.footprint.kind is not PAIR:
                atom = sympy.Symbol(f"n{next(counter)}", integer=True)
                atoms[atom] = value.footprint
                ranges.add(atom, dtype_of(node))
                value = value._replace(polynomial=atom)
            values[node] = value
    return values


class Ranges:
    """The ranges of the symbols of polynomials. They show whether a dtype represents all values of a polynomial."""

    def __init__(self, extents: Sequence[Any]) -> None:
        lengths = [n if isinstance(n, int) else _MOST_POSITIONS for n in extents]
        self._ranges = {s: ValueRanges(0, max(n - 1, 0)) for s, n in zip((B, H, Q, K), lengths, strict=True)}

    def add(self, symbol: sympy.Symbol, dtype: torch.dtype | None) -> None:
        """Add a symbol that may have any value of its dtype. A Python integer has no bounds."""
        if dtype is not None:
            self._ranges[symbol] = ValueRanges(*exact_integers(dtype))

    def key(self) -> tuple[Any, ...]:
        """Return a value that is equal for equal ranges."""
        return tuple((symbol, x.lower, x.upper) for symbol, x in self._ranges.items())

    def take(self, other: Ranges) -> None:
        """Take the ranges of another."""
        self._ranges = dict(other._ranges)

    def below(self, symbol: sympy.Symbol, number: int) -> bool:
        """Return whether every value of a position is below a number."""
        return bool(self._ranges[symbol].upper < number)

    def fits(self, polynomial: sympy.Expr, dtype: torch.dtype | None) -> bool:
        """Return whether a dtype represents every value of a polynomial. A Python integer (None) always does."""
        if dtype is None:
            return True
        if not polynomial.free_symbols <= self._ranges.keys():
            return False
        least, greatest = exact_integers(dtype)
        found = bound_sympy(sympy.expand(polynomial), self._ranges)
        return bool(found.lower >= least and found.upper <= greatest)


def _evaluate(
    node: Node,
    values: dict[Node, _Value],
    atoms: dict[sympy.Symbol, Footprint],
    rows: dict[sympy.Symbol, sympy.Expr],
    ranges: Ranges,
) -> _Value:
    operands = [values[n] for n in node.all_input_nodes]
    joined = functools.reduce(Footprint.join, (v.footprint for v in operands), NOTHING)
    if joined.unknown or node.op not in ("call_function", "call_method", "get_attr"):
        return _Value(UNKNOWN)
    if node.op == "get_attr":
        return _Value(NOTHING)
    name = name_of(node)
    if _reads(node):
        scalar = all(isinstance(i, (int, Node)) for i in indices_of(node))
        # Only captured tensors count: an element of a vector that is computed for each position could not be read outside.
        captured = isinstance(node.args[0], Node) and node.args[0].op == "placeholder"
        return _Value(joined) if scalar and captured else _Value(UNKNOWN)
    if name in _CONSTANT:
        return _Value(NOTHING if not any(isinstance(a, Node) for a in node.args[1:]) else joined)
    if summed(node) is not None:
        # Where a table has an element for each pair, anything but an inner product would need memory for as many vectors.
        return _Value(joined if joined.kind.small or factors(node) is not None else UNKNOWN)
    tensors = len(node.args) if all(isinstance(a, Node) for a in node.args) else 0
    if not is_pointwise(name, tensors) and name not in _CASTS:
        return _Value(UNKNOWN)
    polynomial = _polynomial(node, name, values, ranges)
    if polynomial is None:
        polynomial = _place_in_image(node, name, values, rows, ranges)
    if polynomial is None:
        return _Value(joined)
    return _Value(_footprint(polynomial, joined, atoms, rows), polynomial)


def _place_in_image(
    node: Node, name: str, values: dict[Node, _Value], rows: dict[sympy.Symbol, sympy.Expr], ranges: Ranges
) -> sympy.Expr | None:
    """Return the row or column of a position in an image, None if a node is neither. A row becomes one of ``rows``."""
    operands = [_operand(a, values) for a in node.args]
    if name not in _DIVISIONS | _REMAINDERS or node.kwargs or len(operands) != 2 or not _exact(node):
        return None
    position, width = operands
    if position not in (Q, K) or not isinstance(width, sympy.Integer):
        return None
    if all(ranges.below(x, int(width)) for x in (Q, K)):
        return sympy.Integer(0) if name in _DIVISIONS else position
    row = image_row(position, int(width))
    if row is None:
        return None
    symbol = sympy.Symbol(f"{position} // {width}", integer=True)
    rows[symbol] = row
    return symbol if name in _DIVISIONS else position - width * symbol


def is_pointwise(name: str, operands: int) -> bool:
    """Return whether the op of this name with this number of tensor operands computes its result element by element."""
    # Dynamo of torch 2.11 calls some operators as methods.
    name = name.removeprefix("__").removesuffix("__")
    return name in POINTWISE or f"{name}_" in POINTWISE or (name in _BINARY_ONLY and operands == 2)


def _size_symbol(captured: Node) -> sympy.Expr | None:
    """Return a symbol for a captured symbolic integer, which is a constant of the analysis."""
    value = value_or_none(captured)
    return sympy.Symbol(f"size_{captured.name}", integer=True) if isinstance(value, (int, torch.SymInt)) else None


def _exact(node: Node) -> bool:
    """Return whether a node's dtype represents sums and products of positions exactly."""
    value = value_or_none(node)
    if isinstance(value, torch.Tensor):
        return value.dtype in (torch.int32, torch.int64)
    return isinstance(value, (int, torch.SymInt))


def _polynomial(node: Node, name: str, values: dict[Node, _Value], ranges: Ranges) -> sympy.Expr | None:
    """The node's value as a polynomial of its operands', None where it is not exact integer arithmetic."""
    dtype = dtype_of(node)
    if dtype is not None and dtype not in _FOLLOWED:
        return None
    result = _exact_result(node, name, values)
    if result is None:
        return None
    # An operand of another dtype is cast first.
    kept = all(_keeps(values[a].polynomial, dtype_of(a), dtype, ranges) for a in node.all_input_nodes)
    floats = dtype is not None and dtype.is_floating_point
    return result if kept and (not floats or ranges.fits(result, dtype)) else None


def _keeps(polynomial: sympy.Expr, before: torch.dtype | None, after: torch.dtype | None, ranges: Ranges) -> bool:
    """Return whether a cast keeps the value of a polynomial: it does not wrap before the cast or after it."""
    return before is after or (ranges.fits(polynomial, before) and ranges.fits(polynomial, after))


def _exact_result(node: Node, name: str, values: dict[Node, _Value]) -> sympy.Expr | None:
    """Return the node's result in the integers as a polynomial, or None if there is none."""
    if name in _CASTS:
        source = node.args[0]
        return values[source].polynomial if isinstance(source, Node) else None
    if node.kwargs and set(node.kwargs) - {"alpha"}:
        return None
    operands = [_operand(a, values) for a in node.args]
    if any(x is None for x in operands):
        return None
    alpha = _operand(node.kwargs.get("alpha", 1), values)
    if alpha is None:
        return None
    if name == "add" and len(operands) == 2:
        return operands[0] + alpha * operands[1]
    if name in ("sub", "subtract") and len(operands) == 2:
        return operands[0] - alpha * operands[1]
    if name == "rsub" and len(operands) == 2:
        return operands[1] - alpha * operands[0]
    if name in ("mul", "multiply") and len(operands) == 2:
        return operands[0] * operands[1]
    if name in ("neg", "negative"):
        return -operands[0]
    return None


def _operand(argument: Any, values: dict[Node, _Value]) -> sympy.Expr | None:
    if isinstance(argument, Node):
        return values[argument].polynomial
    exact = isinstance(argument, int) and not isinstance(argument, bool)
    return sympy.Integer(argument) if exact else None


def _footprint(
    polynomial: sympy.Expr,
    joined: Footprint,
    atoms: dict[sympy.Symbol, Footprint],
    rows: dict[sympy.Symbol, sympy.Expr],
) -> Footprint:
    """Return the footprint of a polynomial, which is never larger than the join of its operands' footprints."""
    polynomial = sympy.expand(polynomial)
    symbols = polynomial.free_symbols
    opaque = functools.reduce(Footprint.join, (atoms[s] for s in symbols if s in atoms), NOTHING)
    direct = Footprint(B in symbols, H in symbols, recognise(polynomial.xreplace(rows)))
    return replace(direct.join(opaque), score=joined.score)


def join_all(items: Iterable[Footprint]) -> Footprint:
    """Return the join of several footprints."""
    return functools.reduce(Footprint.join, items, NOTHING)
