"""Find ``scaled_dot_product_attention`` with a mask of floating point."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ...core.fx import dtype_of, same_sizes, shape_of
from ...core.terms import arg, number
from ...core.writes import Writes
from ..kinds import K, Q
from . import views
from .attentions import WIDTH, Attention, PositionsOf, check_reads
from .elements import Apply, Constant, Element, Position, Score
from .indices import H
from .lifting import Lift, NotAttention


def fused(node: Node, writes: Writes) -> Attention | None:
    """Return the attention that a call of scaled_dot_product_attention is, or None if its mask is boolean or it has none.

    writes: the in-place operations of its graph. Raises NotAttention for one that cannot be replaced.
    """
    query, key, value = (arg(node, i, name) for i, name in enumerate(("query", "key", "value")))
    mask, dropout = arg(node, 3, "attn_mask"), arg(node, 4, "dropout_p", 0.0)
    causal, scale = arg(node, 5, "is_causal", False), node.kwargs.get("scale")
    if not isinstance(mask, Node) or not dtype_of(mask).is_floating_point:
        return None
    dropout = number(dropout)
    if dropout is None:
        raise NotAttention("its dropout probability is not constant")
    if not isinstance(causal, bool):
        raise NotAttention("is_causal is not constant")
    shapes = [shape_of(x) for x in (query, key, value)]
    shared = _heads_that_share(shapes) if node.kwargs.get("enable_gqa") else 1
    alike = [s[:-2] for s in (shapes if shared == 1 else shapes[1:])]
    if len({len(s) for s in shapes}) > 1 or not all(same_sizes(s, alike[0]) for s in alike):
        raise NotAttention("query, key and value are broadcast against each other")
    batch = tuple(shapes[0][:-2])
    where = PositionsOf(batch, shapes[0][-2], shapes[1][-2])
    of_keys = [where.ranges.divided(i, shared)[0] if i == H else i for i in where.of_batch]
    lift = Lift(where.ranges, node, writes)
    scores = (*where.of_batch, Q, K)
    check_reads(lift, [query, key, value])
    term = lift.whole(mask, views.broadcast(scores, shape_of(mask)))
    score = Apply("call_function", operator.add, (Score(dtype_of(query)), term), {}, dtype_of(query))
    if causal:
        distance = Position(K - Q, torch.int64)
        score = _hidden(Apply("call_function", operator.le, (distance, 0), {}, torch.bool), score, dtype_of(query))
    scale = int(shapes[0][-1]) ** -0.5 if scale is None else number(scale)
    if scale is None:
        raise NotAttention("its scale is not constant")
    return Attention(
        last=node,
        query=(query, (*where.of_batch, Q, WIDTH)),
        key=(key, (*of_keys, K, WIDTH)),
        value=(value, (*of_keys, K, WIDTH)),
        score=score,
        scale=scale,
        out=tuple(range(len(batch) + 2)),
        dropout=dropout,
        lift=lift,
    )


def _heads_that_share(shapes: Sequence[Sequence[Any]]) -> int:
    """Return how many heads of queries share one of keys and values. shapes: of query, key and value ``[*, h, s, d]``."""
    if {len(s) for s in shapes} != {4}:
        raise NotAttention("its grouped heads (enable_gqa) are not those of [B, H, S, D]")
    heads = [s[-3] for s in shapes]
    if not all(isinstance(n, int) for n in heads) or heads[1] != heads[2] or heads[0] % heads[1]:
        raise NotAttention("the numbers of its grouped heads (enable_gqa) are symbolic, or do not divide each other")
    if not same_sizes(shapes[0][:-3], shapes[1][:-3]):
        raise NotAttention("query, key and value are broadcast against each other")
    return heads[0] // heads[1]


def _hidden(condition: Element, score: Element, dtype: torch.dtype) -> Element:
    return Apply("call_function", torch.where, (condition, score, Constant(float("-inf"), dtype)), {}, dtype)
