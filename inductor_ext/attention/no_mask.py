"""flex_attention without a block mask makes one that hides nothing, by six kernels at every call. Ours needs none of them.

This pass works on the joint graph, right before it is partitioned. The mask is four constants: one block in each row and
column, and its number 0. The backward gets constants of its own, so that the forward does not have to compute and keep
them. A kernel of ours does not read such a mask, and then nothing computes it. For stock's kernels it is what it was.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..core.fx import fill_of, name_of, value_of
from ..core.joint_graph import Builder
from ..options import Options
from ..torch_api.higher_order import flex_attention_backward_hop, flex_attention_hop
from .calls import BackwardCall, ForwardCall
from .common import NO_MASK_BLOCK_SIZE
from .score_graphs import is_always_true

NAME = "no_mask"


def hides_nothing(call: ForwardCall | BackwardCall, mask_mod: GraphModule) -> bool:
    """Return whether the block mask of a node is known to be the one that is made if there is none.

    ``call`` has the operands of a node of Dynamo's graph or of a later one. ``mask_mod``: the graph of its mask_mod.
    """
    mask = call.mask
    sizes = (mask.query_block_size, mask.key_block_size)
    one_block = all(isinstance(n, int) and n >= NO_MASK_BLOCK_SIZE for n in sizes) and mask.full_kv_num_blocks is None
    return one_block and _is_filled(mask.kv_num_blocks, 1) and _is_filled(mask.kv_indices, 0) and is_always_true(mask_mod)


def _is_filled(node: Node, number: int) -> bool:
    if not isinstance(node, Node) or value_of(node).numel() != 1:
        return False
    # Dynamo's graph has ``ones`` and ``zeros``, which are ``full`` after AOTAutograd.
    return fill_of(node) == number or name_of(node) == ("zeros", "ones")[number]


def rewrite(build: Builder, options: Options) -> None:
    """Make constants of the block masks that hide nothing. Changes the graph in place."""
    for target, kind in ((flex_attention_hop, ForwardCall), (flex_attention_backward_hop, BackwardCall)):
        for node in build.graph.find_nodes(op="call_function", target=target):
            call = kind.of(node)
            mask_mod = getattr(build.graph.owning_module, call.mask.mask_mod.target)
            if hides_nothing(call, mask_mod):
                number, index = call.mask.kv_num_blocks, call.mask.kv_indices
                if kind is BackwardCall:
                    number, index = _constants(build, node, value_of(number))
                node.args = _with_mask(call, number, index)
                build.changed = True


def _constants(build: Builder, node: Node, like: torch.Tensor) -> tuple[Node, Node]:
    """Insert constants that AOTAutograd does not merge with those of the forward, which have more keyword arguments."""
    with build.before(node):
        number, index = (build.full([1] * rank, fill, torch.int32, like.device) for rank, fill in ((3, 1), (4, 0)))
    return number, index


def _with_mask(call: ForwardCall | BackwardCall, number: Node, index: Node) -> tuple[Any, ...]:
    """Return the operands of a call with one block in each row and column. Torch 2.13 has more entries than are named."""
    mask = call.mask
    ours = {mask.kv_num_blocks: number, mask.kv_indices: index, mask.q_num_blocks: number, mask.q_indices: index}
    entries = tuple(ours.get(x, x) if isinstance(x, Node) else x for x in call.block_mask)
    return replace(call, block_mask=entries).operands()
