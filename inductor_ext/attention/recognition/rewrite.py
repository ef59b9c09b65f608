"""The pass ``attention_pattern``: replace attention that is spelt out by flex_attention, where it reads a learned tensor.

This pass works on Dynamo's graph, before the passes that read score_mods. ``pattern.py`` finds an attention, ``lifting.py``
reads its biases and masks as functions of the position, and ``emit.py`` makes them a score_mod. Attention that reads nothing
learned stays as it is, because stock has fused kernels for it, unless that would store a large mask (``worth.py``). An
attention that needs no gradient stays as it is, too.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...core.dynamo_graph import Inserter, erase_unused
from ...core.fx import called, dtype_of, fake_tensor, requires_grad, same_sizes, shape_of, value_of
from ...core.outside import Outside, is_returned
from ...core.purity import changes_in_place
from ...core.report import STOCK, leave_to_stock, record, user_line
from ...core.terms import is_one, op, reads_shape
from ...core.writes import Writes
from ...options import Options
from ...torch_api.config import uses_eager_random_numbers, uses_triton_on_cpu
from ...torch_api.graph import is_wrapper, storage_of
from ...torch_api.higher_order import flex_attention_hop, no_block_mask
from ...torch_api.sizes import has_all_symbols, size_hint, statically_known_true
from .. import kernel_dropout
from ..calls import ForwardCall
from ..canonical import install
from ..kinds import K, Q
from .arrange import in_order
from .attentions import WIDTH, Attention, dtypes, learned_terms
from .elements import Read, Score
from .emit import ScoreModEmitter
from .grouped import keys_and_values
from .indices import POSITIONS, B, H
from .lifting import NotAttention, line_of
from .masks import masks_of, shifted
from .multi_head import write_out
from .pattern import find, has_no_effect
from .rows import largest
from .sinks import shared
from .skipping import skipped_blocks
from .worth import is_small, saves_a_mask

NAME = "attention_pattern"
#: Shorter sequences, and narrower heads, would leave most of a kernel's tiles empty.
SHORTEST = 16
#: Tiles of wider heads, as of attention over channels, whose width is the number of tokens, do not fit.
WIDEST = 256
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
    """Replace, in place, every attention whose scores or sink read a learned tensor, or which saves a mask (worth.py)."""
    write_out(gm.graph)
    writes = Writes(gm.graph)
    products = ("matmul", "einsum", "scaled_dot_product_attention")
    for node in [n for n in gm.graph.nodes if op(n) in products and requires_grad(n)]:
        # flex_attention has no rules for DTensors and other wrappers.
        if is_wrapper(fake_tensor(node)):
            continue
        try:
            attention = find(node, writes)
        except NotAttention as error:
            record(NAME, "attention", STOCK, str(error), user_line(node))
            continue
        if attention is not None and (learned_terms(attention) or saves_a_mask(attention)):
            _replace_or_record(gm, attention, options)


def _replace_or_record(gm: GraphModule, attention: Attention, options: Options) -> None:
    """Replace an attention, or record why it is left to stock."""
    last, where = attention.last, user_line(attention.last)
    why = _why_stock(attention, options)
    if why is not None:
        record(NAME, "attention", STOCK, why, where)
        return
    before = last.prev
    try:
        with gm.graph.inserting_before(last):
            result = _replacement(gm, attention)
    except NotAttention as error:
        if learned_terms(attention):
            # The gradient of what is learned will be slow.
            leave_to_stock(False, NAME, "attention", str(error), where, _ADVICE)
        else:
            record(NAME, "attention", STOCK, str(error), where)
        erase_unused(before, last)
        return
    last.replace_all_uses_with(result)
    attention.lift.writes.replaced(last, result)
    erase_unused(before, last)
    _erase(gm, attention)


def _why_stock(attention: Attention, options: Options) -> str | None:
    """Return why flex_attention cannot compute the attention, or would be slower; None if neither holds."""
    device = fake_tensor(attention.last).device
    if len(dtypes(attention)) > 1:
        return "its two products have different dtypes"
    if dtype_of(attention.last) is torch.float64 and device.type != "cpu":
        return "its dtype is float64, for which there is no kernel"
    if dtype_of(attention.last) is torch.float64 and attention.sink is not None:
        return "its dtype is float64, and its sink would be weighed by flex_attention's logsumexp, which is in fp32"
    disabled = kernel_dropout.missing(options, device)
    if disabled is not None:
        return f"{disabled!r}, which would compute it, is disabled"
    if attention.dropout == 1.0:
        return "its dropout drops everything"
    if attention.dropout and uses_eager_random_numbers():
        return "its dropout would draw other random numbers in a kernel than in eager mode (fallback_random)"
    if options.deterministic and (why := _why_not_deterministic(attention, device)) is not None:
        return why
    extents = attention.lift.ranges.extents
    lengths = [size_hint(extents[p]) for p in (Q, K)]
    if any(n is None or n < SHORTEST for n in lengths):
        return f"it has fewer than {SHORTEST} queries or keys"
    scores = [size_hint(n) for n in extents.values()]
    if device.type == "cpu" and (None in scores or math.prod(scores) < FEWEST_ON_CPU):
        return "stock is faster on a CPU, if the scores are not very many"
    if device.type == "cpu" and not has_all_symbols(extents.values()) and not uses_triton_on_cpu():
        return "on a CPU, loops cannot have a batch whose size is computed of a symbolic one"
    widths = [shape_of(n)[index.index(WIDTH)] if WIDTH in index else 1 for n, index in (attention.query, attention.value)]
    # A kernel is made for one width, so a symbolic one becomes a guard.
    if any(int(n) < SHORTEST for n in widths):
        return f"its heads have fewer than {SHORTEST} channels"
    if any(int(n) > WIDEST for n in widths):
        return f"its heads have more than {WIDEST} channels"
    return None


def _why_not_deterministic(attention: Attention, device: torch.device) -> str | None:
    """Return why the option deterministic would raise an error for the flex_attention that replaces an attention."""
    if device.type == "cpu" and not torch.are_deterministic_algorithms_enabled():
        return "on a CPU, its deterministic gradients need torch.use_deterministic_algorithms(True)"
    reads = [e for e in attention.score.walk() if isinstance(e, Read)]
    if any(isinstance(e, Score) for read in reads for e in read.walk()):
        return "it reads a tensor at an index that depends on the scores, which is not deterministic"
    return None


def _replacement(gm: GraphModule, attention: Attention) -> Node:
    """Insert the attention as flex_attention, and return the node of what its last node computed. May raise NotAttention."""
    last, ranges = attention.last, attention.lift.ranges
    outer = Inserter(gm.graph, last)
    query, key, value = _operands(outer, attention)
    like = value_of(query)
    emitter = ScoreModEmitter(outer, last, like, ranges)
    score, writes = attention.score, attention.lift.writes
    masks = masks_of(score, ranges, writes)
    scale = attention.scale * emitter.scaled(score)
    row = None
    if masks is not None:
        row = largest(outer, masks, ranges, like.device)
        score = shifted(score, row)
    score_mod = emitter.module(score)
    mask_mod = install(gm, "mask_mod", _mask_mod(last, like))
    blocks = skipped_blocks(outer, attention, query, mask_mod)
    call = ForwardCall(
        query,
        key,
        value,
        install(gm, "score_mod", score_mod),
        blocks or _all_blocks(outer, mask_mod, like.device),
        scale,
        {**_OPTIONS, **kernel_dropout.dropout(attention.dropout)},
        _captured(outer, attention, emitter.captured),
    )
    fused = outer.call(flex_attention_hop, call.operands(), lambda: _results(like, value_of(value)))
    learned = len(set(learned_terms(attention)))
    why = f"its score_mod captures {len(emitter.captured)} tensors; {learned} are learned"
    why += "" if attention.sink is None else ", with its sink"
    heads, shared = (shape_of(x)[1] for x in (query, key))
    why += "" if same_sizes([heads], [shared]) else f", and {shared} heads of keys serve {heads} heads of queries"
    why += "" if blocks is None else ", and blocks that its masks hide are skipped"
    record(NAME, "attention", "flex_attention", why, user_line(fused))
    return _result(outer, fused, row, attention)


def _captured(outer: Inserter, attention: Attention, tensors: Sequence[Node]) -> tuple[Node, ...]:
    """Return the captured tensors as the backward is to read them.

    In eager mode it reads a mask that the forward has made of them. So what can be changed outside before the backward, is
    not learned and much smaller than that mask, is copied.
    """
    outside = Outside(outer.graph)

    def kept(x: Node) -> Node:
        changes = not requires_grad(x) and outside.has(x) and is_small(x, attention=attention)
        return outer.function(torch.ops.gradfuse.copied.default, x) if changes else x

    return tuple(map(kept, tensors))


def _all_blocks(outer: Inserter, mask_mod: Node, device: torch.device) -> tuple[Any, ...]:
    """Return the block_mask operand that flex_attention has without a block mask."""
    ones = outer.function(torch.ones, [1, 1, 1], dtype=torch.int32, device=device)
    zeros = outer.function(torch.zeros, [1, 1, 1, 1], dtype=torch.int32, device=device)
    return no_block_mask(ones, zeros, mask_mod)


def _operands(outer: Inserter, attention: Attention) -> list[Node]:
    """Return query, key and value with the dims b, h, position and channel, in the dtype of the result.

    Key and value may have fewer heads than the query. What can be changed outside before the backward is copied, unless
    eager mode keeps it too.
    """
    ranges, shared, outside = attention.lift.ranges, keys_and_values(attention), Outside(outer.graph)
    sides = ((attention.query, Q, ranges), (shared.key, K, shared.ranges), (shared.value, K, shared.ranges))
    operands = []
    dtype = dtype_of(attention.last)
    for (node, index), along, positions in sides:
        arranged = in_order(outer, node, index, (B, H, along, WIDTH), positions)
        if arranged is None:
            raise NotAttention(f"an operand is not laid out by batch, head, position and channel ({line_of(node)})")
        kept = positions is ranges and outside.shares(node) and _keeps(attention, node, arranged)
        if outside.has(node) and not kept:
            arranged = outer.function(torch.ops.gradfuse.copied.default, arranged)
        operands.append(arranged if dtype_of(arranged) is dtype else outer.method("to", arranged, dtype))
    return operands


def _keeps(attention: Attention, operand: Node, arranged: Node) -> bool:
    """Return whether eager mode keeps the memory of an operand ``arranged`` [b, h, s, d] for the backward.

    A product joins the dims b and h of its operands, which copies those that have no such view. The math of
    scaled_dot_product_attention scales query and key, which copies them too.
    """
    if attention.lift.product is None and operand is not attention.value[0]:
        return False
    (batch, heads), (of_batch, of_head) = shape_of(arranged)[:2], fake_tensor(arranged).stride()[:2]
    return is_one(batch) or is_one(heads) or statically_known_true(of_batch == of_head * heads)


def _result(outer: Inserter, fused: Node, row: Read | None, attention: Attention) -> Node:
    """Return the result of an attention from those of flex_attention. row: what was subtracted from each row of scores."""
    last, lift = attention.last, attention.lift
    result = outer.function(operator.getitem, fused, 0)
    if attention.sink is not None:
        result = shared(outer, result, outer.function(operator.getitem, fused, 1), attention.sink, row, lift.ranges)
    result = _as_before(outer, result, attention)
    # flex_attention saves its output for the backward, so that nothing may write to that.
    # What a sink has changed is another tensor.
    if attention.sink is None and is_returned(last):
        return _laid_out_as(outer, result, last, lambda x: outer.function(torch.ops.gradfuse.copied.default, x))
    if lift.writes.after(last) or _layout_matters(last) or _copies_change(last, lift.writes):
        return _laid_out_as(outer, result, last, lambda x: outer.method("clone", x, memory_format=torch.contiguous_format))
    return result


def _laid_out_as(outer: Inserter, result: Node, last: Node, copy: Callable[[Node], Node]) -> Node:
    """Return a copy with the dims in memory in the order in which ``last`` has them. copy: inserts a contiguous copy."""
    strides = [size_hint(n) for n in fake_tensor(last).stride()]
    order = sorted(range(len(strides)), key=lambda d: -(strides[d] or 0))
    back = [order.index(d) for d in range(len(order))]
    if order == back == sorted(order):
        return copy(result)
    return outer.method("permute", copy(outer.method("permute", result, order)), back)


def _mask_mod(like: Node, query: torch.Tensor) -> GraphModule:
    """Return the mask_mod that hides nothing."""
    graph = Graph()
    for position in POSITIONS:
        graph.placeholder(position.name).meta["example_value"] = query.new_empty((), dtype=torch.int32)
    graph.output(Inserter(graph, like).function(torch.ones, (), dtype=torch.bool, device=query.device))
    return GraphModule(torch.nn.Module(), graph)


def _results(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values like those of flex_attention: the output, the logsumexp and the maximum of each row."""
    row = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
    return query[..., :1] * value[:, :1, :1], torch.zeros_like(row, requires_grad=True), row


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
    """Return whether something may need the layout or the memory of the result. The kernel's has the layout of the query.

    A reshape that is a view passes the layout on. Nothing else is known of ``view`` but that it may not fit another layout.
    """
    others = [user for user in last.users if called(user) not in _ANY_LAYOUT and not reads_shape(user, last)]
    return not all(called(user) in _PASS_ON and not _layout_matters(user) for user in others)


