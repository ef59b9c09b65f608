"""Evaluate elements as nodes of a graph: once for one score, in a score_mod, and once for all positions, as tensors."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Node

from ...core.dynamo_graph import Inserter
from ...core.fx import dtype_of
from .elements import Apply, Constant, Element, Position, Read
from .indices import Quotient, Remainder


class Evaluator:
    """Inserts the nodes of elements, each once. A subclass says what numbers, positions and reads become."""

    def __init__(self, inserter: Inserter) -> None:
        self.inserter = inserter
        self.done: dict[Any, Any] = {}

    def full(self, value: Any, dtype: torch.dtype) -> Node:
        """Return the node of a number."""
        raise NotImplementedError

    def position(self, symbol: sympy.Symbol) -> Node:
        """Return the node of b, h, q or k."""
        raise NotImplementedError

    def read(self, read: Read) -> Node:
        """Return the node of an element of a tensor of the graph."""
        raise NotImplementedError

    integers = torch.int64

    def value(self, x: Any) -> Any:
        """Return the node of an element, and anything else as it is."""
        if not isinstance(x, Element):
            return x
        if x not in self.done:
            self.done[x] = self.made(x)
        return self.done[x]

    def made(self, element: Element) -> Node:
        """Insert and return the node of an element."""
        if isinstance(element, Constant):
            return self.full(element.value, element.dtype)
        if isinstance(element, Position):
            return self.cast(self.integer(element.value), element.dtype)
        if isinstance(element, Read):
            return self.read(element)
        return self.apply(element)

    def apply(self, element: Apply) -> Node:
        """Return the node of an elementwise op, cast to the dtype of the element.

        In a score_mod every operand is 0-d, and PyTorch promotes these otherwise than tensors with dims.
        """
        args = [self.value(a) for a in element.args]
        kwargs = {name: self.value(a) for name, a in element.kwargs.items()}
        call = self.inserter.method if element.op == "call_method" else self.inserter.function
        return self.cast(call(element.target, *args, **kwargs), element.dtype)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """Return ``node`` in another dtype."""
        return node if dtype_of(node) is dtype else self.inserter.method("to", node, dtype)

    def integer(self, value: sympy.Expr) -> Node:
        """Return the node of an integer expression in the positions."""
        if value not in self.done:
            self.done[value] = self._integer(value)
        return self.done[value]

    def _integer(self, value: sympy.Expr) -> Node:
        if value.is_Symbol:
            return self.position(value)
        if value.is_Integer:
            return self.full(int(value), self.integers)
        function = self.inserter.function
        if isinstance(value, (Quotient, Remainder)):
            target = operator.floordiv if isinstance(value, Quotient) else operator.mod
            return function(target, self.integer(value.args[0]), int(value.args[1]))
        total: Node | None = None
        constant = 0
        for atom, factor in value.as_coefficients_dict().items():
            if atom == 1:
                constant = int(factor)
                continue
            node = self.integer(atom)
            if abs(factor) != 1:
                node = function(operator.mul, node, abs(int(factor)))
            if total is None:
                total = node if factor > 0 else function(operator.neg, node)
            else:
                total = function(operator.add if factor > 0 else operator.sub, total, node)
        return function(operator.add, total, constant) if constant else total
