"""Prototype: attention's backward in one pass in plain Triton, without a mask or a score_mod, in several forms.

    program (keys, head): owns BLOCK_N keys
        for each tile of BLOCK_M queries:
            probsᵀ = exp2(K Qᵀ - logsumexp);  dV += probsᵀ dO
            dscoresᵀ = probsᵀ ∘ (V dOᵀ - delta);  dK += dscoresᵀ Q
            add dQ = dscores K of these keys in fp32 by TMA

"plain" is the loop of templates/attention/backward/key_program.jinja, so that a form can be timed before it is in the template:

    transposed   dQ is the transpose of Kᵀ dscoresᵀ, whose right operand is in shared memory, and not its left one
    late         dQ of a tile is added in the next iteration. Triton waits for a matmul where its result is used, so this matmul
                 may run while the next scores are issued: two waits in an iteration instead of three
    early        and the scores of the next tile are issued before the exponentials of this one: one wait
    no_dq        not a form, but shows what dQ costs

The numbers of waits are those of the PTX (Triton 3.7, sm_90). But ptxas serialises the matmuls of "late" and "early" (C7515, C7514),
because other instructions write or read registers of a result while a matmul is in flight.
On an H200 they lose, and "transposed" gains (docs/notes/attention.md).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gluon_backward import prepare


@triton.jit
def _rows(X, head, query, rows, D: tl.constexpr):
    tile = X + (head + query[:, None]) * D + tl.arange(0, D)[None, :]
    return tl.load(tile, mask=query[:, None] < rows, other=0.0)


@triton.jit
def _backward(
    Q, K, V, DO, DQ, DK, DV, START, DELTA, rows, scale_log2e, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * rows
    padded_head = tl.program_id(1).to(tl.int64) * tl.cdiv(rows, BLOCK_M) * BLOCK_M
    key = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_key = key[:, None] < rows
    k = _rows(K, head, key, rows, D)
    v = _rows(V, head, key, rows, D)
    dq_tiles = tl.make_tensor_descriptor(DQ + head * D, shape=[rows, D], strides=[D, 1], block_shape=[BLOCK_M, D])
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    scores = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if FORM == "early":
        scores = tl.dot(k, tl.trans(_rows(Q, head, tl.arange(0, BLOCK_M), rows, D)))
    for first in range(0, rows, BLOCK_M):
        query = first + tl.arange(0, BLOCK_M)
        q = _rows(Q, head, query, rows, D)
        do = _rows(DO, head, query, rows, D)
        start = tl.load(START + padded_head + query)
        delta = tl.load(DELTA + padded_head + query)
        if FORM == "early":
            dprobs = tl.dot(v, tl.trans(do))
            next_scores = tl.dot(k, tl.trans(_rows(Q, head, query + BLOCK_M, rows, D)))
        else:
            scores = tl.dot(k, tl.trans(q))
        if FORM == "late":
            # The first time this adds zeros to tile 0.
            dq_tiles.atomic_add([tl.maximum(first - BLOCK_M, 0), 0], dq)
        probs = tl.where(is_key, tl.exp2((scores + start[None, :]) * scale_log2e), 0.0)
        dv = tl.dot(probs.to(do.dtype), do, dv)
        if FORM != "early":
            dprobs = tl.dot(v, tl.trans(do))
        dscores = (probs * (dprobs - delta[None, :])).to(q.dtype)
        dk = tl.dot(dscores, q, dk)
        if FORM == "early":
            dq_tiles.atomic_add([tl.maximum(first - BLOCK_M, 0), 0], dq)
            scores = next_scores
        if FORM == "transposed":
            dq_tiles.atomic_add([first, 0], tl.trans(tl.dot(tl.trans(k), dscores)))
        elif FORM != "no_dq":
            dq = tl.dot(tl.trans(dscores), k)
        if FORM == "plain":
            dq_tiles.atomic_add([first, 0], dq)
    if FORM == "late" or FORM == "early":
        dq_tiles.atomic_add([(rows - 1) // BLOCK_M * BLOCK_M, 0], dq)
    tile = (head + key[:, None]) * D + tl.arange(0, D)[None, :]
    tl.store(DV + tile, dv.to(DV.dtype.element_ty), mask=is_key)
    tl.store(DK + tile, (dk * scale).to(DK.dtype.element_ty), mask=is_key)


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    *,
    form: str = "plain",
    block_m: int = 64,
    block_n: int = 128,
    num_warps: int = 8,
    num_stages: int = 2,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``gluon_forward.forward``, whose logsumexp is in base 2. All tensors are contiguous."""
    if query.is_cuda:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))
    batch, heads, rows, dim = query.shape
    dk, dv = torch.empty_like(key), torch.empty_like(value)
    scale = 1 / math.sqrt(dim)
    in_base_2 = scale * math.log2(math.e)
    start, delta, dq = prepare(query, out, lse, grad, in_base_2, block_m)
    _backward[(triton.cdiv(rows, block_n), batch * heads)](
        *(query, key, value, grad, dq, dk, dv, start, delta, rows, in_base_2, scale),
        **{"BLOCK_M": block_m, "BLOCK_N": block_n, "D": dim, "FORM": form, "num_warps": num_warps, "num_stages": num_stages},
    )
    return (dq * scale).to(query.dtype), dk, dv
