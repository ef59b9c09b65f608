"""Whether a learned tensor may hold a mask: numbers far from zero that the graph adds to what is learned.

Everything from which the tensor is computed is followed, up to parameters, layers and the indices of lookups. All ops on the
way must be known not to make large numbers of small ones, and neither they nor what is written into the tensors in place may
have a number that is far from zero, or numbers whose product is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from ..core.fx import dtype_of, fake_tensor, requires_grad
from ..core.purity import changes_in_place
from ..core.terms import CASTS, arg, calls_torch, canonical_name, is_tensor, op
from ..core.writes import VIEWS, Writes
from .functional import out_of_place

#: A number of the graph that is further from zero may be a mask.
FAR = 1e3
#: The same for a number on the way to an exponential or a power.
_FAR_BEFORE_GROWTH = 6.0
#: The smallest number that has a reciprocal.
_SMALLEST = 1.0 / sys.float_info.max

#: What layers compute is no mask, whatever they are applied to.
_LAYERS = {"matmul", "linear", "einsum", "baddbmm", "addmm", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"}
_LAYERS |= {"layer_norm", "rms_norm", "group_norm", "batch_norm", "softmax", "normalize"}
#: What they add to that, which may be a mask.
_ADDED = {"baddbmm": (0, "input"), "addmm": (0, "input"), "linear": (2, "bias")}
_ADDED |= dict.fromkeys(("conv1d", "conv2d", "conv3d"), (2, "bias"))
#: Lookups, with the argument that is looked into.
_TABLES = {"embedding": 1, "getitem": 0, "index_select": 0, "gather": 0, "take_along_dim": 0}

_NEW = "zeros ones full empty tensor arange zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty"
_MOVED = "roll flip cat concat concatenate stack hstack vstack chunk tril triu dropout diff interpolate"
_WRITTEN = "copy fill zero setitem pad"
_CHOSEN = "where masked_fill index_put index_fill index_copy scatter minimum maximum amin amax min max mean clamp clip"
_ELEMENTWISE = """
add sub rsub neg abs mul div relu gelu silu sigmoid tanh softplus logsigmoid elu leaky_relu hardtanh softsign erf sin cos
sign log log1p floor ceil round trunc eq ne lt le gt ge and or xor not logical_and logical_or logical_xor bitwise_and
bitwise_or bitwise_xor clamp_min clamp_max sqrt
"""
#: Ops that make no number that is much further from zero than their operands and numbers are.
_KEEP = VIEWS | CASTS | set(f"{_NEW} {_MOVED} {_WRITTEN} {_CHOSEN} {_ELEMENTWISE}".split())
#: Ops that do, which are followed only if they are applied to what is learned.
_GROW = {"exp", "exp2", "expm1", "pow", "square", "reciprocal", "rsqrt", "sum", "cumsum", "norm", "var", "std"}
#: Ops of which only the first argument has values of the result. The others are sizes, dims and the like.
_ONLY_MOVE = VIEWS | set(_MOVED.split())


@dataclass
class _Numbers:
    """The numbers that were met, as distances from zero.

    product: of the factors above 1. reciprocals: of those below 1, which count in a divisor only. largest: of all other
    numbers and their reciprocals. grows: whether there is an op in ``_GROW``. divides: whether there is a divisor that is
    computed. infinite: whether one is infinite.
    """

    product: float = 1.0
    reciprocals: float = 1.0
    largest: float = 1.0
    grows: bool = False
    divides: bool = False
    infinite: bool = False

    def meet(self, number: float, how: str) -> None:
        """Note a number that is an operand of an op, multiplied ("mul"), divided by ("div"), or used otherwise."""
        size = abs(float(number))
        if not math.isfinite(size) or (how == "div" and not size):
            self.infinite = True
        elif size:
            reciprocal = 1.0 / size if size > _SMALLEST else math.inf
            factor, other = (reciprocal, size) if how == "div" else (size, reciprocal)
            if how:
                self.product *= max(factor, 1.0)
                self.reciprocals *= max(other, 1.0)
            else:
                self.largest = max(self.largest, size, reciprocal)

    def far(self, minus_infinity: bool) -> bool:
        """Return whether they may make a mask. minus_infinity: whether an infinite number is one."""
        limit = _FAR_BEFORE_GROWTH if self.grows else FAR
        factors = self.product * (self.reciprocals if self.divides or self.grows else 1.0)
        return factors * self.largest > limit or (minus_infinity and (self.infinite or self.divides))


@dataclass
class Ordinary:
    """Which tensors of a graph are learned and hold no mask, unless a parameter does.

    writes: those of the graph. minus_infinity: whether -inf, which hides a key from any row, counts as a mask.
    """

    writes: Writes
    minus_infinity: bool = False
    _known: dict[Node, bool] = field(default_factory=dict)

    def __call__(self, node: Node) -> bool:
        """Return whether a tensor is one of these."""
        if node not in self._known:
            self._known[node] = requires_grad(node) and self._followed(node)
        return self._known[node]

    def _followed(self, node: Node) -> bool:
        numbers, seen, pending = _Numbers(), {node}, [node]
        while pending:
            x = pending.pop()
            operands = self._operands(x, numbers)
            if operands is None:
                return False
            new = {n for n in (*operands, *self.writes.to(x)) if is_tensor(n) or n.all_input_nodes} - seen
            pending += new
            seen |= new
        return not numbers.far(self.minus_infinity)

    def _operands(self, x: Node, numbers: _Numbers) -> list[Node] | None:
        """Return what must be followed of the operands of a node, or None if it may make a mask."""
        name = _name(x)
        if self.writes.unknown(x):
            return None
        if isinstance(fake_tensor(x), torch.nn.Parameter) or dtype_of(x) is torch.bool:
            return []
        if not calls_torch(x):
            return None
        if name in _LAYERS and requires_grad(x):
            added = arg(x, *_ADDED[name]) if name in _ADDED else None
            return [added] if isinstance(added, Node) else []
        if name in _TABLES and len(x.args) > _TABLES[name] and isinstance(x.args[_TABLES[name]], Node):
            return [x.args[_TABLES[name]]]
        if name in _GROW and requires_grad(x):
            numbers.grows = True
        elif name not in _KEEP:
            return None
        values = _values(x, name)
        nodes = [n for value in values for n in _nodes(value)]
        if name == "mul" and sum(map(_is_computed_from_positions, nodes)) > 1:
            return None
        for position, value in enumerate(values):
            how = name if name == "mul" or (name == "div" and position == 1) else ""
            for number in _flat(value):
                numbers.meet(number, how)
        numbers.divides |= name == "div" and isinstance(arg(x, 1, "other"), Node)
        # Of zero, the logarithm is -inf, and so may be the negative of these others.
        numbers.infinite |= name in ("log", "log1p", "reciprocal", "rsqrt") or (name == "pow" and not _is_positive(x))
        return nodes


def _is_computed_from_positions(n: Node) -> bool:
    """Return whether a node, of which nothing is data, has numbers that are not learned."""
    return is_tensor(n) and not requires_grad(n) and dtype_of(n) is not torch.bool


def _is_positive(power: Node) -> bool:
    """Return whether the exponent of a power is a number that is not negative."""
    exponent = arg(power, 1, "exponent")
    return isinstance(exponent, (int, float)) and exponent >= 0


def _name(x: Node) -> str:
    """Return the name of the op of a node, and for an in-place op that of the same computation out of place."""
    found = out_of_place(x) if changes_in_place(x) else None
    if found is None:
        return op(x)
    return canonical_name(found[1] if isinstance(found[1], str) else found[1].__name__)


def _values(x: Node, name: str) -> list[Any]:
    """Return the arguments of a node whose numbers are values of its result, and no sizes, dims or indices."""
    if name == "setitem":
        return [x.args[0], x.args[2]]
    if name == "pad":
        return [arg(x, 0, "input"), arg(x, 3, "value")]
    first = x.args[0] if x.args else x.kwargs.get("input", x.kwargs.get("tensors"))
    if name in _ONLY_MOVE and first is not None:
        return [first]
    return [*x.args, *x.kwargs.values()]


def _nodes(value: Any) -> Iterable[Node]:
    if isinstance(value, Node):
        return [value]
    return [n for part in value for n in _nodes(part)] if isinstance(value, (list, tuple)) else []


def _flat(value: Any) -> Iterator[float]:
    """Yield the numbers of an argument, also those of nested lists."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _flat(part)
    elif type(value) in (int, float):
        yield value
