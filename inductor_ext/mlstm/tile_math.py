"""The math of one tile of mLSTM, and of finished rows. Eager code and the loops for a CPU use it alike."""

from __future__ import annotations

import torch
from torch import Tensor


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
