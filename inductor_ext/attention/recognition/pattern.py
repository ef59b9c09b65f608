"""Find attention on Dynamo's graph: ``softmax(f(q @ k^T)) @ v`` and ``scaled_dot_product_attention``.

Between the product and the softmax may stand any elementwise ops and views: scales, masks, biases, soft caps, windows that
are folded into the batch. Between the softmax and the second product may stand casts, views and dropout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ...core.fx import cone, dtype_of, fake_tensor, shape_of
from ...core.purity import is_pure
from ...core.terms import CASTS, arg, calls_torch, is_tensor, number, op, reads_shape
from ...core.writes import Writes
from ...torch_api.sizes import size_hint, statically_known_true
from ..kinds import K, Q
from . import views
from .attentions import WIDTH, Attention, PositionsOf, check_reads
from .elements import Element, Read, depends_on_scores, positions_in
from .fused import fused
from .indices import ZERO, Ranges
from .lifting import Lift, NotAttention, drops_nothing, line_of
from .products import Operand, Product, equation, node_operands
from .sinks import Logits, logits

_FILLS_OF_A_SHAPE = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")


def find(node: Node, writes: Writes) -> Attention | None:
    """Return the attention of which ``node`` is the result, or None. Raises NotAttention for what only looks like one.

    writes: the in-place operations of its graph.
    """
    if not calls_torch(node):
        return None
    if op(node) == "scaled_dot_product_attention":
        return fused(node, writes)
    letters = equation(node)
    if letters is None:
        return None
    for which in (0, 1):
        softmax = _softmax_behind(node_operands(node)[which])
        if softmax is not None:
            return _spelt_out(node, which, letters, softmax, writes)
    return None


# ------------------------------------------------ softmax(...) @ v


def _softmax_behind(node: Any) -> Node | None:
    """Return the softmax of which ``node`` is a cast, a view or a dropout; None if there is none."""
    while isinstance(node, Node) and op(node) != "softmax":
        if op(node) not in _BETWEEN or not is_tensor(node) or not calls_torch(node):
            return None
        node = arg(node, 0, "input")
    return node


_BETWEEN = CASTS | views.VIEWS.keys() | {"dropout"}


@dataclass(frozen=True)
class _Letters:
    """The letters of the dims of ``probabilities @ values``: those of both factors and of the result, and what they are.

    Of the letters that values do not have, one counts queries. The others are batch dims: heads that share a head of values.
    """

    weights: str
    values: str
    out: str
    batch: list[str]
    query: str
    key: str
    width: str

    @staticmethod
    def of(weights: str, values: str, out: str, sizes: Sequence[Any]) -> _Letters | None:
        """Return None if the letters are not those of the second product of an attention. sizes: those of the weights."""
        keys = [x for x in weights if x not in out]
        queries = [x for x in weights if x in out and x not in values]
        widths = [x for x in out if x not in weights]
        if not len(keys) == len(widths) == 1 or not queries:
            return None
        # Kernels have tiles of queries, so the longest dim counts them. Of dims of one length it is the one beside the keys.
        known = dict(zip(weights, map(size_hint, sizes), strict=True))
        query = max(queries, key=lambda x: (known[x] or 0, weights.index(x)))
        batch = [x for x in weights if x not in (keys[0], query)]
        if keys[0] not in values or set(values) - {*batch, keys[0], widths[0]} or set(out) != {*batch, query, widths[0]}:
            return None
        return _Letters(weights, values, out, batch, query, keys[0], widths[0])


def _spelt_out(node: Node, which: int, letters: tuple[str, str, str], softmax: Node, writes: Writes) -> Attention | None:
    probabilities, value = (node_operands(node)[x] for x in (which, 1 - which))
    dims = _Letters.of(letters[which], letters[1 - which], letters[2], shape_of(probabilities))
    if dims is None:
        return None
    of_weights, of_values, of_result = (
        dict(zip(names, shape_of(n), strict=True))
        for names, n in ((dims.weights, probabilities), (dims.values, value), (dims.out, node))
    )
    if not statically_known_true(of_weights[dims.key] == of_values[dims.key]):
        return None
    sizes = tuple(of_result[x] for x in dims.batch)
    split = _split_batch(sizes, softmax)
    where = PositionsOf(split, of_weights[dims.query], of_weights[dims.key])
    of_batch = where.of_batch if len(where.of_batch) == len(dims.batch) else [where.flat]
    at = dict(zip(dims.batch, of_batch, strict=True)) | {dims.query: Q, dims.key: K, dims.width: WIDTH}
    weight_index = views.broadcast(tuple(at[x] for x in dims.weights), shape_of(probabilities))
    found = _probabilities(probabilities, weight_index, where.ranges)
    lift = Lift(where.ranges, node, writes)
    score = lift.whole(found.logits.scores, found.index)
    if lift.product is None or not depends_on_scores(score):
        return None
    sink = None if found.logits.sink is None else _sink(lift, found)
    between = [found.softmax, *found.between, *found.logits.inside]
    check_reads(lift, [lift.product.query.node, lift.product.key.node], between)
    inside = _check_inside(lift, between, node)
    value_index = views.broadcast(tuple(at[x] for x in dims.values), shape_of(value))
    query, key = _sides(lift.product)
    order = tuple([*dims.batch, dims.query, dims.width].index(x) for x in dims.out)
    return Attention(
        last=node,
        query=query,
        key=key,
        value=(value, value_index),
        score=score,
        scale=1.0,
        out=order,
        dropout=found.dropout,
        lift=lift,
        inside=inside,
        sink=sink,
    )


def _split_batch(sizes: tuple[Any, ...], softmax: Node) -> tuple[Any, ...]:
    """Return the sizes of the batch dims, from which b and h are made.

    ``sizes`` are those of the product with the values. If that has one dim that joins the batch dims of the softmax, as in
    ``bmm``, these are returned, so that heads can be told from batch elements.
    """
    split = shape_of(softmax)[:-2]
    if len(sizes) != 1 or len(split) < 2 or not all(isinstance(n, int) for n in (*sizes, *split)):
        return sizes
    return split if math.prod(split) == sizes[0] else sizes


@dataclass(frozen=True)
class _Probabilities:
    """softmax: the node. index: of a probability there. between: the nodes after it. logits: its operand."""

    softmax: Node
    index: views.Index
    dropout: float
    between: list[Node]
    logits: Logits


def _probabilities(node: Node, index: views.Index, ranges: Ranges) -> _Probabilities:
    """Follow the probabilities back to the softmax."""
    dropout, between = 0.0, []
    while op(node) != "softmax":
        between.append(node)
        if op(node) == "dropout":
            p = _dropout(node)
            if p and not statically_known_true(fake_tensor(node).numel() == math.prod(ranges.extents.values())):
                raise NotAttention("one number of its dropout decides about several probabilities")
            if p and dropout:
                raise NotAttention("it has two dropouts")
            dropout = dropout or p
        elif op(node) in CASTS:
            if not dtype_of(node).is_floating_point:
                raise NotAttention("its probabilities are cast to integers")
        else:
            try:
                node, index = views.source(node, index, ranges)
            except views.NotAView as error:
                raise NotAttention(
                    f"its probabilities are moved in a way that is not understood ({line_of(node)})"
                ) from error
            continue
        node = arg(node, 0, "input")
    dim = arg(node, 1, "dim")
    rank = len(shape_of(node))
    rows = [i for d, i in enumerate(index) if isinstance(dim, int) and d != dim % rank]
    # A sink in front of the keys.
    first = isinstance(dim, int) and index[dim % rank] == K + 1
    if not isinstance(dim, int) or not (first or index[dim % rank] == K) or any(K in positions_in(i) for i in rows):
        raise NotAttention("the softmax is not over the keys")
    if not calls_torch(node):
        raise NotAttention("its softmax is not torch's")
    index = tuple(K if d == dim % rank else i for d, i in enumerate(index))
    operand = logits(node, ranges.extents[K], first) if dim % rank == rank - 1 else None
    if operand is None:
        raise NotAttention("the softmax is over other keys than the product with the values")
    return _Probabilities(node, index, dropout, between, operand)


def _sink(lift: Lift, found: _Probabilities) -> Element:
    sink = lift.whole(found.logits.sink, (*found.index[:-1], ZERO))
    if depends_on_scores(sink):
        raise NotAttention("its sink is computed from the scores")
    return sink


def _dropout(node: Node) -> float:
    if drops_nothing(node):
        return 0.0
    if arg(node, 3, "inplace", False):
        raise NotAttention("its dropout is in place")
    p, training = number(arg(node, 1, "p", 0.5)), arg(node, 2, "training", node.kwargs.get("train", True))
    if p is None or not isinstance(training, bool):
        raise NotAttention("its dropout probability is not constant")
    return p


def _ignores_values(user: Node, scores: Node) -> bool:
    """Whether a user of scores or probabilities is computed from their shape, as ``zeros_like(scores)`` is."""
    fills = op(user) in _FILLS_OF_A_SHAPE and scores not in (*user.args[1:], *user.kwargs.values())
    return fills or reads_shape(user, scores)


def has_no_effect(node: Node) -> bool:
    """Return whether nothing uses a tensor that is computed: of probabilities that a caller drops.

    What computes no tensor, as an assertion, may have an effect.
    """
    return not node.users and is_pure(node) and calls_torch(node) and is_tensor(node)


def _check_inside(lift: Lift, between: Sequence[Node], last: Node) -> frozenset[Node]:
    """Return the nodes of the scores and probabilities.

    Raises NotAttention if something else uses them, or if a term depends on them.
    """
    chain = {n for (n, _), element in lift.visited.items() if depends_on_scores(element)}
    inside = chain | set(between)
    known = inside | {last}
    for node in inside:
        others = [u for u in node.users if u not in known and not has_no_effect(u) and not _ignores_values(u, node)]
        if others:
            raise NotAttention(f"its scores or probabilities are also used elsewhere ({line_of(others[0])})")
    reads = {e.node: None for e in lift.visited.values() if isinstance(e, Read)}
    if not inside.isdisjoint(cone(*reads)):
        raise NotAttention("a tensor that its scores read is computed from the scores")
    return frozenset(inside)


# ------------------------------------------------ the product


def _sides(product: Product) -> list[tuple[Node, views.Index]]:
    """Return query and key, and the indices of their elements for a position and a width."""
    of_batch = [product.index[d] for d in product.batch]
    return [_side(x, [*of_batch, i, WIDTH]) for x, i in ((product.query, Q), (product.key, K))]


def _side(operand: Operand, index: list[Any]) -> tuple[Node, views.Index]:
    dims: list[Any] = [None] * len(shape_of(operand.node))
    for position, dim in zip(index, operand.order, strict=True):
        if dim is not None:
            dims[dim] = position
    return operand.node, views.broadcast(tuple(dims), shape_of(operand.node))