def _copies_change(last: Node, writes: Writes) -> bool:
    """Return whether something writes to a copy of the result in the graph.

    What was a copy may become a view of the kernel's result, because that may have another layout.
    """
    copies = [user for user in _moved(last) if called(user) in _MAY_COPY and fake_tensor(user) is not None]
    return any(map(writes.after, copies))


def _moved(last: Node) -> set[Node]:
    """Return what uses the result, also after it was moved and reshaped."""
    seen, pending = set(), [last]
    while pending:
        new = set(pending.pop().users) - seen
        seen |= new
        pending += [user for user in new if called(user) in _PASS_ON]
    return seen


_MAY_COPY = {"contiguous", "reshape", "flatten"}
_ANY_LAYOUT = {"contiguous", "linear"}
_PASS_ON = {"transpose", "permute", "reshape", "flatten"}


def _erase(gm: GraphModule, attention: Attention) -> None:
    """Erase what only the attention used. Dead dropout and in-place operations would stay in the graph otherwise."""
    dead = {attention.last, *attention.inside}
    # These may share memory with something else, as a view that has the shape of the probabilities does.
    for user in {user for node in dead for user in node.users if user not in dead and has_no_effect(user)}:
        gm.graph.erase_node(user)
    own = {storage_of(x) for n in dead if (x := fake_tensor(n)) is not None and not changes_in_place(n)}
    for node in sorted(dead, reverse=True):
        outside = changes_in_place(node) and storage_of(fake_tensor(node)) not in own
        if not node.users and not outside:
            gm.graph.erase_node(node)
