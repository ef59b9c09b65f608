"""Emit the score_mod of a recognised attention: a graph ``(score, b, h, q, k, *captured)`` as Dynamo would trace it."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from ...core.dynamo_graph import Inserter
from ...core.fx import HALF, dtype_of, value_of, working_dtype
from .arrange import on_device, simplified
from .elements import Apply, Constant, Element, Read, Score
from .evaluate import Evaluator
from .indices import POSITIONS, Ranges
from .lifting import NotAttention


class ScoreModEmitter(Evaluator):
    """Emits elements into the graph of a score_mod.

    outer: inserts the views of captured tensors into Dynamo's graph. captured: the tensors that the score_mod reads, so far.
    """

    def __init__(self, outer: Inserter, like: Node, query: torch.Tensor, ranges: Ranges) -> None:
        self.outer, self.ranges = outer, ranges
        self.graph = Graph()
        super().__init__(Inserter(self.graph, like))
        self.captured: list[Node] = []
        self._placeholders: dict[Node, Node] = {}
        self._views: dict[Any, tuple[Node, Any]] = {}
        self.score = self._placeholder("score", _number_like(query))
        integers = [self._placeholder(p.name, query.new_empty((), dtype=torch.int32)) for p in POSITIONS]
        self._positions: dict[sympy.Symbol, Node] = dict(zip(POSITIONS, integers, strict=True))
        self._last_placeholder = integers[-1]
        self._device = query.device

    def module(self, score: Element) -> GraphModule:
        """Return the score_mod that computes ``score``."""
        self.graph.output(self.value(score))
        self.graph.lint()
        return GraphModule(torch.nn.Module(), self.graph)

    def scaled(self, score: Element) -> float:
        """Return the number by which the product is multiplied before anything else, or 1.0.

        The kernel multiplies by it, so that the score_mod takes the scaled product as its score.
        """
        users = [e for e in score.walk() if isinstance(e, Apply) and any(isinstance(p, Score) for p in e.parts())]
        if len(users) != 1 or len(users[0].args) != 2 or users[0].kwargs:
            return 1.0
        first, second = users[0].args
        number = second if isinstance(first, Score) else first
        number = number.value if isinstance(number, Constant) else number
        if not isinstance(number, (int, float)) or isinstance(number, bool) or number <= 0:
            return 1.0
        if users[0].name == "mul":
            factor = float(number)
        elif users[0].name == "div" and isinstance(first, Score):
            factor = 1.0 / float(number)
        else:
            return 1.0
        self.done[users[0]] = self.score
        return factor

    # ------------------------------------------------ elements

    integers = torch.int32

    def made(self, element: Element) -> Node:
        """Insert and return the node of an element. The score is a placeholder."""
        return self.score if isinstance(element, Score) else super().made(element)

    def full(self, value: Any, dtype: torch.dtype) -> Node:
        """Return the node of a number."""
        return self.inserter.function(torch.full, (), value, dtype=working_dtype(dtype), device=self._device)

    def position(self, symbol: sympy.Symbol) -> Node:
        """Return the placeholder of b, h, q or k."""
        return self._positions[symbol]

    def integer(self, value: sympy.Expr) -> Node:
        """Return the node of an integer expression. All positions and their sums are 32-bit integers."""
        if not self.ranges.fits_32_bits(value):
            raise NotAttention("the index of a tensor exceeds 32 bits")
        return super().integer(value)

    def apply(self, element: Apply) -> Node:
        """Return the node of an elementwise op. A cast to half precision is one to fp32."""
        if element.name == "to" and element.dtype in HALF:
            operand = self.value(element.args[0])
            return self.cast(operand, element.dtype)
        return super().apply(element)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """Return ``node`` in another dtype. Nothing is rounded to half precision, which the kernel does not need."""
        keeps = dtype in HALF and dtype_of(node).is_floating_point
        return node if keeps else super().cast(node, working_dtype(dtype))

    # ------------------------------------------------ captured tensors

    def read(self, read: Read) -> Node:
        """Return the node of an element of a captured tensor."""
        key = (read.node, read.index)
        if key not in self._views:
            tensor = on_device(self.outer, read.node, self._device)
            self._views[key] = simplified(self.outer, tensor, read.index, self.ranges)
        operand, index = self._views[key]
        placeholder = self._capture(operand)
        if not index:
            return placeholder
        element = self.graph.call_function(operator.getitem, (placeholder, tuple(self._entry(i) for i in index)))
        # Indexing with 0-d tensors would ask for their values.
        element.meta["example_value"] = _number_like(value_of(operand))
        return element

    def _entry(self, index: Any) -> Any:
        if isinstance(index, Element):
            return self.value(index)
        return int(index) if index.is_Integer else self.integer(index)

    def _capture(self, operand: Node) -> Node:
        if operand not in self._placeholders:
            with self.graph.inserting_after(self._last_placeholder):
                placeholder = self._placeholder(f"captured_{len(self.captured)}", value_of(operand))
            self._last_placeholder = placeholder
            self._placeholders[operand] = placeholder
            self.captured.append(operand)
        return self._placeholders[operand]

    def _placeholder(self, name: str, value: torch.Tensor) -> Node:
        node = self.graph.placeholder(name)
        node.meta["example_value"] = value
        return node


def _number_like(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty((), requires_grad=tensor.requires_grad)
