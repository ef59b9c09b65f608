"""An attention that was found on Dynamo's graph: its operands, its score as a function of the position, and its dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from ...core.fx import dtype_of, requires_grad
from ...core.terms import is_one
from . import views
from .elements import Element, Read
from .indices import ZERO, B, H, Ranges
from .lifting import Lift, NotAttention, line_of

#: Stands for the channel in an index of the queries, keys or values. It is no position of a score.
WIDTH = sympy.Symbol("d", integer=True)
#: A tensor, and the index of its element for a position and a channel.
Side = tuple[Node, views.Index]


@dataclass(frozen=True)
class Attention:
    """An attention that is spelt out.

    last: the node of its result. query, key, value: nodes and their indices in b, h, q or k, and ``WIDTH``. score: the
    modified score. scale: the factor of the product of query and key. out: for each dim of ``last``, its place among
    [*batch dims, query, channel]. dropout: its probability. inside: the nodes of the scores and probabilities, which nothing
    else uses. sink: a logit that is no key's (sinks.py).
    """

    last: Node
    query: tuple[Node, views.Index]
    key: tuple[Node, views.Index]
    value: tuple[Node, views.Index]
    score: Element
    scale: float
    out: tuple[int, ...]
    dropout: float
    lift: Lift
    inside: frozenset[Node] = frozenset()
    sink: Element | None = None


class PositionsOf:
    """The positions of an attention whose batch dims have these sizes: all but the last become b, and the last is h."""

    def __init__(self, batch: Sequence[Any], queries: Any, keys: Any) -> None:
        heads = batch[-1] if len(batch) > 1 else 1
        first: Any = 1
        for size in batch[:-1] or batch:
            first = first * size
        self.ranges = Ranges((first, heads, queries, keys))
        of_b = list(batch[:-1]) if len(batch) > 1 else list(batch)
        if len(of_b) > 1:
            if not all(isinstance(n, int) for n in of_b):
                raise NotAttention("several of its batch dims have symbolic sizes")
            found = self.ranges.split(B, of_b)
        else:
            found = [B] * len(of_b)
        every = [*found, *([H] if len(batch) > 1 else [])]
        self.of_batch = [ZERO if is_one(n) else i for i, n in zip(every, batch, strict=True)]

    @property
    def flat(self) -> sympy.Expr:
        """The index in one dim of all batches and heads."""
        return self.ranges.joined([B, H], [self.ranges.extents[B], self.ranges.extents[H]])


def check_reads(lift: Lift, operands: Sequence[Node], after: Sequence[Node] = ()) -> None:
    """Raise NotAttention if a tensor is changed between its use and the end of the attention, or a part has no gradient.

    The kernel reads every tensor where the attention ends. operands: those that flex_attention saves for the backward.
    after: the nodes between the scores and the result.
    """
    last = lift.last
    for node in operands:
        if lift.writes.after(node):
            raise NotAttention(f"its query, key or value is changed in place later ({line_of(node)})")
    for node in (*after, last):
        if any(lift.writes.between(n, node) for n in node.all_input_nodes):
            raise NotAttention(f"an operand is changed in place before its use ({line_of(node)})")
        if node in lift.writes.without_gradient:
            raise NotAttention(f"a part of it is computed without a gradient ({line_of(node)})")


def dtypes(attention: Attention) -> set[torch.dtype | None]:
    """Return the dtypes in which the products are computed."""
    product = attention.lift.product
    nodes = [attention.last] + ([] if product is None else [product.node])
    return {dtype_of(n) for n in nodes}


def learned_terms(attention: Attention) -> list[Node]:
    """Return the tensors that the score or the sink reads and that need a gradient."""
    elements = [attention.score] if attention.sink is None else [attention.score, attention.sink]
    reads = [e.node for element in elements for e in element.walk() if isinstance(e, Read)]
    return list(filter(requires_grad, reads))
