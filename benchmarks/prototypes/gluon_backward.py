"""Prototype: attention's backward on Hopper, in Gluon, without a mask or a score_mod.

    program (keys, head): owns 128 keys
        producer (one warp): for each tile of queries: load Q and dO by TMA, as soon as their buffers are free
        two consumers (a warpgroup each, 64 keys): for each tile of queries:
            issue scoresᵀ = K Qᵀ and dprobsᵀ = V dOᵀ
            probsᵀ = exp2(scoresᵀ - logsumexp); issue dV += probsᵀ dO
            dscoresᵀ = probsᵀ ∘ (dprobsᵀ - delta); issue dK += dscoresᵀ Q; store dscoresᵀ to shared memory
            dQ of these keys = dscores K, added in fp32 by TMA (in HALVES of the head dim, for fewer registers)

The scores are transposed, so that probsᵀ and dscoresᵀ are already the left operands of dV and dK in registers. The structure is
that of FlashAttention-3's backward; each consumer adds a dQ of its own, so that they do not wait for each other.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper import allow_descriptors, result_layout, tma_add, tma_load


@gluon.jit
def _produce(
    q_desc, do_desc, q_tiles, do_tiles, q_full, do_full, empty, tiles, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    for i in range(tiles):
        place = i % STAGES
        mbarrier.wait(empty.index(place), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(q_full.index(place), BLOCK_M * D * 2)
        tma_load(q_desc, [i * BLOCK_M, 0], q_full.index(place), q_tiles.index(place))
        mbarrier.expect(do_full.index(place), BLOCK_M * D * 2)
        tma_load(do_desc, [i * BLOCK_M, 0], do_full.index(place), do_tiles.index(place))


@gluon.jit
def _consume(
    c: gl.constexpr, dq_desc, DK, DV, LSE, DELTA, k_tiles, v_tiles, q_tiles, do_tiles, ds_tiles, dq_tiles, kv_full, q_full, do_full,
    empty, first_key, tiles, rows, scale,
    BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    of_scores: gl.constexpr = result_layout(BLOCK_M)
    of_grads: gl.constexpr = result_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(0, of_grads, 2)
    dtype: gl.constexpr = DK.dtype.element_ty
    k_tile = k_tiles.index(c)
    v_tile = v_tiles.index(c)
    ds_tile = ds_tiles.index(c)
    dq_tile = dq_tiles.index(c)
    nothing = gl.zeros([64, BLOCK_M], gl.float32, layout=of_scores)
    dk = gl.zeros([64, D], gl.float32, layout=of_grads)
    dv = gl.zeros([64, D], gl.float32, layout=of_grads)
    mbarrier.wait(kv_full, 0)
    for i in range(tiles):
        place = i % STAGES
        phase = (i // STAGES) & 1
        q_tile = q_tiles.index(place)
        do_tile = do_tiles.index(place)
        row = i * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, of_scores))
        mbarrier.wait(q_full.index(place), phase)
        scores = warpgroup_mma(k_tile, q_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        lse = gl.load(LSE + row, mask=row < rows, other=float("inf"))
        delta = gl.load(DELTA + row, mask=row < rows, other=0.0)
        mbarrier.wait(do_full.index(place), phase)
        dprobs = warpgroup_mma(v_tile, do_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        probs = gl.exp2(scores * scale - lse[None, :])
        dv = warpgroup_mma(gl.convert_layout(probs.to(dtype), operand), do_tile, dv, is_async=True)
        dprobs = warpgroup_mma_wait(1, deps=(dprobs,))
        dscores = (probs * (dprobs - delta[None, :])).to(dtype)
        dk = warpgroup_mma(gl.convert_layout(dscores, operand), q_tile, dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=(dv,))
        ds_tile.store(dscores)
        fence_async_shared()
        WIDTH: gl.constexpr = D // HALVES
        for half in gl.static_range(HALVES):
            dq = warpgroup_mma(
                ds_tile.permute((1, 0)),
                k_tile.slice(half * WIDTH, WIDTH, dim=1),
                gl.zeros([BLOCK_M, WIDTH], gl.float32, layout=result_layout(WIDTH)),
                use_acc=False,
                is_async=True,
            )
            if half == 0:
                dk = warpgroup_mma_wait(1, deps=(dk,))
                mbarrier.arrive(empty.index(place), count=1)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            if half == 0:
                tma.store_wait(0)
            dq_tile.slice(half * WIDTH, WIDTH, dim=1).store(dq)
        fence_async_shared()
        tma_add(dq_desc, [i * BLOCK_M, 0], dq_tile)
    tma.store_wait(0)
    key = first_key + c * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, of_grads))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, of_grads))
    place = key[:, None] * D + column[None, :]
    inside = (key < rows)[:, None]
    gl.store(DK + place, (dk * scale * 0.6931471805599453).to(dtype), mask=inside)
    gl.store(DV + place, dv.to(dtype), mask=inside)


@gluon.jit
def _backward(
    Q, K, V, DO, DQ, DK, DV, LSE, DELTA, rows, scale,
    BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    dq_layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    dtype: gl.constexpr = Q.dtype.element_ty
    head = gl.program_id(1).to(gl.int64)
    first_key = gl.program_id(0) * 128
    tiles = (rows + BLOCK_M - 1) // BLOCK_M
    before = head * rows * D
    q_desc = tma.make_tensor_descriptor(Q + before, [rows, D], [D, 1], [BLOCK_M, D], tile_layout)
    do_desc = tma.make_tensor_descriptor(DO + before, [rows, D], [D, 1], [BLOCK_M, D], tile_layout)
    k_desc = tma.make_tensor_descriptor(K + before, [rows, D], [D, 1], [64, D], tile_layout)
    v_desc = tma.make_tensor_descriptor(V + before, [rows, D], [D, 1], [64, D], tile_layout)
    dq_desc = tma.make_tensor_descriptor(DQ + before, [rows, D], [D, 1], [BLOCK_M, D], dq_layout)
    DK += before
    DV += before
    LSE += head * rows
    DELTA += head * rows
    k_tiles = gl.allocate_shared_memory(dtype, [2, 64, D], tile_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, 64, D], tile_layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], tile_layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], tile_layout)
    ds_tiles = gl.allocate_shared_memory(dtype, [2, 64, BLOCK_M], tile_layout)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, D], dq_layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(do_full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    mbarrier.expect(kv_full, 4 * 64 * D * 2)
    for c in gl.static_range(2):
        tma_load(k_desc, [first_key + c * 64, 0], kv_full, k_tiles.index(c))
        tma_load(v_desc, [first_key + c * 64, 0], kv_full, v_tiles.index(c))
    gl.warp_specialize([
        (_consume, (0, dq_desc, DK, DV, LSE, DELTA, k_tiles, v_tiles, q_tiles, do_tiles, ds_tiles, dq_tiles, kv_full, q_full, do_full, empty, first_key, tiles, rows, scale, BLOCK_M, D, STAGES, HALVES)),
        (_consume, (1, dq_desc, DK, DV, LSE, DELTA, k_tiles, v_tiles, q_tiles, do_tiles, ds_tiles, dq_tiles, kv_full, q_full, do_full, empty, first_key, tiles, rows, scale, BLOCK_M, D, STAGES, HALVES)),
        (_produce, (q_desc, do_desc, q_tiles, do_tiles, q_full, do_full, empty, tiles, BLOCK_M, D, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


@triton.jit
def prepare(OUT, DO, DELTA, DQ, count, D: tl.constexpr, BLOCK: tl.constexpr):
    """delta, the inner product of a row of the output and of its gradient, and zeros for dQ."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = row[:, None] * D + tl.arange(0, D)[None, :]
    inside = (row < count)[:, None]
    out, grad = tl.load(OUT + place, mask=inside, other=0.0), tl.load(DO + place, mask=inside, other=0.0)
    tl.store(DELTA + row, tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1), mask=row < count)
    tl.store(DQ + place, tl.zeros([BLOCK, D], tl.float32), mask=inside)


