"""The pass ``attention_pattern``: replace attention that is spelt out by flex_attention, where it reads a learned tensor.

This pass works on Dynamo's graph, before the passes that read score_mods. ``pattern.py`` finds an attention, ``lifting.py``
reads its biases and masks as functions of the position, and ``emit.py`` makes them a score_mod. Attention without a learned
bias stays as it is, because stock has fused kernels for it, and so does an attention that needs no gradient.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...core.dynamo_graph import Inserter
from ...core.fx import called, dtype_of, fake_tensor, shape_of, value_of
from ...core.purity import changes_in_place
from ...core.report import STOCK, leave_to_stock, record, user_line
from ...core.terms import op
from ...options import Options
from ...torch_api.graph import storage_of
from ...torch_api.higher_order import flex_attention_hop, no_block_mask
from ...torch_api.sizes import size_hint
from .. import kernel_dropout
from ..calls import ForwardCall
from ..canonical import install
from ..kinds import K, Q
from .arrange import in_order
from .emit import ScoreModEmitter
from .indices import POSITIONS, B, H
from .lifting import NotAttention, line_of
from .masks import may_hide, shifted
from .pattern import WIDTH, Attention, dtypes, find, learned_terms
from .rows import largest
from .sinks import shared
from .writes import Writes

NAME = "attention_pattern"
#: Shorter sequences, and narrower heads, would leave most of a kernel's tiles empty.
SHORTEST = 16
#: On a CPU, stock's dense code takes half to three quarters of the time of our blocks. With this many scores it would have
#: several tensors of a gigabyte for each attention.
FEWEST_ON_CPU = 2**28
_ADVICE = "Write it with flex_attention and a score_mod to have it fused."
_OPTIONS = {
    "BACKEND": "AUTO",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}


def rewrite(gm: GraphModule, options: Options) -> None:
    """Replace, in place, every attention whose scores or sink read a learned tensor by flex_attention."""
    for node in list(gm.graph.nodes):
        if op(node) not in ("matmul", "einsum", "scaled_dot_product_attention") or not _trains(node):
            continue
        where = user_line(node)
        try:
            attention = find(node)
        except NotAttention as error:
            record(NAME, "attention", STOCK, str(error), where)
            continue
        if attention is None or not learned_terms(attention):
            continue
        why = _why_stock(attention, options)
        if why is not None:
            record(NAME, "attention", STOCK, why, where)
            continue
        try:
            with gm.graph.inserting_before(node):
                _replace(gm, attention)
        except NotAttention as error:
            # Only here is it known that a gradient of stock's will be slow.
            leave_to_stock(False, NAME, "attention", str(error), where, _ADVICE)


def _trains(node: Node) -> bool:
    value = fake_tensor(node)
    return value is not None and value.requires_grad


def _why_stock(attention: Attention, options: Options) -> str | None:
    """Return why flex_attention cannot compute the attention, or would be slower; None if neither holds."""
    device = fake_tensor(attention.last).device
    if len(dtypes(attention)) > 1:
        return "its two products have different dtypes"
    if dtype_of(attention.last) is torch.float64 and device.type != "cpu":
        return "its dtype is float64, for which there is no kernel"
    disabled = kernel_dropout.missing(options, device)
    if disabled is not None:
        return f"{disabled!r}, which would compute it, is disabled"
    if attention.dropout == 1.0:
        return "its dropout drops everything"
    if attention.dropout and options.verify:
        return "verify compares with eager mode, and a kernel would draw other random numbers for its dropout"
    extents = attention.lift.ranges.extents
    lengths = [size_hint(extents[p]) for p in (Q, K)]
    if any(n is None or n < SHORTEST for n in lengths):
        return f"it has fewer than {SHORTEST} queries or keys"
    scores = [size_hint(n) for n in extents.values()]
    if device.type == "cpu" and (None in scores or math.prod(scores) < FEWEST_ON_CPU):
        return "stock is faster on a CPU, if the scores are not very many"
    widths = [shape_of(node)[index.index(WIDTH)] for node, index in (attention.query, attention.value)]
    # A kernel is made for one width, so a symbolic one becomes a guard.
    if any(int(n) < SHORTEST for n in widths):
        return f"its heads have fewer than {SHORTEST} channels"
    return None


def _replace(gm: GraphModule, attention: Attention) -> None:
    last, lift = attention.last, attention.lift
    outer = Inserter(gm.graph, last)
    dtype = dtype_of(last)
    operands = []
    for (node, index), along in zip((attention.query, attention.key, attention.value), (Q, K, K), strict=True):
        arranged = in_order(outer, node, index, (B, H, along, WIDTH), lift.ranges)
        if arranged is None:
            raise NotAttention(f"an operand is not laid out by batch, head, position and channel ({line_of(node)})")
        operands.append(arranged if dtype_of(arranged) is dtype else outer.method("to", arranged, dtype))
    query, key, value = operands
    device = value_of(query).device
    emitter = ScoreModEmitter(outer, last, value_of(query), lift.ranges)
    score, masks = attention.masked.score, attention.masked.masks
    scale = attention.scale * emitter.scaled(score)
    row = None
    if masks is not None and may_hide(masks):
        row = largest(outer, masks, lift.ranges, device)
        score = shifted(score, row)
    score_mod = emitter.module(score)
    ones = outer.function(torch.ones, [1, 1, 1], dtype=torch.int32, device=device)
    zeros = outer.function(torch.zeros, [1, 1, 1, 1], dtype=torch.int32, device=device)
    mask_mod = install(gm, "mask_mod", _mask_mod(last, value_of(query)))
    call = ForwardCall(
        query,
        key,
        value,
        install(gm, "score_mod", score_mod),
        no_block_mask(ones, zeros, mask_mod),
        scale,
        {**_OPTIONS, **kernel_dropout.dropout(attention.dropout)},
        tuple(emitter.captured),
    )
    fused = gm.graph.call_function(flex_attention_hop, call.operands())
    fused.meta = {k: v for k, v in last.meta.items() if k in ("stack_trace", "nn_module_stack", "source_fn_stack")}
    fused.meta["example_value"] = _results(value_of(query), value_of(value))
    result = outer.function(operator.getitem, fused, 0)
    if attention.sink is not None:
        result = shared(outer, result, outer.function(operator.getitem, fused, 1), attention.sink, row, lift.ranges)
    result = _as_before(outer, result, attention)
    # flex_attention saves its output for the backward, so that nothing may write to that.
    if lift.writes.after(last) or _layout_matters(last) or _copies_may_change(last, lift.writes):
        result = outer.method("clone", result, memory_format=torch.contiguous_format)
    last.replace_all_uses_with(result)
    _erase(gm, attention)
    learned = len(set(learned_terms(attention)))
    why = f"its score_mod captures {len(emitter.captured)} tensors; {learned} are learned"
    why += "" if attention.sink is None else ", with its sink"
    record(NAME, "attention", "flex_attention", why, user_line(fused))


def _mask_mod(like: Node, query: torch.Tensor) -> GraphModule:
    """Return the mask_mod that hides nothing."""
    graph = Graph()
    for position in POSITIONS:
        graph.placeholder(position.name).meta["example_value"] = query.new_empty((), dtype=torch.int32)
    graph.output(Inserter(graph, like).function(torch.ones, (), dtype=torch.bool, device=query.device))
    return GraphModule(torch.nn.Module(), graph)


def _results(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values like those of flex_attention: the output, the logsumexp and the maximum of each row."""
    with torch.no_grad():
        row = query[..., 0].to(torch.promote_types(query.dtype, torch.float32))
    return query[..., :1] * value[..., :1, :], row, row


