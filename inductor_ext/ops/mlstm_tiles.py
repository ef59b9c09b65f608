"""The two parts of mLSTM that are quadratic in the length (ops/mlstm.py has the formulas), eager: in blocks of rows.

Compiled for a GPU they are the kernels of ``templates/mlstm_forward.py.jinja`` and ``templates/mlstm_backward.py.jinja``.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Rows of a block: eager memory is O(BLOCK * S) a head.
BLOCK = 128


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of numbers a row: fp32, float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def rows_like(query: Tensor, width: int) -> Tensor:
    """An empty tensor [B, N, S, width] with heads inside of positions in memory where ``query`` has them so."""
    batch, heads, length, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty((batch, length, heads, width)).transpose(1, 2)
    return query.new_empty((batch, heads, length, width))


def _weights(log_weight: Tensor, log_row: Tensor, rows: slice, scale: float, kind: torch.dtype) -> Tensor:
    """``scale exp(g_s - log_row_t)`` for a block of rows t, 0 where s > t."""
    exponents = log_weight[..., None, : rows.stop] - log_row[..., rows, None]
    causal = torch.ones(exponents.shape[-2:], dtype=torch.bool, device=exponents.device).tril(rows.start)
    return torch.where(causal, scale * torch.exp(exponents.to(kind)), 0)


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

    query, key [B, N, S, D], value [B, N, S, Dv]; log_weight g and log_max M [B, N, S] float64; floor [B, N, S], the least
    value of the normaliser before eps is added; norm_weight, norm_bias [N, Dv]. Returns out [B, N, S, Dv] (h itself unless
    ``norm``), the normalised h if weight or bias make it differ from out (else empty), and two numbers a row [B, N, S]
    in fp32 (float64 for float64): sum_s C, and the norm's 1 / standard deviation (1 unless ``norm``).
    """
    kind = wide(query.dtype)
    out, row_sum = rows_like(query, value.shape[-1]), query.new_empty(query.shape[:3], dtype=kind)
    affine = norm_weight is not None or norm_bias is not None
    normalised = torch.empty_like(out) if affine else out.new_empty(0)
    rstd = torch.ones_like(row_sum)
    for rows in _blocks(query.shape[2]):
        scores = query[:, :, rows].to(kind) @ key[:, :, : rows.stop].to(kind).mT
        combined = scores * _weights(log_weight, log_max, rows, scale, kind)
        row_sum[:, :, rows] = combined.sum(-1)
        normaliser = torch.maximum(row_sum[:, :, rows].abs(), floor[:, :, rows]) + eps
        hidden = combined @ value[:, :, : rows.stop].to(kind) / normaliser[..., None]
        if norm:
            centred = hidden - hidden.mean(-1, keepdim=True)
            rstd[:, :, rows] = torch.rsqrt((centred * centred).mean(-1) + norm_eps)
            hidden = centred * rstd[:, :, rows, None]
        if affine:
            normalised[:, :, rows] = hidden.to(out.dtype)
        if norm_weight is not None:
            hidden = hidden * (1 + norm_weight.to(kind)[:, None])
        if norm_bias is not None:
            hidden = hidden + norm_bias.to(kind)[:, None]
        out[:, :, rows] = hidden.to(out.dtype)
    return out, normalised, row_sum, rstd


@mlstm_tiles.register_fake
def _(
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
    out = rows_like(query, value.shape[-1])
    affine = norm_weight is not None or norm_bias is not None
    normalised = torch.empty_like(out) if affine else out.new_empty(0)
    row = query.new_empty(query.shape[:3], dtype=wide(query.dtype))
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
    place: Tensor,
    through_max: Tensor,
    scale: float,
    has_max_term: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, and of log C summed over rows and over columns.

    With ``W_ts = scale exp(g_s - log_row_t)`` for s <= t and ``dP_ts = grad_t . v_s + term_t``: the gradient of the scores
    q . k is ``dS = W dP``, that of log C is ``(q . k) dS``, and value's is ``(W (q . k))^T grad``. grad [B, N, S, Dv];
    log_row float64, term and through_max [B, N, S]; if ``has_max_term``, through_max_t is added to the column place_t <= t
    ([B, N, S] int32, never decreasing). Returns three tensors in the layouts of ``rows_like``, then the row sums and the
    column sums [B, N, S] in fp32 (float64 for float64).
    """
    kind = wide(query.dtype)
    batch, heads, length, _ = query.shape
    grads = [torch.zeros_like(x, dtype=kind) for x in (query, key, value)]
    of_rows = torch.zeros(batch, heads, length, dtype=kind, device=query.device)
    of_columns = torch.zeros_like(of_rows)
    for rows in _blocks(length):
        until = slice(0, rows.stop)
        q, e, k, v = (x.to(kind) for x in (query[:, :, rows], grad[:, :, rows], key[:, :, until], value[:, :, until]))
        scores = q @ k.mT
        weights = _weights(log_weight, log_row, rows, scale, kind)
        grad_scores = weights * (e @ v.mT + term[:, :, rows, None])
        grads[0][:, :, rows] = grad_scores @ k
        grads[1][:, :, until] += grad_scores.mT @ q
        grads[2][:, :, until] += (weights * scores).mT @ e
        of_rows[:, :, rows] = (scores * grad_scores).sum(-1)
        of_columns[:, :, until] += (scores * grad_scores).sum(-2)
    if has_max_term:
        of_columns.scatter_add_(-1, place.long(), through_max)
    widths = (query.shape[-1], query.shape[-1], value.shape[-1])
    rounded = [rows_like(query, width).copy_(x) for width, x in zip(widths, grads, strict=True)]
    return *rounded, of_rows, of_columns


@mlstm_tiles_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    widths = (query.shape[-1], query.shape[-1], value.shape[-1])
    row = query.new_empty(query.shape[:3], dtype=wide(query.dtype))
    return *(rows_like(query, width) for width in widths), row, torch.empty_like(row)
