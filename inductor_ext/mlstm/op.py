"""mLSTM, the matrix memory of xLSTM, in its parallel form and with its headwise layer norm (Beck et al., xLSTM, 2024).

    F_t  = cumsum(logsigmoid(f))_t
    D_ts = F_t - F_s + i_s        for s <= t, -inf otherwise
    m_t  = max_s D_ts
    C_ts = scale (q_t . k_s) exp(D_ts - m_t)
    n_t  = max(|sum_s C_ts|, exp(-m_t)) + eps
    h_t  = sum_s C_ts v_s / n_t
    y_t  = layer_norm(h_t) (1 + w) + b          over the value width, for each head

F_t cancels in ``D_ts - m_t = g_s - M_t`` with ``g = i - F`` and ``M = cummax(g)``. So two scans over the gates give the
maximum of every row before any score is known, and sums are never rescaled on the way. g and M are kept in float64, because
F grows to thousands while its differences matter to 1e-6. Long sequences may be computed chunk by chunk (chunks.py).

The gradient is the one that autograd computes for these formulas, for every eps. In it the normaliser leaves one number per
row. Let ``delta = dh . h``. Where ``|sum C|`` is the larger of the two, ``dC_ts = (dh_t . v_s - sign(sum C) delta) / n``.
Through m, ``-delta eps / n`` goes to the s of the maximum. Behind a layer norm, delta is ``Dv c2 norm_eps rstd^2``, where c2
is the mean of dy (1 + w) times the normalised h. It is zero for norm_eps = 0, because the norm then does not depend on the
scale of h.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.fx import working_dtype
from . import chunks
from .tiles_op import mlstm_tiles, mlstm_tiles_backward, rows_like


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
) -> Tensor:
    """The formula, computed with its S x S tensors. The operands and the result y are those of ``mlstm``."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    length = query.shape[-2]
    decay = F.logsigmoid(forget_gate).cumsum(-1)
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    log_weights = decay[..., :, None] - decay[..., None, :] + input_gate[..., None, :]
    log_weights = log_weights.masked_fill(~causal, -math.inf)
    row_max = log_weights.max(-1, keepdim=True).values
    combined = scale * (query @ key.mT) * torch.exp(log_weights - row_max)
    normaliser = torch.maximum(combined.sum(-1, keepdim=True).abs(), torch.exp(-row_max)) + eps
    hidden = combined @ value / normaliser
    if not norm:
        return hidden
    normalised = F.layer_norm(hidden, hidden.shape[-1:], eps=norm_eps)
    return _affine(normalised, norm_weight, norm_bias)


def _affine(normalised: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    heads, width = normalised.shape[1], normalised.shape[-1]
    if weight is not None:
        normalised = normalised * (1 + weight.reshape(heads, 1, width))
    return normalised if bias is None else normalised + bias.reshape(heads, 1, width)


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
) -> Any:
    """The mLSTM cell in its parallel form with its headwise layer norm. Its memory is linear in the length.

    query, key: [B, N, S, D], and value: [B, N, S, Dv], all of one floating dtype. input_gate, forget_gate: [B, N, S], before
    any activation, of any floating dtype. norm_weight and norm_bias: [N, Dv] or [N * Dv]; a norm_weight of 0 is the
    identity. scale: 1 / sqrt(D) by default; it must be positive.

    Returns y [B, N, S, Dv] in the dtype of value. With ``return_states`` it returns ``(y, (h, n, m))``: h is like y and has
    a gradient; n and m are [B, N, S] in fp32 (float64 for float64) and have none. Raises ValueError for operands whose
    shapes or dtypes do not fit.

    Compiled with gradfuse on a GPU it runs as fused kernels. Otherwise it runs in blocks of rows. The formula is in the
    docstring of ``inductor_ext/mlstm/op.py`` (Beck et al., xLSTM, 2024).
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    _check(query, key, value, input_gate, forget_gate, norm_weight, norm_bias, norm, scale)
    heads, width = value.shape[1], value.shape[-1]
    weight, bias = (None if x is None else x.reshape(heads, width) for x in (norm_weight, norm_bias))
    fused = norm and not return_states
    out, _, row_sum, _, log_weight, log_max = mlstm_op(
        query,
        key,
        value,
        input_gate,
        forget_gate,
        weight if fused else None,
        bias if fused else None,
        fused,
        eps,
        norm_eps,
        scale,
    )
    if not return_states:
        return out
    row_max = (input_gate - log_weight + log_max).detach()
    normaliser = torch.maximum(row_sum.abs(), torch.exp(-row_max).to(row_sum.dtype)) + eps
    states = (out, normaliser.detach(), row_max.to(row_sum.dtype))
    if not norm:
        return out, states
    normalised = F.layer_norm(out.to(row_sum.dtype), (width,), eps=norm_eps)
    return _affine(normalised, weight, bias).to(out.dtype), states


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


# ---------------------------------------------------------------- the op


def gate_scans(input_gate: Tensor, forget_gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``g``, ``M`` and ``exp(-m)``, all [B, N, S] in float64."""
    decay = F.logsigmoid(forget_gate.double()).cumsum(-1)
    log_weight = input_gate.double() - decay
    log_max = log_weight.cummax(-1).values
    return log_weight, log_max, torch.exp(-(decay + log_max))


def decomposed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: bool,
    eps: float,
    norm_eps: float,
    scale: float,
) -> tuple[Tensor, ...]:
    """The decomposition of the op ``gradfuse::mlstm``: the scans of the gates, and the op ``gradfuse::mlstm_tiles``."""
    log_weight, log_max, floor = gate_scans(input_gate, forget_gate)
    floor = floor.to(working_dtype(query.dtype))
    chunk, before, reference = chunks.chunk_size(query, value), None, None
    if chunk:
        reference = chunks.references(log_max, chunk)
        before = chunks.states(key, value, None, log_weight, reference, chunk, after=False)
    rows = (query, key, value, log_weight, log_max, floor)
    operands = (*rows, norm_weight, norm_bias, before, reference, norm, eps, norm_eps, scale, chunk)
    return (*mlstm_tiles(*operands), log_weight, log_max)