def _as_before(outer: Inserter, result: Node, attention: Attention) -> Node:
    """Return the output ``[b, h, q, d]`` of the kernel with the dims of the node that it replaces."""
    shape = shape_of(attention.last)
    order = attention.out
    unordered: list[Any] = [None] * len(order)
    for at, dim in enumerate(order):
        unordered[dim] = shape[at]
    if len(unordered) != 4:
        result = outer.method("reshape", result, unordered)
    return result if list(order) == sorted(order) else outer.method("permute", result, list(order))


def _layout_matters(last: Node) -> bool:
    """Return whether a contiguous result must stay contiguous. The kernel's result has the layout of the query."""
    return fake_tensor(last).is_contiguous() and not all(called(user) in _ANY_LAYOUT for user in _users(last))


def _copies_may_change(last: Node, writes: Writes) -> bool:
    """Return whether something writes to a copy of the result in the graph, or may do so after the graph has run.

    What was a copy may become a view of the kernel's result, because that may have another layout.
    """
    returned = {storage_of(x) for n in last.graph.output_node().all_input_nodes if (x := fake_tensor(n)) is not None}
    copies = [user for user in _users(last) if called(user) in _MAY_COPY and fake_tensor(user) is not None]
    return any(writes.after(user) or storage_of(fake_tensor(user)) in returned for user in copies)


def _users(last: Node) -> set[Node]:
    """Return what uses the result, or the result with its dims in another order."""
    moved = {user for node in last.users if op(node) in ("transpose", "permute") for user in node.users}
    return {user for user in last.users if op(user) not in ("transpose", "permute")} | moved


_MAY_COPY = {"contiguous", "reshape", "flatten"}
_ANY_LAYOUT = _MAY_COPY | {"linear", "size"}


def _erase(gm: GraphModule, attention: Attention) -> None:
    """Erase what only the attention used. Dead dropout and in-place operations would stay in the graph otherwise."""
    dead = {attention.last, *attention.inside}
    own = {storage_of(x) for n in dead if (x := fake_tensor(n)) is not None and not changes_in_place(n)}
    for node in [n for n in reversed(list(gm.graph.nodes)) if n in dead]:
        outside = changes_in_place(node) and storage_of(fake_tensor(node)) not in own
        if not node.users and not outside:
            gm.graph.erase_node(node)
