"""The two parts of mLSTM in which rows meet columns (mlstm/op.py has the formulas), as eager code in blocks of rows.

In the parallel form a row meets all columns before it. In the chunkwise form it meets those of its chunk, and the others
through a state (mlstm/chunks.py).

Compiled for a GPU they are the kernels of ``templates/mlstm/``. Compiled for a CPU they are loops over tiles that use the
functions of this file (``mlstm/cpu.py``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.fx import working_dtype
from .chunks import parts


class ForwardOperands(NamedTuple):
    """The operands of ``mlstm_tiles``, in the order of its signature."""

    query: Any
    key: Any
    value: Any
    log_weight: Any
    log_max: Any
    floor: Any
    norm_weight: Any
    norm_bias: Any
    before: Any
    reference: Any
    norm: bool
    eps: float
    norm_eps: float
    scale: float
    chunk: int


class BackwardOperands(NamedTuple):
    """The operands of ``mlstm_tiles_backward``, in the order of its signature."""

    query: Any
    key: Any
    value: Any
    grad: Any
    log_weight: Any
    log_row: Any
    term: Any
    before: Any
    after: Any
    reference: Any
    scale: float
    chunk: int


#: The number of rows in a block. The eager code needs O(BLOCK * S) memory per head.
BLOCK = 128


def rows_like(query: Tensor, width: int) -> Tensor:
    """An empty tensor [B, N, S, width]. Each position holds all its heads in memory if this is so in ``query``."""
    batch, heads, length, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty((batch, length, heads, width)).transpose(1, 2)
    return query.new_empty((batch, heads, length, width))


def weights_of(log_weight: Tensor, log_row: Tensor, visible: Tensor, scale: float, kind: torch.dtype) -> Tensor:
    """``scale exp(g_s - log_row_t)`` of a tile [B, N, rows, columns]. It is 0 where ``visible`` [rows, columns] is false."""
    exponents = log_weight[..., None, :] - log_row[..., None]
    return torch.where(visible, scale * torch.exp(exponents.to(kind)), 0)


def normalised_rows(
    hidden: Tensor,
    row_sum: Tensor,
    floor: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: bool,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, the normalised h and rstd of some rows.

    hidden: ``sum_s C v`` of the rows, [B, N, rows, Dv]. row_sum: ``sum_s C`` of the rows, [B, N, rows].
    """
    hidden = hidden / (torch.maximum(row_sum.abs(), floor) + eps)[..., None]
    rstd = torch.ones_like(row_sum)
    if norm:
        centred = hidden - hidden.mean(-1, keepdim=True)
        rstd = torch.rsqrt((centred * centred).mean(-1) + norm_eps)
        hidden = centred * rstd[..., None]
    out = hidden
    if norm_weight is not None:
        out = out * (1 + norm_weight.to(hidden.dtype)[:, None])
    if norm_bias is not None:
        out = out + norm_bias.to(hidden.dtype)[:, None]
    return out, hidden, rstd


