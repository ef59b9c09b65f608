"""The two parts of mLSTM in which rows meet columns (mlstm/op.py has the formulas), as eager code in blocks of rows.

In the parallel form a row meets all columns before it. In the chunkwise form it meets those of its chunk, and the others
through a state (mlstm/chunks.py and mlstm/chunk_tiles.py).

Compiled for a GPU they are the kernels of ``templates/mlstm/``. Compiled for a CPU they are loops over tiles
(``mlstm/cpu.py``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.fx import working_dtype
from . import chunk_tiles
from .tile_math import normalised_rows, tile_gradients, weights_of


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


def _visible(rows: slice, columns: slice, device: torch.device) -> Tensor:
    """The columns that each row sees: bool [rows, columns]."""
    return torch.ones(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.bool, device=device).tril(
        rows.start - columns.start
    )


def _blocks(length: int) -> list[tuple[slice, slice]]:
    """The blocks of rows, and the columns that each of them meets in a tile."""
    starts = range(0, length, BLOCK)
    return [(slice(start, min(start + BLOCK, length)), slice(0, min(start + BLOCK, length))) for start in starts]


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
    if before is not None and reference is not None:
        of_rows = (query, key, value, log_weight, log_max)
        hidden, row_sum = chunk_tiles.row_sums(*of_rows, before, reference, scale, chunk)
    else:
        hidden, row_sum = _row_sums(query, key, value, log_weight, log_max, scale)
    finished, plain, rstd = normalised_rows(hidden, row_sum, floor, norm_weight, norm_bias, norm, eps, norm_eps)
    out = rows_like(query, value.shape[-1]).copy_(finished)
    affine = norm_weight is not None or norm_bias is not None
    return out, torch.empty_like(out).copy_(plain) if affine else out.new_empty(0), row_sum, rstd


def _row_sums(
    query: Tensor, key: Tensor, value: Tensor, log_weight: Tensor, log_max: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``sum_s C_ts v_s`` and ``sum_s C_ts`` in the parallel form."""
    kind = working_dtype(query.dtype)
    hidden = torch.empty_like(value, dtype=kind)
    row_sum = query.new_empty(query.shape[:3], dtype=kind)
    for rows, columns in _blocks(query.shape[2]):
        q, k, v = (x.to(kind) for x in (query[:, :, rows], key[:, :, columns], value[:, :, columns]))
        visible = _visible(rows, columns, query.device)
        combined = (q @ k.mT) * weights_of(log_weight[..., columns], log_max[..., rows], visible, scale, kind)
        hidden[:, :, rows], row_sum[:, :, rows] = combined @ v, combined.sum(-1)
    return hidden, row_sum


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
    of_pairs = (query, key, value, grad, log_weight, log_row, term)
    if before is not None and after is not None and reference is not None:
        *grads, of_rows, of_columns, of_later = chunk_tiles.gradients(*of_pairs, before, after, reference, scale, chunk)
    else:
        *grads, of_rows, of_columns = _gradients(*of_pairs, scale)
        of_later = of_columns.new_empty(0)
    rounded = [rows_like(query, x.shape[-1]).copy_(x) for x in grads]
    return *rounded, of_rows, of_columns, of_later


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, log_weight: Tensor, log_row: Tensor, term: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """What ``mlstm_tiles_backward`` returns in the parallel form, before it is rounded and without the last sums."""
    kind = working_dtype(query.dtype)
    grads = [torch.zeros_like(x, dtype=kind) for x in (query, key, value)]
    of_rows, of_columns = (torch.zeros(query.shape[:3], dtype=kind, device=query.device) for _ in range(2))
    for rows, columns in _blocks(query.shape[2]):
        q, e, k, v = (x.to(kind) for x in (query[:, :, rows], grad[:, :, rows], key[:, :, columns], value[:, :, columns]))
        visible = _visible(rows, columns, query.device)
        weights = weights_of(log_weight[..., columns], log_row[..., rows], visible, scale, kind)
        grads[0][:, :, rows], of_key, of_value, of_log = tile_gradients(q, k, v, e, weights, term[:, :, rows])
        grads[1][:, :, columns] += of_key
        grads[2][:, :, columns] += of_value
        of_rows[:, :, rows] = of_log.sum(-1)
        of_columns[:, :, columns] += of_log.sum(-2)
    return *grads, of_rows, of_columns


@mlstm_tiles_backward.register_fake
def _(*operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = BackwardOperands(*operands)
    query, width = given.query, given.query.shape[-1]
    row = query.new_empty(query.shape[:3], dtype=working_dtype(query.dtype))
    later = torch.empty_like(row) if given.chunk else row.new_empty(0)
    rows = (row, torch.empty_like(row), later)
    return *(rows_like(query, n) for n in (width, width, given.value.shape[-1])), *rows
