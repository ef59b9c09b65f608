"""The two parts of mLSTM that are quadratic in the length (mlstm/op.py has the formulas), as eager code in blocks of rows.

Compiled for a GPU they are the kernels of ``templates/mlstm/``. Compiled for a CPU they are loops over tiles that use the
functions of this file (``mlstm/cpu.py``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.fx import working_dtype


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
    norm: bool
    eps: float
    norm_eps: float
    scale: float


class BackwardOperands(NamedTuple):
    """The operands of ``mlstm_tiles_backward``, in the order of its signature."""

    query: Any
    key: Any
    value: Any
    grad: Any
    log_weight: Any
    log_row: Any
    term: Any
    max_index: Any
    through_max: Any
    scale: float
    has_max_term: bool


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


def _visible(rows: slice, device: torch.device) -> Tensor:
    """The columns that each row sees, of the columns up to the last row: bool [rows, columns]."""
    return torch.ones(rows.stop - rows.start, rows.stop, dtype=torch.bool, device=device).tril(rows.start)


def _blocks(length: int) -> list[slice]:
    return [slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]


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
    norm: bool,
    eps: float,
    norm_eps: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``C_ts = scale (q_t . k_s) exp(g_s - M_t)`` for s <= t, its row sums, h and its layer norm.

    query, key: [B, N, S, D], and value: [B, N, S, Dv]. log_weight (g) and log_max (M): [B, N, S] float64. floor: [B, N, S],
    the smallest value of the normaliser before eps is added. norm_weight, norm_bias: [N, Dv].

    Returns out [B, N, S, Dv], which is h itself unless ``norm``; the normalised h if weight or bias make it differ from out,
    else an empty tensor; and two numbers per row, [B, N, S] in fp32 (float64 for float64): sum_s C, and 1 / standard
    deviation of the norm (1 unless ``norm``).
    """
    kind = working_dtype(query.dtype)
    out, row_sum = rows_like(query, value.shape[-1]), query.new_empty(query.shape[:3], dtype=kind)
    affine = norm_weight is not None or norm_bias is not None
    normalised = torch.empty_like(out) if affine else out.new_empty(0)
    rstd = torch.empty_like(row_sum)
    for rows in _blocks(query.shape[2]):
        until = slice(0, rows.stop)
        q, k, v = (x.to(kind) for x in (query[:, :, rows], key[:, :, until], value[:, :, until]))
        visible = _visible(rows, query.device)
        combined = (q @ k.mT) * weights_of(log_weight[..., until], log_max[..., rows], visible, scale, kind)
        row_sum[:, :, rows] = combined.sum(-1)
        finished, plain, rstd[:, :, rows] = normalised_rows(
            combined @ v, row_sum[:, :, rows], floor[:, :, rows], norm_weight, norm_bias, norm, eps, norm_eps
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
    max_index: Tensor,
    through_max: Tensor,
    scale: float,
    has_max_term: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, and of log C summed over rows and over columns.

    With ``W_ts = scale exp(g_s - log_row_t)`` for s <= t and ``dP_ts = grad_t . v_s + term_t``, the gradient of the scores
    q . k is ``dS = W dP``, the gradient of log C is ``(q . k) dS``, and the gradient of value is ``(W (q . k))^T grad``.

    query, key [B, N, S, D], value and grad [B, N, S, Dv]; log_weight and log_row [B, N, S] float64; term and through_max
    [B, N, S]; max_index [B, N, S] int32, which never decreases along S. If ``has_max_term``, through_max_t is added to the
    sum of the column max_index_t <= t. Returns the three gradients in the layouts of ``rows_like``, then the row sums and
    the column sums [B, N, S] in fp32 (float64 for float64).
    """
    kind = working_dtype(query.dtype)
    batch, heads, length, _ = query.shape
    grads = [torch.zeros_like(x, dtype=kind) for x in (query, key, value)]
    of_rows = torch.zeros(batch, heads, length, dtype=kind, device=query.device)
    of_columns = torch.zeros_like(of_rows)
    for rows in _blocks(length):
        until = slice(0, rows.stop)
        q, e, k, v = (x.to(kind) for x in (query[:, :, rows], grad[:, :, rows], key[:, :, until], value[:, :, until]))
        weights = weights_of(log_weight[..., until], log_row[..., rows], _visible(rows, query.device), scale, kind)
        of_query, of_key, of_value, of_log = tile_gradients(q, k, v, e, weights, term[:, :, rows])
        grads[0][:, :, rows] = of_query
        grads[1][:, :, until] += of_key
        grads[2][:, :, until] += of_value
        of_rows[:, :, rows] = of_log.sum(-1)
        of_columns[:, :, until] += of_log.sum(-2)
    if has_max_term:
        of_columns.scatter_add_(-1, max_index.long(), through_max)
    widths = (query.shape[-1], query.shape[-1], value.shape[-1])
    rounded = [rows_like(query, width).copy_(x) for width, x in zip(widths, grads, strict=True)]
    return *rounded, of_rows, of_columns


@mlstm_tiles_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    widths = (query.shape[-1], query.shape[-1], value.shape[-1])
    row = query.new_empty(query.shape[:3], dtype=working_dtype(query.dtype))
    return *(rows_like(query, width) for width in widths), row, torch.empty_like(row)
