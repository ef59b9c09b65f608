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
import torch

from ..core.fx import HALF
from ..core.target import Target
from ..core.templates import Listed, load
from ..options import Options
from ..torch_api.ir import contiguous_strides, fixed_layout
from ..torch_api.lowering import lowerings
from ..torch_api.sizes import statically_known_true
from ..torch_api.template import SymbolicGridFn, Template, autotune
from . import common
from .calls import BackwardCall
from .captured_grads import Contribution
from .plans import Plan

#: The name of the kernel in ``disable``.
NAME = "batch_sums"
_PARTS = ("flex_batch_sums", "flex_tiles", "flex_tables", "dropout", "kinds/*", "backward/contributions", "backward/scores")
_PARTS += ("backward/duplicates",)

#: Narrower heads take two passes with additions, and wider ones are slower than with additions. The larger the batch, the
#: less is gained: zeros and a cast are saved once, and the scores of each batch element are computed again. With a batch of
#: 8 and tiles of 128 keys it is 5 % faster. With the tile below only a batch of 2 has been timed.
HEAD_DIMS, LARGEST_BATCH = range(33, 65), 8
#: A kernel with fewer programs for each multiprocessor leaves some of them idle while the batch elements follow each other.
PROGRAMS = 2
#: It takes 0.71 ms for 2 x 16 x 4096 x 4096 scores on an H200. With 128 keys it takes 0.68 ms, but a factor that is read for
#: each score spills then.
TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "QUERY_TILES": 8, "num_warps": 4, "num_stages": 2}
#: The same elsewhere. With 64 queries a factor beside odd lengths spills 112 bytes on sm_80, and 88 on sm_100 (Triton 3.6).
SMALL_TILE = TILE | {"BLOCK_M": 32}


@SymbolicGridFn
def _grid(heads: Any, queries: Any, keys: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    return cdiv(queries, meta["BLOCK_M"] * meta["QUERY_TILES"]) * cdiv(keys, meta["BLOCK_N"]), 1, heads


_template = Template("gradfuse_flex_batch_sums", _grid, load(*(f"attention/{name}" for name in _PARTS)))


def _tile(device: torch.device) -> dict[str, int]:
    return TILE if Target.of(device).family == "hopper" else SMALL_TILE


def pays(call: BackwardCall, options: Options, nothing_hidden: bool) -> bool:
    """Return whether the kernel is faster than additions in memory, for a tensor that it takes (see ``takes``)."""
    batch, heads, queries, head_dim = call.query.get_size()
    sizes = [batch, heads, queries, call.key.get_size()[2], head_dim, call.value.get_size()[3]]
    if not options.enabled(NAME) or not nothing_hidden or not all(isinstance(n, (int, sympy.Integer)) for n in sizes):
        return False
    if call.key.get_size()[0] != batch:
        return False
    half = call.query.get_dtype().itemsize == 2
    tile = _tile(call.query.get_device())
    tiles = -(-int(queries) // (tile["BLOCK_M"] * tile["QUERY_TILES"])) * -(-int(sizes[3]) // tile["BLOCK_N"])
    enough = heads * tiles >= PROGRAMS * Target.of(call.query.get_device()).multiprocessors
    fits = 1 < batch <= LARGEST_BATCH and max(sizes[4:]) in HEAD_DIMS
    return half and fits and enough and not common.in_tiles(call, 1)


def takes(contribution: Contribution, dtype: torch.dtype, lengths: Sequence[Any]) -> bool:
    """Return whether a contribution is the gradient of ``t[h, q, k]`` for all heads, queries and keys, in half precision.

    The tensor may have more dims of one element, as in ``t[0, h, q, k]``. If it is in fp32, its tiles leave the main kernel
    less shared memory than with additions, which have other tiles; that has not been timed.
    """
    indexed = [(p, n) for p, n in zip(contribution.positions, contribution.shape, strict=True) if p is not None]
    ones = [n for p, n in zip(contribution.positions, contribution.shape, strict=True) if p is None]
    if dtype not in HALF or not contribution.plain or [p for p, _ in indexed] != [1, 2, 3] or any(n != 1 for n in ones):
        return False
    return all(statically_known_true(n == m) for (_, n), m in zip(indexed, lengths[1:], strict=True))


def lower(call: BackwardCall, plan: Plan, operands: Sequence[Any], options: dict[str, Any], subgraphs: Sequence[Any]) -> Any:
    """Return the gradient of the tensor of ``plan``.

    operands: delta, the tables that are read by tile, and the seed of dropout if there is one. options: those of the main
    kernel. subgraphs: the score, its gradient, the mask, the parts of the contribution, and what is computed before scores.
    """
    tensor = call.captured[plan.owner]
    size = [*call.query.get_size()[1:3], call.key.get_size()[2]]
    layout = fixed_layout(tensor.get_device(), tensor.get_dtype(), size, contiguous_strides(size))
    inputs = [call.query, call.key, call.value, call.logsumexp, call.grad_out, *operands]
    choices: list[Any] = []
    _template.maybe_append_choice(
        choices=choices,
        input_nodes=inputs,
        layout=layout,
        subgraphs=list(subgraphs),
        mutated_inputs=[],
        call_sizes=[*size],
        **{**options, "SLICES": 1, "CONTRIBUTIONS": Listed([plan.seen_by_template(0, 1)]), **_tile(layout.device)},
    )
    captured = [*call.captured, *call.mask_captured]
    sums = autotune("gradfuse_flex_batch_sums", choices, [*inputs, *captured], layout, {}, captured, subgraphs)
    return lowerings[torch.ops.aten.reshape.default](sums, tensor.get_size())
