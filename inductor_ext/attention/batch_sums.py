"""The gradient of a captured tensor ``t[h, q, k]`` that all batch elements share, by a kernel of its own.

In the main kernel each batch element adds its tile of scores to memory, in fp32. That takes zeros, an addition for each
batch element, and a cast, all at the speed of the memory. A program of ``flex_batch_sums.py.jinja`` owns a tile of the
gradient. It sums the tile over the batch elements in registers and stores it once, in the dtype of the tensor. For that it
computes the scores once more, with two matmuls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy

from ..core.target import Target
from ..core.templates import Listed, load
from ..torch_api.ir import contiguous_strides, fixed_layout
from ..torch_api.sizes import statically_known_true
from ..torch_api.template import SymbolicGridFn, Template, autotune
from . import common
from .calls import BackwardCall
from .captured_grads import Contribution
from .plans import Plan

FILE = "flex_batch_sums.py.jinja"
_PARTS = ("flex_batch_sums", "flex_tiles", "flex_tables", "dropout", "kinds/*", "backward/contributions", "backward/scores")
_PARTS += ("backward/duplicates",)

#: The widest head. Wider ones have not been timed.
WIDEST = 64
#: A kernel with fewer programs for each multiprocessor leaves some of them idle while the batch elements follow each other.
PROGRAMS = 2
#: It takes 0.71 ms for 2 x 16 x 4096 x 4096 scores on an H200. With 128 keys it takes 0.68 ms, but a factor that is read for
#: each score spills then.
TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "QUERY_TILES": 8, "num_warps": 4, "num_stages": 2}


@SymbolicGridFn
def _grid(heads: Any, queries: Any, keys: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    return cdiv(queries, meta["BLOCK_M"] * meta["QUERY_TILES"]) * cdiv(keys, meta["BLOCK_N"]), 1, heads


_template = Template("gradfuse_flex_batch_sums", _grid, load(*(f"attention/{name}" for name in _PARTS)))


def pays(call: BackwardCall, nothing_hidden: bool) -> bool:
    """Return whether the kernel is faster than additions in memory, for a tensor that it takes (see ``takes``)."""
    batch, heads, queries, head_dim = call.query.get_size()
    sizes = [batch, heads, queries, call.key.get_size()[2], head_dim, call.value.get_size()[3]]
    if not nothing_hidden or not all(isinstance(n, (int, sympy.Integer)) for n in sizes):
        return False
    half = call.query.get_dtype().itemsize == 2
    tiles = -(-int(queries) // (TILE["BLOCK_M"] * TILE["QUERY_TILES"])) * -(-int(sizes[3]) // TILE["BLOCK_N"])
    enough = heads * tiles >= PROGRAMS * Target.of(call.query.get_device()).multiprocessors
    return half and batch > 1 and max(sizes[4:]) <= WIDEST and enough and not common.in_tiles(call, 1)


def takes(contribution: Contribution, lengths: Sequence[Any]) -> bool:
    """Return whether a contribution is the gradient of ``t[h, q, k]`` for all heads, queries and keys."""
    if not contribution.plain or contribution.positions != (1, 2, 3):
        return False
    return all(statically_known_true(n == m) for n, m in zip(contribution.shape, lengths[1:], strict=True))


def lower(call: BackwardCall, plan: Plan, operands: Sequence[Any], options: dict[str, Any], subgraphs: Sequence[Any]) -> Any:
    """Return the gradient of the tensor of ``plan``.

    operands: delta, the tables that are read by tile, and the seed of dropout if there is one. options: those of the main
    kernel. subgraphs: the score, its gradient, the mask, the parts of the contribution, and what is computed before scores.
    """
    tensor = call.captured[plan.owner]
    size = tensor.get_size()
    layout = fixed_layout(tensor.get_device(), tensor.get_dtype(), size, contiguous_strides(size))
    inputs = [call.query, call.key, call.value, call.logsumexp, call.grad_out, *operands]
    # A factor beside odd lengths spills 112 bytes on sm_80 with 64 queries in four warps, and 72 in eight.
    tile = TILE | ({"BLOCK_M": 32} if Target.of(tensor.get_device()).family in ("ampere", "consumer") else {})
    choices: list[Any] = []
    _template.maybe_append_choice(
        choices=choices,
        input_nodes=inputs,
        layout=layout,
        subgraphs=list(subgraphs),
        mutated_inputs=[],
        call_sizes=[*size],
        **{**options, "SLICES": 1, "CONTRIBUTIONS": Listed([plan.seen_by_template(0, 1)]), **tile},
    )
    captured = [*call.captured, *call.mask_captured]
    return autotune("gradfuse_flex_batch_sums", choices, [*inputs, *captured], layout, {}, captured, subgraphs)