@triton.jit
def _round(DQ, OUT, scale, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dq = tl.load(DQ + place, mask=place < count, other=0.0)
    tl.store(OUT + place, (dq * scale).to(OUT.dtype.element_ty), mask=place < count)


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    *,
    block_m: int = 64,
    stages: int = 2,
    halves: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``gluon_forward.forward``. grad is that of the output, contiguous as all other tensors."""
    allow_descriptors()
    batch, heads, rows, dim = query.shape
    delta, dq_sums = torch.empty_like(lse), torch.empty_like(query, dtype=torch.float32)
    dq, dk, dv = (torch.empty_like(query) for _ in range(3))
    count = batch * heads * rows
    prepare[(-(-count // 64),)](out, grad, delta, dq_sums, count, D=dim, BLOCK=64)
    scale = 1 / math.sqrt(dim)
    arguments = query, key, value, grad, dq_sums, dk, dv, lse, delta, rows, scale * math.log2(math.e)
    sizes = dict(BLOCK_M=block_m, D=dim, STAGES=stages, HALVES=halves)
    _backward[(-(-rows // 128), batch * heads)](*arguments, **sizes, num_warps=4)
    _round[(-(-count * dim // 2048),)](dq_sums, dq, scale, count * dim, BLOCK=2048)
    return dq, dk, dv
