"""The op ``mlstm``: what it takes and returns, and the checks of its operands."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.fx import working_dtype
from . import chunks
from .op import mlstm_op
from .reference import State, affine


def mlstm(
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
    return_states: bool = False,
    initial_state: State | None = None,
    return_final_state: bool = False,
) -> Any:
    """The mLSTM cell with its headwise layer norm. Its memory is linear in the length.

    query, key: [B, N, S, D], and value: [B, N, S, Dv], all of one floating dtype. input_gate, forget_gate: [B, N, S], before
    any activation, of any floating dtype. norm_weight and norm_bias: [N, Dv] or [N * Dv]; a norm_weight of 0 is the
    identity. scale: 1 / sqrt(D) by default; it must be positive.

    Returns y [B, N, S, Dv] in the dtype of value. With ``return_states`` it returns ``(y, (h, n, m))``: h is like y and has
    a gradient; n and m are [B, N, S] in fp32 (float64 for float64) and have none.

    initial_state: (C, n, m), the state of the memory before the first position: C [B, N, D, Dv], n [B, N, D] and m [B, N],
    of any floating dtypes. The true matrix is ``exp(m) C``, and the true vector ``exp(m) n``. With ``return_final_state``
    the last result is the state after the last position, C and n in fp32 (float64 for float64) and m in float64. All of
    them have gradients. A sequence may be cut anywhere: the second part then begins with the state in which the first
    ended. Detach the state to cut the gradient too.

    Raises ValueError for operands whose shapes or dtypes do not fit, and for a state where there is no position.

    Compiled with gradfuse on a GPU it runs as fused kernels. Otherwise it runs in blocks of rows or, where the sequence is
    long or there is a state, in chunks. The formula is in the docstring of ``inductor_ext/mlstm/op.py`` (Beck et al., xLSTM,
    2024).
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    _check(query, key, value, input_gate, forget_gate, norm_weight, norm_bias, norm, scale)
    if (initial_state is not None or return_final_state) and query.shape[2] == 0:
        raise ValueError("mlstm: a state needs a sequence of at least one position")
    kind = working_dtype(query.dtype)
    first, first_max = _packed(initial_state, query, value)
    heads, width = value.shape[1], value.shape[-1]
    weight, bias = (None if x is None else x.reshape(heads, width) for x in (norm_weight, norm_bias))
    fused = norm and not return_states
    out, _, row_sum, _, decay, log_max, last, last_max = mlstm_op(
        query,
        key,
        value,
        input_gate,
        forget_gate,
        weight if fused else None,
        bias if fused else None,
        first,
        first_max,
        fused,
        eps,
        norm_eps,
        scale,
        return_final_state,
    )
    final = [(*chunks.parts(last, width), last_max)] if return_final_state else []
    if not return_states:
        return (out, *final) if final else out
    row_max = (decay + log_max).detach()
    normaliser = torch.maximum(row_sum.abs(), torch.exp(-row_max).to(kind)) + eps
    states = (out, normaliser.detach(), row_max.to(kind))
    if not norm:
        return out, states, *final
    normalised = F.layer_norm(out.to(kind), (width,), eps=norm_eps)
    return affine(normalised, weight, bias).to(out.dtype), states, *final


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: bool,
    scale: float,
) -> None:
    if query.dim() != 4 or key.shape != query.shape or value.dim() != 4 or value.shape[:3] != query.shape[:3]:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        raise ValueError(f"mlstm: query and key must be [B, N, S, D] and value [B, N, S, Dv]; got {shapes}")
    for name, gate in (("input_gate", input_gate), ("forget_gate", forget_gate)):
        if gate.shape != query.shape[:3]:
            raise ValueError(f"mlstm: {name} must be [B, N, S] = {tuple(query.shape[:3])}; got {tuple(gate.shape)}")
    if not query.is_floating_point() or not query.dtype == key.dtype == value.dtype:
        dtypes = f"{query.dtype}, {key.dtype}, {value.dtype}"
        raise ValueError(f"mlstm: query, key and value must have one floating dtype; got {dtypes}")
    for name, vector in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if vector is not None and not norm:
            raise ValueError(f"mlstm: {name} without norm=True has no meaning")
        if vector is not None and vector.numel() != value.shape[1] * value.shape[3]:
            raise ValueError(
                f"mlstm: {name} must hold N * Dv = {value.shape[1] * value.shape[3]} numbers; got {vector.numel()}"
            )
    if not scale > 0:
        raise ValueError(f"mlstm: scale must be positive; got {scale}")


def _packed(state: State | None, query: Tensor, value: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The matrix and the vector of a state as the op takes them, and its maximum."""
    if state is None:
        return None, None
    matrix, vector, maximum = state
    size = (*query.shape[:2], query.shape[-1], value.shape[-1])
    shapes = tuple(tuple(x.shape) for x in state)
    if shapes != (size, size[:3], size[:2]):
        raise ValueError(f"mlstm: initial_state must be C {size}, n {size[:3]} and m {size[:2]}; got {shapes}")
    if not all(x.is_floating_point() for x in state):
        raise ValueError(f"mlstm: initial_state must have floating dtypes; got {[x.dtype for x in state]}")
    return chunks.pack(matrix, vector, working_dtype(query.dtype)), maximum.double()
