"""Turn flex_attention on CPU tensors into blocked dense math, forward and backward.

This pass runs on the forward and the backward graph after AOTAutograd. There, the op and its backward are two nodes, and the
score_mod, its joint graph and the mask_mod are scalar graphs. Each node becomes ordinary ATen ops over one block of queries
and one segment of keys, inside loops over the blocks and over the segments that the block mask shows. Inductor turns these
loops into C++. Memory is linear in the length, and the backward recomputes the scores, as flash attention does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..core.cpu_loops import QUERY_BLOCK
from ..core.fx import value_of
from ..core.replace_node import replace_node
from ..core.report import STOCK, record, user_line
from ..options import Options
from ..torch_api.config import uses_triton_on_cpu
from ..torch_api.higher_order import FlexBlockMask, flex_attention_backward_hop, flex_attention_hop
from .calls import BackwardCall, ForwardCall
from .captured_grads import JointGraph, NotUnderstood, take_apart
from .cpu_math import DenseAttention
from .cpu_tiles import JointFunction, scalar_graph, without_narrowing
from .kernel_dropout import Dropout
from .score_mod import ScoreMod

NAME = "dense_attention"


def rewrite(gm: GraphModule, options: Options) -> None:
    """Replace every flex_attention in training on CPU tensors, forward or backward. Changes ``gm``."""
    if uses_triton_on_cpu():
        return
    for op, expand in ((flex_attention_hop, _expand_forward), (flex_attention_backward_hop, _expand_backward)):
        for node in gm.graph.find_nodes(op="call_function", target=op):
            if value_of(node.args[0]).device.type == "cpu":
                expand(gm, node, options)


def _expand_forward(gm: GraphModule, node: Node, options: Options) -> None:
    call = ForwardCall.of(node)
    if not call.kernel_options.get("OUTPUT_LOGSUMEXP") and not call.kernel_options.get("OUTPUT_MAX"):
        record(NAME, "flex_attention", STOCK, "inference needs no logsumexp", user_line(node))
        return
    attention = DenseAttention(
        score=scalar_graph(gm, call.score_mod, node, ScoreMod.of),
        mask=scalar_graph(gm, call.mask.mask_mod, node, ScoreMod.of_mask),
        joint=None,
        has_full_blocks=call.mask.full_kv_num_blocks is not None,
        scale=call.scale,
        num_captured=len(call.captured),
        dropout=Dropout.of(call),
    )

    def forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
        return attention.with_blocks(*rest[:2]).forward(query, key, value, *rest[2:])

    operands = [call.query, call.key, call.value, *_blocks(call.mask), *call.captured, *call.mask_captured]
    replace_node(gm, node, operands, forward)
    record(
        NAME,
        "flex_attention",
        "blocked dense math",
        f"the tensors are on the CPU; a block has {QUERY_BLOCK} queries",
        user_line(node),
    )


def _expand_backward(gm: GraphModule, node: Node, options: Options) -> None:
    call = BackwardCall.of(node)
    where = user_line(node)
    try:
        joint = take_apart(without_narrowing(getattr(gm, call.joint_graph.target)))
    except NotUnderstood as error:
        line = user_line(error.node) or where
        raise NotImplementedError(
            f"gradfuse cannot differentiate this score_mod: {error}, at {line}. Index the captured tensor with one scalar "
            "for each of its dims, or compute the expression outside the score_mod."
        ) from error
    if options.deterministic and any(joint.captured) and not torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            "Deterministic gradients of captured tensors on the CPU also need "
            f"torch.use_deterministic_algorithms(True) ({where})."
        )
    attention = DenseAttention(
        score=scalar_graph(gm, call.score_mod, node, ScoreMod.of),
        mask=scalar_graph(gm, call.mask.mask_mod, node, ScoreMod.of_mask),
        joint=JointFunction.of(joint, node),
        has_full_blocks=call.mask.full_kv_num_blocks is not None,
        scale=call.scale,
        num_captured=len(call.captured),
        dropout=Dropout.of(call),
    )
    gradients = [call.grad_out, call.grad_logsumexp]
    present = [g is not None for g in gradients]

    def backward(query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *rest: Any) -> Any:
        remaining = list(rest)
        grad_out, grad_lse = (remaining.pop(0) if p else None for p in present)
        blocks, remaining = remaining[:2], remaining[2:]
        return attention.with_blocks(*blocks).backward(query, key, value, out, logsumexp, grad_out, grad_lse, *remaining)

    operands = [call.query, call.key, call.value, call.out, call.logsumexp, *(g for g in gradients if g is not None)]
    operands += [*_blocks(call.mask), *call.captured, *call.mask_captured]
    replace_node(gm, node, operands, backward)
    count = sum(len(c) for c in joint.captured if c)
    note = f"the tensors are on the CPU; there are {count} contributions to captured gradients"
    record(NAME, "flex_attention_backward", "blocked dense math", note, where, _reductions(joint))


def _reductions(joint: JointGraph) -> tuple[tuple[int, str], ...]:
    """Return, for the report, how each contribution to a captured gradient is reduced."""
    found = []
    for owner, contributions in enumerate(joint.captured):
        for contribution in contributions or ():
            free = [n for n, used in zip(("queries", "keys"), contribution.axes[2:], strict=True) if not used]
            how = (
                f"summed over the {' and '.join(free)} of a block, then added" if free else "added for every pair of a block"
            )
            found.append((owner, how))
    return tuple(found)


def _blocks(block_mask: FlexBlockMask) -> list[Any]:
    """Return the operands for a block mask: the sizes of its blocks, which may be symbolic, and its lists."""
    sizes = [block_mask.query_block_size, block_mask.key_block_size]
    lists = [block_mask.kv_num_blocks, block_mask.kv_indices]
    full = [block_mask.full_kv_num_blocks, block_mask.full_kv_indices]
    return [*sizes, *lists, *(full if full[0] is not None else [])]
