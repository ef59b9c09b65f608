"""mLSTM as its formula reads, with its S x S tensors. ``mlstm/op.py`` explains the formula."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: The state of a cell: a matrix C [B, N, D, Dv], a vector n [B, N, D], and the maximum m [B, N], to which both are relative.
State = tuple[Tensor, Tensor, Tensor]


def mlstm_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm: bool = True,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    scale: float | None = None,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Any:
    """The formula. The operands and results are those of ``mlstm``, without ``return_states``."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    length = query.shape[-2]
    decay = F.logsigmoid(forget_gate).cumsum(-1)
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    log_weights = decay[..., :, None] - decay[..., None, :] + input_gate[..., None, :]
    log_weights = log_weights.masked_fill(~causal, -math.inf)
    row_max = log_weights.max(-1, keepdim=True).values
    if initial_state is not None:
        matrix, vector, maximum = initial_state
        of_state = (decay + maximum[..., None])[..., None]
        row_max = torch.maximum(row_max, of_state)
    combined = scale * (query @ key.mT) * torch.exp(log_weights - row_max)
    hidden, row_sum = combined @ value, combined.sum(-1, keepdim=True)
    if initial_state is not None:
        weighted = scale * torch.exp(of_state - row_max) * query
        hidden, row_sum = hidden + weighted @ matrix, row_sum + weighted @ vector[..., None]
    y = hidden / (torch.maximum(row_sum.abs(), torch.exp(-row_max)) + eps)
    if norm:
        y = affine(F.layer_norm(y, y.shape[-1:], eps=norm_eps), norm_weight, norm_bias)
    if not return_final_state:
        return y
    last_max = row_max[..., -1, 0]
    weighted = torch.exp(log_weights[..., -1, :] - last_max[..., None])[..., None] * key
    last_matrix, last_vector = weighted.mT @ value, weighted.sum(-2)
    if initial_state is not None:
        kept = torch.exp(of_state[..., -1, :] - last_max[..., None])
        last_matrix, last_vector = last_matrix + kept[..., None] * matrix, last_vector + kept * vector
    return y, (last_matrix, last_vector, last_max)


def affine(normalised: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """A normalised h [B, N, S, Dv] with the weight and the bias of the norm, each [N, Dv] or [N * Dv]."""
    heads, width = normalised.shape[1], normalised.shape[-1]
    if weight is not None:
        normalised = normalised * (1 + weight.reshape(heads, 1, width))
    return normalised if bias is None else normalised + bias.reshape(heads, 1, width)
