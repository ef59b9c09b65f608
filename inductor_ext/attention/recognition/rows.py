"""The largest number that masks add to each row of scores, computed on Dynamo's graph with torch ops."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Node

from ...core.dynamo_graph import Inserter
from ...core.fx import dtype_of, requires_grad, shape_of, working_dtype
from ...core.terms import is_one
from ..kinds import K, Q
from ..ordinary import FAR
from .arrange import in_order, on_device
from .elements import Element, Read
from .evaluate import Evaluator
from .indices import POSITIONS, B, H, Ranges


def largest(outer: Inserter, masks: Element, ranges: Ranges, device: torch.device) -> Read:
    """Return a read of the largest number of each row, if that is far from zero and finite, otherwise of 0."""
    return _Rows(outer, ranges, device).largest(masks)


def evaluate(outer: Inserter, element: Element, ranges: Ranges, device: torch.device) -> Node:
    """Return an element for all positions, as a tensor ``[b, h, q, k]``. A dim on which it does not depend has size 1."""
    return _Rows(outer, ranges, device).value(element)


def far_largest(outer: Inserter, masks: Node) -> Node:
    """Return the largest number of each row of ``masks`` [b, h, q, k], as [b, h, q, 1], or 0 if it is not far from zero.

    It is at least in fp32. It is 0 too where it is infinite.
    """
    if dtype_of(masks) not in (torch.float32, torch.float64):
        masks = outer.method("to", masks, torch.float32)
    largest = outer.method("amax", masks, POSITIONS.index(K), keepdim=True)
    if requires_grad(largest):
        # Softmax does not change with what is subtracted, so that this has no gradient.
        largest = outer.method("detach", largest)
    far = outer.function(operator.gt, outer.function(torch.abs, largest), FAR)
    far = outer.function(operator.and_, far, outer.function(torch.isfinite, largest))
    return outer.function(torch.where, far, largest, 0.0)


class _Rows(Evaluator):
    """Computes elements for all positions at once, with torch ops on tensors that have the dims b, h, q and k.

    As in the kernel, to the last digit, or the largest number of a row would not be that of the kernel.
    """

    def __init__(self, outer: Inserter, ranges: Ranges, device: torch.device) -> None:
        super().__init__(outer)
        self.outer, self.ranges, self.device = outer, ranges, device

    def largest(self, masks: Element) -> Read:
        tensor = self.value(masks)
        sizes = list(shape_of(tensor))
        row = self.outer.method("squeeze", far_largest(self.outer, tensor), POSITIONS.index(K))
        # The row keeps a dim of queries even if it is the same for all. Otherwise it could be added to a mask of the keys
        # outside the kernel, and the result be 0 where eager code adds the lowest number and so rounds the score away.
        queries = self.ranges.extents[Q]
        row = self.outer.method("expand", row, [*sizes[:2], queries])
        axes = [p for p, n in zip((B, H), sizes, strict=False) if not is_one(n)]
        for dim in (1, 0):
            if is_one(sizes[dim]):
                row = self.outer.method("select", row, dim, 0)
        return Read(row, (*axes, Q))

    def full(self, value: Any, dtype: torch.dtype) -> Node:
        """Return the node of a number, as a tensor."""
        return self.outer.function(torch.full, (1, 1, 1, 1), value, dtype=working_dtype(dtype), device=self.device)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """Return ``node`` in another dtype. Nothing is rounded to half precision, as in the kernel."""
        return super().cast(node, working_dtype(dtype))

    def position(self, symbol: sympy.Symbol) -> Node:
        """Return the node of all b, h, q or k."""
        along = self.outer.function(torch.arange, self.ranges.extents[symbol], device=self.device)
        return self.outer.method("reshape", along, [-1 if p is symbol else 1 for p in POSITIONS])

    def read(self, read: Read) -> Node:
        """Return the node of what a read gives for all positions."""
        return self.cast(self._read(read), dtype_of(read.node))

    def _read(self, read: Read) -> Node:
        plain = all(isinstance(i, sympy.Expr) for i in read.index)
        tensor = on_device(self.outer, read.node, self.device)
        if plain and (view := in_order(self.outer, tensor, read.index, POSITIONS, self.ranges, expand=False)) is not None:
            return view
        index = tuple(self.integer(i) if isinstance(i, sympy.Expr) else self.value(i) for i in read.index)
        return self.outer.function(operator.getitem, tensor, index)
