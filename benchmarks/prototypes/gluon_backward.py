"""Prototype: attention's backward on Hopper, in Gluon, without a mask or a score_mod.

    program (keys, head): owns 128 keys
        producer (one warp): for each tile of queries: load Q and dO by TMA, as soon as their buffers are free
        two consumers (a warpgroup each, 64 keys): for each tile of queries:
            issue scoresᵀ = K Qᵀ, which begins with -logsumexp, and dprobsᵀ = V dOᵀ
            probsᵀ = exp2(scoresᵀ); issue dV += probsᵀ dO
            dscoresᵀ = probsᵀ ∘ (dprobsᵀ - delta); issue dK += dscoresᵀ Q; store dscoresᵀ to shared memory
            wait for the other consumer's dscoresᵀ; half of dQ = dscores K, added in fp32 by TMA

The scores are transposed, so that probsᵀ and dscoresᵀ are already the left operands of dV and dK in registers. The structure is
that of FlashAttention-3's backward. A consumer's half of dQ is half of its columns, or half of its rows if a tile has 128 queries.

    LATE   dQ of a tile is made in the next iteration, beside the next scores
    ADD    false is not a form: nothing is added to dQ, which shows what that costs
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

from .hopper import allow_descriptors, result_layout, tma_add, tma_load, tma_store


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
def _dq(c: gl.constexpr, ds_tiles, k_tiles, buffer, BLOCK_M: gl.constexpr, D: gl.constexpr):
    """Issue the matmuls of this consumer's half of dQ, one for the keys of each consumer."""
    BY_ROWS: gl.constexpr = BLOCK_M == 128
    COLUMNS: gl.constexpr = D if BY_ROWS else D // 2
    dq = gl.zeros([64, COLUMNS], gl.float32, layout=result_layout(COLUMNS))
    for half in gl.static_range(2):
        ds = ds_tiles.index(buffer * 2 + half)
        k = k_tiles.index(half)
        if BY_ROWS:
            ds = ds.slice(c * 64, 64, dim=1)
        else:
            k = k.slice(c * COLUMNS, COLUMNS, dim=1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def _add(c: gl.constexpr, dq_desc, dq, dq_tile, row, BLOCK_M: gl.constexpr, D: gl.constexpr, ADD: gl.constexpr):
    """Add this consumer's half of dQ to memory by TMA."""
    tma.store_wait(0)
    dq_tile.store(dq)
    fence_async_shared()
    if ADD:
        if BLOCK_M == 128:
            tma_add(dq_desc, [row + c * 64, 0], dq_tile)
        else:
            tma_add(dq_desc, [row, c * (D // 2)], dq_tile)


@gluon.jit
def _write(grad, desc, tile, first):
    """Write the gradient of 64 keys by TMA, through shared memory that only this consumer uses."""
    tma.store_wait(0)
    tile.store(grad.to(tile.dtype))
    fence_async_shared()
    tma_store(desc, [first, 0], tile)
    tma.store_wait(0)


@gluon.jit
def _consume(
    c: gl.constexpr, dq_desc, dk_desc, dv_desc, START, DELTA, k_tiles, v_tiles, q_tiles, do_tiles, ds_tiles, dq_tiles, kv_full,
    q_full, do_full, empty, ds_full, first_key, tiles, rows, scale,
    BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, LATE: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    of_scores: gl.constexpr = result_layout(BLOCK_M)
    of_grads: gl.constexpr = result_layout(D)
    operand: gl.constexpr = gl.DotOperandLayout(0, of_grads, 2)
    dtype: gl.constexpr = k_tiles.dtype
    k_tile = k_tiles.index(c)
    v_tile = v_tiles.index(c)
    dq_tile = dq_tiles.index(c)
    nothing = gl.zeros([64, BLOCK_M], gl.float32, layout=of_scores)
    dk = gl.zeros([64, D], gl.float32, layout=of_grads)
    dv = gl.zeros([64, D], gl.float32, layout=of_grads)
    if LATE:
        # The first iteration adds these zeros to the first tile of dQ.
        ds_tiles.index(2 + c).store(nothing.to(dtype))
        fence_async_shared()
        mbarrier.arrive(ds_full.index(1), count=1)
    mbarrier.wait(kv_full, 0)
    for i in range(tiles):
        place = i % STAGES
        phase = (i // STAGES) & 1
        buffer = i % 2
        q_tile = q_tiles.index(place)
        do_tile = do_tiles.index(place)
        row = i * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, of_scores))
        start = nothing + gl.load(START + row)[None, :]
        mbarrier.wait(q_full.index(place), phase)
        scores = warpgroup_mma(k_tile, q_tile.permute((1, 0)), start, is_async=True)
        if BLOCK_M < 128:
            delta = gl.load(DELTA + row)
        mbarrier.wait(do_full.index(place), phase)
        dprobs = warpgroup_mma(v_tile, do_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        if LATE:
            mbarrier.wait(ds_full.index(1 - buffer), (i // 2) & 1)
            dq = _dq(c, ds_tiles, k_tiles, 1 - buffer, BLOCK_M, D)
            scores = warpgroup_mma_wait(3, deps=(scores,))
        else:
            scores = warpgroup_mma_wait(1, deps=(scores,))
        probs = gl.exp2(scores * scale)
        if BLOCK_M == 128:
            # Earlier it would need registers that such a tile does not have.
            delta = gl.load(DELTA + row)
        dv = warpgroup_mma(gl.convert_layout(probs.to(dtype), operand), do_tile, dv, is_async=True)
        if LATE:
            dprobs, dq = warpgroup_mma_wait(1, deps=(dprobs, dq))
        else:
            dprobs = warpgroup_mma_wait(1, deps=(dprobs,))
        dscores = (probs * (dprobs - delta[None, :])).to(dtype)
        dk = warpgroup_mma(gl.convert_layout(dscores, operand), q_tile, dk, is_async=True)
        if LATE:
            _add(c, dq_desc, dq, dq_tile, gl.maximum(i - 1, 0) * BLOCK_M, BLOCK_M, D, ADD)
        ds_tiles.index(buffer * 2 + c).store(dscores)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(buffer), count=1)
        dv = warpgroup_mma_wait(1, deps=(dv,))
        if LATE:
            dk = warpgroup_mma_wait(0, deps=(dk,))
            mbarrier.arrive(empty.index(place), count=1)
        else:
            mbarrier.wait(ds_full.index(buffer), (i // 2) & 1)
            dq = _dq(c, ds_tiles, k_tiles, buffer, BLOCK_M, D)
            dk = warpgroup_mma_wait(2, deps=(dk,))
            mbarrier.arrive(empty.index(place), count=1)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            _add(c, dq_desc, dq, dq_tile, i * BLOCK_M, BLOCK_M, D, ADD)
    if LATE:
        last = tiles - 1
        mbarrier.wait(ds_full.index(last % 2), (tiles // 2) & 1)
        dq = warpgroup_mma_wait(0, deps=(_dq(c, ds_tiles, k_tiles, last % 2, BLOCK_M, D),))
        _add(c, dq_desc, dq, dq_tile, last * BLOCK_M, BLOCK_M, D, ADD)
    _write(dv, dv_desc, v_tile, first_key + c * 64)
    _write(dk * scale * 0.6931471805599453, dk_desc, v_tile, first_key + c * 64)


@gluon.jit
def _backward(
    Q, K, V, DO, DQ, DK, DV, START, DELTA, rows, scale,
    BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, LATE: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    dq_layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    dtype: gl.constexpr = Q.dtype.element_ty
    DQ_COLUMNS: gl.constexpr = D if BLOCK_M == 128 else D // 2
    head = gl.program_id(1).to(gl.int64)
    first_key = gl.program_id(0) * 128
    tiles = (rows + BLOCK_M - 1) // BLOCK_M
    before = head * rows * D
    q_desc = tma.make_tensor_descriptor(Q + before, [rows, D], [D, 1], [BLOCK_M, D], tile_layout)
    do_desc = tma.make_tensor_descriptor(DO + before, [rows, D], [D, 1], [BLOCK_M, D], tile_layout)
    k_desc = tma.make_tensor_descriptor(K + before, [rows, D], [D, 1], [64, D], tile_layout)
    v_desc = tma.make_tensor_descriptor(V + before, [rows, D], [D, 1], [64, D], tile_layout)
    dq_desc = tma.make_tensor_descriptor(DQ + before, [rows, D], [D, 1], [64, DQ_COLUMNS], dq_layout)
    dk_desc = tma.make_tensor_descriptor(DK + before, [rows, D], [D, 1], [64, D], tile_layout)
    dv_desc = tma.make_tensor_descriptor(DV + before, [rows, D], [D, 1], [64, D], tile_layout)
    START += head * tiles * BLOCK_M
    DELTA += head * tiles * BLOCK_M
    k_tiles = gl.allocate_shared_memory(dtype, [2, 64, D], tile_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, 64, D], tile_layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], tile_layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], tile_layout)
    ds_tiles = gl.allocate_shared_memory(dtype, [4, 64, BLOCK_M], tile_layout)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 64, DQ_COLUMNS], dq_layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(q_full.index(s), count=1)
        mbarrier.init(do_full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    for s in gl.static_range(2):
        mbarrier.init(ds_full.index(s), count=2)
    mbarrier.expect(kv_full, 4 * 64 * D * 2)
    for c in gl.static_range(2):
        tma_load(k_desc, [first_key + c * 64, 0], kv_full, k_tiles.index(c))
        tma_load(v_desc, [first_key + c * 64, 0], kv_full, v_tiles.index(c))
    gl.warp_specialize([
        (_consume, (0, dq_desc, dk_desc, dv_desc, START, DELTA, k_tiles, v_tiles, q_tiles, do_tiles, ds_tiles, dq_tiles, kv_full, q_full, do_full, empty, ds_full, first_key, tiles, rows, scale, BLOCK_M, D, STAGES, LATE, ADD)),
        (_consume, (1, dq_desc, dk_desc, dv_desc, START, DELTA, k_tiles, v_tiles, q_tiles, do_tiles, ds_tiles, dq_tiles, kv_full, q_full, do_full, empty, ds_full, first_key, tiles, rows, scale, BLOCK_M, D, STAGES, LATE, ADD)),
        (_produce, (q_desc, do_desc, q_tiles, do_tiles, q_full, do_full, empty, tiles, BLOCK_M, D, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip


@triton.jit
def _prepare(OUT, DO, LSE, START, DELTA, DQ, rows, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tile * BLOCK + tl.arange(0, BLOCK)
    place = (head * rows + row)[:, None] * D + tl.arange(0, D)[None, :]
    inside = (row < rows)[:, None]
    out, grad = tl.load(OUT + place, mask=inside, other=0.0), tl.load(DO + place, mask=inside, other=0.0)
    lse = tl.load(LSE + head * rows + row, mask=row < rows, other=float("inf"))
    padded = head * tl.num_programs(0) * BLOCK + row
    tl.store(START + padded, -lse / scale)
    tl.store(DELTA + padded, tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1))
    tl.store(DQ + place, tl.zeros([BLOCK, D], tl.float32), mask=inside)


@triton.jit
def _round(DQ, OUT, scale, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dq = tl.load(DQ + place, mask=place < count, other=0.0)
    tl.store(OUT + place, (dq * scale).to(OUT.dtype.element_ty), mask=place < count)


def prepare(
    query: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What a backward reads for each row, [batch * heads, rows in whole tiles of ``block``], and zeros for dQ in fp32.

    The first is what scores begin with, -logsumexp / scale, and -inf behind the last row: Q and dO are zero there, but
    a logsumexp of another head could make probabilities infinite. The second is delta, the inner product of output and gradient.
    ``lse`` is in base 2, and ``scale`` has a factor of log2(e).
    """
    batch, heads, rows, dim = query.shape
    tiles = -(-rows // block)
    start, delta = (torch.empty(batch * heads, tiles * block, device=query.device) for _ in range(2))
    dq = torch.empty_like(query, dtype=torch.float32)
    _prepare[(tiles, batch * heads)](out, grad, lse, start, delta, dq, rows, scale, D=dim, BLOCK=block)
    return start, delta, dq


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
    late: bool = False,
    add: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``gluon_forward.forward``. grad is that of the output, contiguous as all other tensors."""
    allow_descriptors()
    batch, heads, rows, dim = query.shape
    scale, count = 1 / math.sqrt(dim), query.numel()
    in_base_2 = scale * math.log2(math.e)
    start, delta, dq_sums = prepare(query, out, lse, grad, in_base_2, block_m)
    dq, dk, dv = (torch.empty_like(query) for _ in range(3))
    arguments = query, key, value, grad, dq_sums, dk, dv, start, delta, rows, in_base_2
    sizes = dict(BLOCK_M=block_m, D=dim, STAGES=stages, LATE=late, ADD=add)
    _backward[(-(-rows // 128), batch * heads)](*arguments, **sizes, num_warps=4)
    _round[(-(-count // 2048),)](dq_sums, dq, scale, count, BLOCK=2048)
    return dq, dk, dv