def tile_gradients(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, weights: Tensor, term: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The terms that a tile adds to the gradients of query, key and value, and the tile of the gradient of log C."""
    scores = query @ key.mT
    grad_scores = weights * (grad @ value.mT + term[..., None])
    return grad_scores @ key, grad_scores.mT @ query, (weights * scores).mT @ grad, scores * grad_scores


def _visible(rows: slice, columns: slice, device: torch.device) -> Tensor:
    """The columns that each row sees: bool [rows, columns]."""
    return torch.ones(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.bool, device=device).tril(
        rows.start - columns.start
    )


def _blocks(length: int, chunk: int) -> list[tuple[slice, slice]]:
    """The blocks of rows, which are the chunks if there are any, and the columns that each of them meets in a tile."""
    size = chunk or BLOCK
    rows = [slice(start, min(start + size, length)) for start in range(0, length, size)]
    return [(x, slice(x.start if chunk else 0, x.stop)) for x in rows]


@torch.library.custom_op("gradfuse::mlstm_tiles", mutates_args=())
def mlstm_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor,
    log_max: Tensor,
    floor: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    before: Tensor | None,
    reference: Tensor | None,
    norm: bool,
    eps: float,
    norm_eps: float,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``C_ts = scale (q_t . k_s) exp(g_s - M_t)`` for s <= t, its row sums, h and its layer norm.

    query, key: [B, N, S, D], and value: [B, N, S, Dv]. log_weight (g) and log_max (M): [B, N, S] float64. floor: [B, N, S],
    the smallest value of the normaliser before eps is added. norm_weight, norm_bias: [N, Dv]. chunk: the number of positions
    in a chunk, or 0 for the parallel form; before and reference are then None, and else as in mlstm/chunks.py.

    Returns out [B, N, S, Dv], which is h itself unless ``norm``; the normalised h if weight or bias make it differ from out,
    else an empty tensor; and two numbers per row, [B, N, S] in fp32 (float64 for float64): sum_s C, and 1 / standard
    deviation of the norm (1 unless ``norm``).
    """
    kind = working_dtype(query.dtype)
    out, row_sum = rows_like(query, value.shape[-1]), query.new_empty(query.shape[:3], dtype=kind)
    affine = norm_weight is not None or norm_bias is not None
    normalised = torch.empty_like(out) if affine else out.new_empty(0)
    rstd = torch.empty_like(row_sum)
    for i, (rows, columns) in enumerate(_blocks(query.shape[2], chunk)):
        q, k, v = (x.to(kind) for x in (query[:, :, rows], key[:, :, columns], value[:, :, columns]))
        visible = _visible(rows, columns, query.device)
        combined = (q @ k.mT) * weights_of(log_weight[..., columns], log_max[..., rows], visible, scale, kind)
        hidden, sums = combined @ v, combined.sum(-1)
        if before is not None and reference is not None:
            matrix, vector = parts(before[:, :, i], value.shape[-1])
            weights = scale * torch.exp(reference[..., i, None] - log_max[..., rows]).to(kind)
            hidden = hidden + weights[..., None] * (q @ matrix)
            sums = sums + weights * (q @ vector[..., None])[..., 0]
        row_sum[:, :, rows] = sums
        finished, plain, rstd[:, :, rows] = normalised_rows(
            hidden, sums, floor[:, :, rows], norm_weight, norm_bias, norm, eps, norm_eps
        )
        out[:, :, rows] = finished.to(out.dtype)
        if affine:
            normalised[:, :, rows] = plain.to(out.dtype)
    return out, normalised, row_sum, rstd


@mlstm_tiles.register_fake
def _(*operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = ForwardOperands(*operands)
    out = rows_like(given.query, given.value.shape[-1])
    affine = given.norm_weight is not None or given.norm_bias is not None
    normalised = torch.empty_like(out) if affine else out.new_empty(0)
    row = given.query.new_empty(given.query.shape[:3], dtype=working_dtype(given.query.dtype))
    return out, normalised, row, torch.empty_like(row)


@torch.library.custom_op("gradfuse::mlstm_tiles_backward", mutates_args=())
def mlstm_tiles_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    log_weight: Tensor,
    log_row: Tensor,
    term: Tensor,
    before: Tensor | None,
    after: Tensor | None,
    reference: Tensor | None,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, and of log C summed over rows and over columns.

    With ``W_ts = scale exp(g_s - log_row_t)`` for s <= t and ``dP_ts = grad_t . v_s + term_t``, the gradient of the scores
    q . k is ``dS = W dP``, the gradient of log C is ``(q . k) dS``, and the gradient of value is ``(W (q . k))^T grad``.

    query, key [B, N, S, D], value and grad [B, N, S, Dv]; log_weight and log_row [B, N, S] float64; term [B, N, S]. chunk:
    as in ``mlstm_tiles``. Returns the three gradients in the layouts of ``rows_like``, and three sums of the gradient of
    log C, [B, N, S] in fp32 (float64 for float64): over all columns of each row; over the rows of each column that are in
    its chunk; and over those in later chunks (empty in the parallel form).
    """
    kind = working_dtype(query.dtype)
    grads = [torch.zeros_like(x, dtype=kind) for x in (query, key, value)]
    of_rows, of_columns, of_later = (torch.zeros(query.shape[:3], dtype=kind, device=query.device) for _ in range(3))
    for i, (rows, columns) in enumerate(_blocks(query.shape[2], chunk)):
        q, e, k, v = (x.to(kind) for x in (query[:, :, rows], grad[:, :, rows], key[:, :, columns], value[:, :, columns]))
        visible = _visible(rows, columns, query.device)
        weights = weights_of(log_weight[..., columns], log_row[..., rows], visible, scale, kind)
        of_query, of_key, of_value, of_log = tile_gradients(q, k, v, e, weights, term[:, :, rows])
        grads[0][:, :, rows] = of_query
        grads[1][:, :, columns] += of_key
        grads[2][:, :, columns] += of_value
        of_rows[:, :, rows] = of_log.sum(-1)
        of_columns[:, :, columns] += of_log.sum(-2)
        if before is not None and after is not None and reference is not None:
            matrix, vector = parts(before[:, :, i], value.shape[-1])
            weights = scale * torch.exp(reference[..., i, None] - log_row[..., rows]).to(kind)
            of_query = weights[..., None] * (e @ matrix.mT + term[:, :, rows, None] * vector[..., None, :])
            grads[0][:, :, rows] += of_query
            of_rows[:, :, rows] += (q * of_query).sum(-1)
            matrix, vector = parts(after[:, :, i], value.shape[-1])
            weights = scale * torch.exp(log_weight[..., columns] - reference[..., i + 1, None]).to(kind)
            of_key = weights[..., None] * (v @ matrix.mT + vector[..., None, :])
            grads[1][:, :, columns] += of_key
            grads[2][:, :, columns] += weights[..., None] * (k @ matrix)
            of_later[:, :, columns] = (k * of_key).sum(-1)
    widths = (query.shape[-1], query.shape[-1], value.shape[-1])
    rounded = [rows_like(query, width).copy_(x) for width, x in zip(widths, grads, strict=True)]
    return *rounded, of_rows, of_columns, of_later if chunk else of_later.new_empty(0)


@mlstm_tiles_backward.register_fake
def _(*operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = BackwardOperands(*operands)
    query, width = given.query, given.query.shape[-1]
    row = query.new_empty(query.shape[:3], dtype=working_dtype(query.dtype))
    later = torch.empty_like(row) if given.chunk else row.new_empty(0)
    rows = (row, torch.empty_like(row), later)
    return *(rows_like(query, n) for n in (width, width, given.value.shape[-1])), *rows