@torch.library.custom_op("gradfuse::mlstm", mutates_args=())
def mlstm_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    norm: bool,
    eps: float,
    norm_eps: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, normalised (empty unless weight or bias make it differ from out), sum C, rstd, g and M."""
    return decomposed(
        query, key, value, input_gate, forget_gate, norm_weight, norm_bias, norm, eps, norm_eps, scale
    )  # fmt: skip


@mlstm_op.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    out = rows_like(query, value.shape[-1])
    affine = norm_weight is not None or norm_bias is not None
    normalised = torch.empty_like(out) if affine else out.new_empty(0)
    row = query.new_empty(query.shape[:3], dtype=working_dtype(query.dtype))
    gate = query.new_empty(query.shape[:3], dtype=torch.float64)
    return out, normalised, row, torch.empty_like(row), gate, torch.empty_like(gate)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, input_gate, forget_gate, weight, bias, ctx.norm, ctx.eps, ctx.norm_eps, ctx.scale = inputs
    out, normalised, *rows = output
    hidden = out if weight is None and bias is None else normalised
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.weight_dtypes = tuple(None if x is None else x.dtype for x in (weight, bias))
    ctx.save_for_backward(query, key, value, input_gate, forget_gate, weight, hidden, *rows)


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 11
    query, key, value, input_gate, forget_gate, weight, hidden, *rows = ctx.saved_tensors
    row_sum, rstd, log_weight, log_max = rows
    kind = row_sum.dtype
    grad, hidden = grad.to(kind), hidden.to(kind)
    grad_weight, grad_bias = (
        None if dtype is None else term.sum((0, 2)).to(dtype)
        for dtype, term in zip(ctx.weight_dtypes, (grad * hidden, grad), strict=True)
    )
    # grad_hidden * rstd is the gradient of h. delta * rstd is the dot product of that gradient with h.
    grad_hidden, delta = grad, None
    if ctx.norm:
        scaled = grad if weight is None else grad * (1 + weight.to(kind)[:, None])
        along = (scaled * hidden).mean(-1)
        grad_hidden = scaled - scaled.mean(-1, keepdim=True) - hidden * along[..., None]
        delta = along * (value.shape[-1] * ctx.norm_eps) * rstd
    else:
        delta = (grad * hidden).sum(-1)
    floor = torch.exp(-(input_gate.double() - log_weight + log_max)).to(kind)
    normaliser = torch.maximum(row_sum.abs(), floor) + ctx.eps
    term = torch.where(row_sum.abs() >= floor, -delta * row_sum.sign(), 0)
    through_max = -delta * rstd * (ctx.eps / normaliser)
    log_row = log_max - torch.log(rstd / normaliser).double()
    grad_hidden = grad_hidden.to(query.dtype)
    *of_tensors, of_input, of_decay = _gradients(
        query, key, value, grad_hidden, log_weight, log_max, log_row, term, ctx.scale
    )
    if ctx.eps:
        to_input, to_decay = _through_maximum(through_max, log_weight == log_max)
        of_input, of_decay = of_input + to_input, of_decay + to_decay
    grad_forget = (of_decay * torch.sigmoid(-forget_gate.double())).to(forget_gate.dtype)
    grads = (*of_tensors, of_input.to(input_gate.dtype), grad_forget, grad_weight, grad_bias)
    return (*grads, None, None, None, None)


def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    log_weight: Tensor,
    log_max: Tensor,
    log_row: Tensor,
    term: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value, of g (the input gates), and of every step of F, as far as they go through C."""
    chunk, before, after, reference = chunks.chunk_size(query, value), None, None, None
    if chunk:
        reference = chunks.references(log_max, chunk)
        before = chunks.states(key, value, None, log_weight, reference, chunk, after=False)
        after = chunks.states(query, grad, term, -log_row, -reference, chunk, after=True)
    operands = (query, key, value, grad, log_weight, log_row, term, before, after, reference, scale, chunk)
    *of_tensors, of_rows, of_columns, of_later = mlstm_tiles_backward(*operands)
    if before is None or after is None or reference is None:
        return *of_tensors, of_columns, _from_here(of_rows.double() - of_columns)
    across = chunks.across(before, after, reference, scale)
    of_decay = chunks.sums_across_positions(of_rows, of_columns, of_later, across, chunk)
    return *of_tensors, of_columns + of_later, of_decay


def _from_here(x: Tensor) -> Tensor:
    """The sums of x [..., S] over this and all later positions."""
    return x.flip(-1).cumsum(-1).flip(-1)


def _through_maximum(amounts: Tensor, is_maximum: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of g and of the steps of F if row t passes ``amounts_t`` to the column of its maximum.

    amounts: [B, N, S]. is_maximum: whether the column t is the maximum of row t. Each column that is one gets the amounts of
    the rows from its own up to the next such column. Returns two tensors in float64.
    """
    length = amounts.shape[-1]
    positions = torch.arange(length, device=amounts.device)
    following = torch.where(is_maximum, positions, length).flip(-1).cummin(-1).values.flip(-1)
    from_here = F.pad(_from_here(amounts.double()), (0, 1))
    from_maximum = F.pad(from_here.gather(-1, following), (0, 1))
    return from_maximum[..., :-1] - from_maximum[..., 1:], from_here[..., :-1] - from_maximum[..., :-1]


mlstm_op.register_autograd(_backward, setup_context=_save)
