"""What does an expression in a score_mod depend on?

Every node of a score_mod's FX graph gets a **footprint**: whether it depends on the batch, on the head, on the score, and
one element of this lattice for the query and key positions:

                 PAIR                      both, in no way that we know
      /      /          \\        \\
    ROW   COLUMN    DIAGONAL   ANTIDIAGONAL       query only, key only, k - q only, k + q only
      \\      \\          /        /
                 NONE

The analysis is an abstract interpretation. A node whose value is exact integer arithmetic carries a sympy polynomial in b,
h, q, k and opaque atoms, so that ``k - q`` is a diagonal however it is spelt: substitute ``k = q + d``, and q must cancel.
Every other pointwise op joins its inputs' footprints, and indexing joins those of its indices. What is not understood is
``unknown``: it may depend on anything. Too large a footprint is a missed optimisation, too small a wrong gradient.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx import Graph, Node


class Positions(enum.Enum):
    """Which of the query and key positions, and how."""

    NONE = "none"
    ROW = "row"
    COLUMN = "column"
    DIAGONAL = "diagonal"
    ANTIDIAGONAL = "antidiagonal"
    PAIR = "pair"

    def join(self, other: Positions) -> Positions:
        """The least upper bound."""
        if other in (self, Positions.NONE):
            return self
        return other if self is Positions.NONE else Positions.PAIR


@dataclass(frozen=True)
class Footprint:
    """What a scalar of a score_mod depends on; ``unknown`` where it may be anything (or not repeatable)."""

    batch: bool = False
    head: bool = False
    positions: Positions = Positions.NONE
    score: bool = False
    unknown: bool = False

    def join(self, other: Footprint) -> Footprint:
        """The least upper bound."""
        return Footprint(
            self.batch or other.batch,
            self.head or other.head,
            self.positions.join(other.positions),
            self.score or other.score,
            self.unknown or other.unknown,
        )

    @property
    def has_key(self) -> bool:
        """Whether it may differ along a row of scores; if not, softmax does not see it as an additive term."""
        return self.unknown or self.score or self.positions not in (Positions.NONE, Positions.ROW)

    def __str__(self) -> str:
        if self.unknown:
            return "unknown"
        axes = [name for name, used in (("batch", self.batch), ("head", self.head), ("score", self.score)) if used]
        return "+".join([*axes, self.positions.value])


NOTHING = Footprint()
UNKNOWN = Footprint(True, True, Positions.PAIR, True, True)

B, H, Q, K = sympy.symbols("b h q k", integer=True)
_D = sympy.Symbol("d", integer=True)


class _Value(NamedTuple):
    """The abstract value of a node: its footprint and, where it is exact integer arithmetic, a polynomial."""

    footprint: Footprint
    polynomial: sympy.Expr | None = None


def names(text: str) -> frozenset[str]:
    """A set of names from a text."""
    return frozenset(text.split())


#: Ops whose result is computed element by element from their tensor inputs, by name (of a function or a method).
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
#: Of these, ops that also come as reductions: pointwise with two tensor operands only.
_BINARY_ONLY = frozenset({"max", "min"})
#: Ops whose result is one value, whatever the tensor operands hold.
_CONSTANT = frozenset({"full", "full_like", "ones_like", "zeros_like", "new_full", "new_ones", "new_zeros", "scalar_tensor"})
#: Ops that hand their operand on, perhaps in another dtype; "to" and the like, and ATen's names for them.
_CASTS = names(
    "to _to_copy convert_element_type clone detach alias lift_fresh_copy contiguous pos positive int long float double"
)
_EXACT_CASTS = {torch.int32, torch.int64, torch.float32, torch.float64}


def footprints(graph: Graph) -> dict[Node, Footprint]:
    """The footprint of every node of a score_mod graph ``(score, b, h, q, k, *captured)``.

    Works on Dynamo's graphs (``operator``, ``torch`` functions, tensor methods) and on ATen's. Nodes carry a fake
    tensor in ``meta["example_value"]`` or ``meta["val"]``, whose dtype says what is exact.
    """
    score, b, h, q, k, *captured = graph.find_nodes(op="placeholder")
    values = {
        score: _Value(Footprint(score=True)),
        b: _Value(Footprint(batch=True), B),
        h: _Value(Footprint(head=True), H),
        q: _Value(Footprint(positions=Positions.ROW), Q),
        k: _Value(Footprint(positions=Positions.COLUMN), K),
        **{c: _Value(NOTHING, _size_symbol(c)) for c in captured},
    }
    atoms: dict[sympy.Symbol, Footprint] = {}
    counter = itertools.count()
    for node in graph.nodes:
        if node not in values and node.op != "output":
            value = _evaluate(node, values, atoms)
            if value.polynomial is None and _exact(node) and value.footprint.positions is not Positions.PAIR:
                atom = sympy.Symbol(f"n{next(counter)}", integer=True)
                atoms[atom] = value.footprint
                value = value._replace(polynomial=atom)
            values[node] = value
    return {node: value.footprint for node, value in values.items()}


def name_of(node: Node) -> str:
    """What a node calls, without module, overload, trailing underscores of operator names or in-place marks."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _evaluate(node: Node, values: dict[Node, _Value], atoms: dict[sympy.Symbol, Footprint]) -> _Value:
    operands = [values[n] for n in node.all_input_nodes]
    joined = functools.reduce(Footprint.join, (v.footprint for v in operands), NOTHING)
    if joined.unknown or node.op not in ("call_function", "call_method", "get_attr"):
        return _Value(UNKNOWN)
    if node.op == "get_attr":
        return _Value(NOTHING)
    name = name_of(node)
    if node.target is operator.getitem or name in ("index", "mod_index"):
        scalar = all(isinstance(i, (int, Node)) for i in _indices(node))
        return _Value(joined) if scalar else _Value(UNKNOWN)
    if name in _CONSTANT:
        return _Value(NOTHING if not any(isinstance(a, Node) for a in node.args[1:]) else joined)
    binary = name in _BINARY_ONLY and len(node.args) == 2 and all(isinstance(a, Node) for a in node.args)
    if name not in POINTWISE | _CASTS and not binary:
        return _Value(UNKNOWN)
    polynomial = _polynomial(node, name, values)
    if polynomial is None:
        return _Value(joined)
    return _Value(_footprint(polynomial, joined, atoms), polynomial)


