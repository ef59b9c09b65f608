"""Gradients of small tables by an index that is read for each pair: ``table[index[b, q, k], h]``, as in Graphormer.

One atomic add for each score takes 2 ms for 134 million scores on an H200, because there are few addresses. But the index is
the same for all heads. So the kernel stores the value of each score into a workspace [B, H, Q, K] in fp32, and
``entry_sums`` adds these by matmuls, which make one one-hot matrix for all heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ..core.fx import HALF, cone
from ..torch_api.lowering import lowerings
from . import deterministic
from .captured_grads import Contribution
from .score_mod import ScoreMod

if TYPE_CHECKING:
    from .plans import Plan

aten = torch.ops.aten

#: With fewer scores, the atomic adds take less time than the launches. The workspaces of a kernel have at most 512 MB.
FEWEST_SCORES, MOST_SCORES = 2**22, 2**27
#: ``entry_sums`` counts pairs in 32 bits.
MOST_PAIRS = 2**31 - 2**10
#: With more entries for each head, the one-hot matrices take longer than the atomic adds. On an H200 they take 0.42 ps for
#: each entry of a pair, and an atomic add takes 15 ps.
MOST_ENTRIES_OF_A_HEAD = 32


def dim_of_heads(contribution: Contribution, inputs: ScoreMod, lengths: Sequence[Any]) -> int | None:
    """Return the dim that is indexed by the head, if no other index depends on the head and there are few entries."""
    dims = [d for d, position in enumerate(contribution.positions) if position == 1]
    sizes = (*contribution.shape, *lengths)
    if (
        len(dims) != 1
        or contribution.on_score
        or not all(contribution.axes[2:])
        or not all(isinstance(n, int) for n in sizes)
    ):
        return None
    (dim,) = dims
    others = [i for d, i in enumerate(contribution.indices) if d != dim and isinstance(i, Node)]
    entries = math.prod(contribution.shape) // max(contribution.shape[dim], 1)
    _, heads, queries, keys = lengths
    # The kernel's sums have one number for each batch element, head and entry, or a few.
    few = entries <= min(MOST_ENTRIES_OF_A_HEAD * heads, queries * keys) and queries * keys < MOST_PAIRS
    return dim if few and heads <= contribution.shape[dim] and not any(inputs.h in cone(i) for i in others) else None


def read_for_each_pair(contribution: Contribution, inputs: ScoreMod, lengths: Sequence[Any], count: int) -> bool:
    """Whether an index is read from a captured tensor for each pair, and a workspace of all scores is worthwhile.

    count: the number of contributions of the kernel, each of which may have a workspace.
    """
    nodes = set().union(*(cone(i) for i in contribution.indices if isinstance(i, Node)))
    reads = [n for n in nodes if n.target is aten.index.Tensor and n.args[0] in inputs.captured]
    pairs = any({inputs.q, inputs.k} <= set(cone(n)) for n in reads)
    scores = math.prod(lengths)
    return pairs and scores >= FEWEST_SCORES and count * scores <= MOST_SCORES


def summed(workspace: Any, plan: Plan, captured: Sequence[Any], tensor: Any) -> Any:
    """Turn the workspace [B, H, Q, K] of a plan with a ``dim_of_heads`` into the gradient of a captured tensor, in fp32.

    The address of the plan gives the entry if the head is 0.
    """
    shape, dim = plan.contribution.shape, plan.dim_of_heads
    batch, heads, queries, keys = workspace.get_size()
    sizes = [batch if plan.axes[0] else 1, 1, queries, keys]
    offset, inside = deterministic.over_positions(plan.address, sizes, captured, workspace.get_device())
    inner = math.prod(shape[dim + 1 :])
    outer = math.prod(shape[:dim])
    # An offset is that of a tensor [outer, shape[dim], inner].
    before = lowerings[aten.mul](lowerings[aten.div](offset, inner * shape[dim], rounding_mode="floor"), inner)
    entry = lowerings[aten.add](before, lowerings[aten.remainder](offset, inner))
    nothing = lowerings[aten.full]([], -1, dtype=torch.int32, device=workspace.get_device())
    entry = lowerings[aten.where](inside, lowerings[torch.ops.prims.convert_element_type](entry, torch.int32), nothing)
    index = lowerings[aten.reshape](entry, [sizes[0], queries * keys])
    values = lowerings[aten.reshape](workspace, [batch, heads, queries * keys])
    # Two numbers of 8 bits are more than half precision keeps.
    parts = 2 if tensor.get_dtype() in HALF else 3
    total = lowerings[torch.ops.gradfuse.entry_sums.default](values, index, outer * inner, parts)
    total = lowerings[aten.constant_pad_nd](total, [0, 0, 0, shape[dim] - heads], 0.0)
    total = lowerings[aten.permute](lowerings[aten.reshape](total, [shape[dim], outer, inner]), [1, 0, 2])
    return lowerings[aten.reshape](total, list(shape))
