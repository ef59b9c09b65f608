"""The sums of mLSTM over the columns of each row, and their gradients, in the chunkwise form: dense math over all chunks.

Eager code calls these functions, and they are traced where Inductor compiles for a CPU (``mlstm/cpu.py``). Their memory is
that of [S, chunk] numbers per head. The formulas are in ``mlstm/chunks.py`` and ``mlstm/tiles_op.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.fx import working_dtype
from .chunks import LARGE, cut, join, parts
from .tile_math import tile_gradients, weights_of


def _weights(log_weight: Tensor, log_row: Tensor, chunk: int, scale: float, kind: torch.dtype) -> Tensor:
    """``scale exp(g_s - log_row_t)`` within the chunks, [B, N, chunks, chunk, chunk]. It is 0 past the end."""
    visible = torch.ones(chunk, chunk, dtype=torch.bool, device=log_row.device).tril()
    return weights_of(cut(log_weight, chunk, -LARGE), cut(log_row, chunk, LARGE), visible, scale, kind)


def row_sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor,
    log_max: Tensor,
    before: Tensor,
    reference: Tensor,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """``sum_s C_ts v_s`` [B, N, S, Dv] and ``sum_s C_ts`` [B, N, S]. The operands are those of ``mlstm_tiles``."""
    kind, length = working_dtype(query.dtype), query.shape[2]
    q, k, v = (cut(x.to(kind), chunk) for x in (query, key, value))
    combined = (q @ k.mT) * _weights(log_weight, log_max, chunk, scale, kind)
    matrix, vector = parts(before[:, :, :-1], value.shape[-1])
    of_state = scale * torch.exp(reference[..., :-1, None] - cut(log_max, chunk, LARGE)).to(kind)
    hidden = combined @ v + of_state[..., None] * (q @ matrix)
    sums = combined.sum(-1) + of_state * (q @ vector[..., None])[..., 0]
    return join(hidden, length), join(sums, length)


def gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    log_weight: Tensor,
    log_row: Tensor,
    term: Tensor,
    before: Tensor,
    after: Tensor,
    reference: Tensor,
    scale: float,
    chunk: int,
) -> tuple[Tensor, ...]:
    """What ``mlstm_tiles_backward`` returns for these operands, before it is rounded."""
    kind, length = working_dtype(query.dtype), query.shape[2]
    q, k, v, e = (cut(x.to(kind), chunk) for x in (query, key, value, grad))
    term = cut(term, chunk)
    weights = _weights(log_weight, log_row, chunk, scale, kind)
    of_query, of_key, of_value, of_log = tile_gradients(q, k, v, e, weights, term)
    matrix, vector = parts(before[:, :, :-1], value.shape[-1])
    earlier = scale * torch.exp(reference[..., :-1, None] - cut(log_row, chunk, LARGE)).to(kind)
    of_earlier = earlier[..., None] * (e @ matrix.mT + term[..., None] * vector[..., None, :])
    matrix, vector = parts(after[:, :, 1:], value.shape[-1])
    later = scale * torch.exp(cut(log_weight, chunk, -LARGE) - reference[..., 1:, None]).to(kind)
    of_later = later[..., None] * (v @ matrix.mT + vector[..., None, :])
    rows = of_log.sum(-1) + (q * of_earlier).sum(-1)
    of_value = of_value + later[..., None] * (k @ matrix)
    of_rows = (of_query + of_earlier, of_key + of_later, of_value, rows, of_log.sum(-2), (k * of_later).sum(-1))
    return tuple(join(x, length) for x in of_rows)