def _indices(node: Node) -> Sequence[Any]:
    indices = node.args[1]
    return indices if isinstance(indices, (tuple, list)) else (indices,)


def _fake(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _size_symbol(captured: Node) -> sympy.Expr | None:
    """A captured symbolic integer as a constant of the analysis."""
    value = _fake(captured)
    return sympy.Symbol(f"size_{captured.name}", integer=True) if isinstance(value, (int, torch.SymInt)) else None


def _exact(node: Node) -> bool:
    """Whether a node's dtype holds sums and products of positions exactly."""
    value = _fake(node)
    if isinstance(value, torch.Tensor):
        return value.dtype in (torch.int32, torch.int64)
    return isinstance(value, (int, torch.SymInt))


def _polynomial(node: Node, name: str, values: dict[Node, _Value]) -> sympy.Expr | None:
    """The node's value as a polynomial of its operands', None where it is not exact integer arithmetic."""
    if name in _CASTS:
        source = node.args[0]
        dtype = getattr(_fake(node), "dtype", None)
        return values[source].polynomial if isinstance(source, Node) and dtype in _EXACT_CASTS else None
    if node.kwargs and set(node.kwargs) - {"alpha"}:
        return None
    operands = [_operand(a, values) for a in node.args]
    if any(x is None for x in operands):
        return None
    alpha = _operand(node.kwargs.get("alpha", 1), values)
    value = _fake(node)
    if alpha is None or (isinstance(value, torch.Tensor) and value.dtype not in _EXACT_CASTS):
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


def _footprint(polynomial: sympy.Expr, joined: Footprint, atoms: dict[sympy.Symbol, Footprint]) -> Footprint:
    """The footprint of a polynomial, never larger than the join of its operands' footprints."""
    polynomial = sympy.expand(polynomial)
    symbols = polynomial.free_symbols
    opaque = functools.reduce(Footprint.join, (atoms[s] for s in symbols if s in atoms), NOTHING)
    own = Footprint(B in symbols, H in symbols, _positions(polynomial))
    return replace(own.join(opaque), score=joined.score)


def _positions(polynomial: sympy.Expr) -> Positions:
    symbols = polynomial.free_symbols
    if Q not in symbols or K not in symbols:
        return Positions.ROW if Q in symbols else Positions.COLUMN if K in symbols else Positions.NONE
    for positions, key in ((Positions.DIAGONAL, Q + _D), (Positions.ANTIDIAGONAL, _D - Q)):
        if Q not in sympy.expand(polynomial.subs(K, key)).free_symbols:
            return positions
    return Positions.PAIR


def join_all(items: Iterable[Footprint]) -> Footprint:
    """The join of several footprints."""
    return functools.reduce(Footprint.join, items, NOTHING)
