"""Prototype: attention's forward on Hopper, in Gluon, without a mask or a score_mod.

    program (rows, head): owns CONSUMERS * 64 queries
        producer (one warp): for each tile of keys: load K and V by TMA, as soon as their buffers are free
        consumers (a warpgroup each, 64 queries): for each tile of keys:
            issue scores = Q Kᵀ
            LATE: issue the product of the previous tile's probabilities and V, and only then wait for the scores
            probs = exp2(scores - maximum), and the sums of the rows
            rescale the output, once the product of the previous tile is there

The structure is that of FlashAttention-3 (arXiv 2407.08608), section 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .hopper import allow_descriptors, result_layout, tma_load


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, first_row, tiles,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    for c in gl.static_range(CONSUMERS):
        mbarrier.expect(q_full.index(c), 64 * D * 2)
        tma_load(q_desc, [first_row + c * 64, 0], q_full.index(c), q_tiles.index(c))
    for i in range(tiles):
        place = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_empty.index(place), phase ^ 1)
        mbarrier.expect(k_full.index(place), BLOCK_N * D * 2)
        tma_load(k_desc, [i * BLOCK_N, 0], k_full.index(place), k_tiles.index(place))
        mbarrier.wait(v_empty.index(place), phase ^ 1)
        mbarrier.expect(v_full.index(place), BLOCK_N * D * 2)
        tma_load(v_desc, [i * BLOCK_N, 0], v_full.index(place), v_tiles.index(place))


@gluon.jit
def _softmax(scores, first_key, keys, maximum, total, scale, BLOCK_N: gl.constexpr, EVEN: gl.constexpr):
    """The probabilities of a tile relative to the new maximum, the factor of what was before, and the new state."""
    if not EVEN:
        key = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(key[None, :] < keys, scores, float("-inf"))
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale)
    factor = gl.exp2(maximum - new_maximum)
    probs = gl.exp2(scores * scale - new_maximum[:, None])
    return probs, factor, new_maximum, total * factor + gl.sum(probs, 1)


@gluon.jit
def _consume(
    c: gl.constexpr, OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, first_row, tiles, rows, scale,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, LATE: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    of_scores: gl.constexpr = result_layout(BLOCK_N)
    of_out: gl.constexpr = result_layout(D)
    of_probs: gl.constexpr = gl.DotOperandLayout(0, of_out, 2)
    dtype: gl.constexpr = OUT.dtype.element_ty
    row_layout: gl.constexpr = gl.SliceLayout(1, of_scores)
    maximum = gl.full([64], float("-inf"), gl.float32, layout=row_layout)
    total = gl.full([64], 0.0, gl.float32, layout=row_layout)
    out = gl.zeros([64, D], gl.float32, layout=of_out)
    nothing = gl.zeros([64, BLOCK_N], gl.float32, layout=of_scores)
    q_tile = q_tiles.index(c)
    mbarrier.wait(q_full.index(c), 0)
    if LATE:
        mbarrier.wait(k_full.index(0), 0)
        scores = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_empty.index(0), count=1)
        probs, factor, maximum, total = _softmax(scores, 0, rows, maximum, total, scale, BLOCK_N, EVEN)
        operand = gl.convert_layout(probs.to(dtype), of_probs)
        for i in range(1, tiles):
            place = i % STAGES
            before = (i - 1) % STAGES
            mbarrier.wait(k_full.index(place), (i // STAGES) & 1)
            scores = warpgroup_mma(q_tile, k_tiles.index(place).permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
            out = warpgroup_mma(operand, v_tiles.index(before), out, is_async=True)
            scores = warpgroup_mma_wait(1, deps=(scores,))
            mbarrier.arrive(k_empty.index(place), count=1)
            probs, factor, maximum, total = _softmax(scores, i * BLOCK_N, rows, maximum, total, scale, BLOCK_N, EVEN)
            out = warpgroup_mma_wait(0, deps=(out,))
            mbarrier.arrive(v_empty.index(before), count=1)
            out = out * gl.convert_layout(factor, gl.SliceLayout(1, of_out))[:, None]
            operand = gl.convert_layout(probs.to(dtype), of_probs)
        last = (tiles - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((tiles - 1) // STAGES) & 1)
        out = warpgroup_mma(operand, v_tiles.index(last), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=(out,))
    else:
        for i in range(tiles):
            place = i % STAGES
            phase = (i // STAGES) & 1
            mbarrier.wait(k_full.index(place), phase)
            scores = warpgroup_mma(q_tile, k_tiles.index(place).permute((1, 0)), nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(k_empty.index(place), count=1)
            probs, factor, maximum, total = _softmax(scores, i * BLOCK_N, rows, maximum, total, scale, BLOCK_N, EVEN)
            out = out * gl.convert_layout(factor, gl.SliceLayout(1, of_out))[:, None]
            mbarrier.wait(v_full.index(place), phase)
            out = warpgroup_mma(gl.convert_layout(probs.to(dtype), of_probs), v_tiles.index(place), out, is_async=True)
            out = warpgroup_mma_wait(0, deps=(out,))
            mbarrier.arrive(v_empty.index(place), count=1)
    row = first_row + c * 64 + gl.arange(0, 64, layout=row_layout)
    gl.store(LSE + row, maximum + gl.log2(total), mask=row < rows)
    out = out / gl.convert_layout(total, gl.SliceLayout(1, of_out))[:, None]
    row = first_row + c * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, of_out))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, of_out))
    gl.store(OUT + row[:, None] * D + column[None, :], out.to(dtype), mask=(row < rows)[:, None])


@gluon.jit
def _forward(
    Q, K, V, OUT, LSE, rows, scale,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, LATE: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    dtype: gl.constexpr = Q.dtype.element_ty
    head = gl.program_id(1).to(gl.int64)
    first_row = gl.program_id(0) * (CONSUMERS * 64)
    tiles = (rows + BLOCK_N - 1) // BLOCK_N
    q_desc = tma.make_tensor_descriptor(Q + head * rows * D, [rows, D], [D, 1], [64, D], tile_layout)
    k_desc = tma.make_tensor_descriptor(K + head * rows * D, [rows, D], [D, 1], [BLOCK_N, D], tile_layout)
    v_desc = tma.make_tensor_descriptor(V + head * rows * D, [rows, D], [D, 1], [BLOCK_N, D], tile_layout)
    OUT += head * rows * D
    LSE += head * rows
    q_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, 64, D], tile_layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=CONSUMERS)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=CONSUMERS)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (0, OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, first_row, tiles, rows, scale, BLOCK_N, D, STAGES, LATE, EVEN)),
            (_consume, (1, OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, first_row, tiles, rows, scale, BLOCK_N, D, STAGES, LATE, EVEN)),
            (_produce, (q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, first_row, tiles, BLOCK_N, D, STAGES, CONSUMERS)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consume, (0, OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, first_row, tiles, rows, scale, BLOCK_N, D, STAGES, LATE, EVEN)),
            (_consume, (1, OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, first_row, tiles, rows, scale, BLOCK_N, D, STAGES, LATE, EVEN)),
            (_consume, (2, OUT, LSE, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, first_row, tiles, rows, scale, BLOCK_N, D, STAGES, LATE, EVEN)),
            (_produce, (q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, first_row, tiles, BLOCK_N, D, STAGES, CONSUMERS)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


def forward(
    query: Tensor, key: Tensor, value: Tensor, *, block_n: int = 128, stages: int = 2, consumers: int = 2, late: bool = True
) -> tuple[Tensor, Tensor]:
    """Softmax attention of contiguous tensors [B, H, S, D] in half precision, D 64 or 128, scaled by 1 / sqrt(D).

    Returns the output, and the logsumexp of each row in base 2, [B, H, S] in fp32.
    """
    allow_descriptors()
    batch, heads, rows, dim = query.shape
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    grid = -(-rows // (64 * consumers)), batch * heads
    scale = math.log2(math.e) / math.sqrt(dim)
    sizes = dict(BLOCK_N=block_n, D=dim, STAGES=stages, CONSUMERS=consumers, LATE=late, EVEN=rows % block_n == 0)
    _forward[grid](query, key, value, out, lse, rows, scale, **sizes, num_warps=4)
    return out, lse
