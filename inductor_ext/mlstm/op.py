"""mLSTM, the matrix memory of xLSTM, with its headwise layer norm (Beck et al., xLSTM, 2024).

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

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.fx import working_dtype
from . import chunks
from .tiles_op import mlstm_tiles, mlstm_tiles_backward, rows_like


def gate_scans(input_gate: Tensor, forget_gate: Tensor, first_max: Tensor | None) -> tuple[Tensor, Tensor]:
    """``F`` and ``M``, both [B, N, S] in float64. first_max: m of the first state [B, N], if there is one."""
    decay = F.logsigmoid(forget_gate.double()).cumsum(-1)
    log_max = (input_gate.double() - decay).cummax(-1).values
    return decay, log_max if first_max is None else torch.maximum(log_max, first_max[..., None])


def decomposed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    first: Tensor | None,
    first_max: Tensor | None,
    norm: bool,
    eps: float,
    norm_eps: float,
    scale: float,
    wants_last: bool,
) -> tuple[Tensor, ...]:
    """The decomposition of the op ``gradfuse::mlstm``: the scans of the gates, and the op ``gradfuse::mlstm_tiles``."""
    decay, log_max = gate_scans(input_gate, forget_gate, first_max)
    log_weight, row_max = input_gate.double() - decay, decay + log_max
    floor = torch.exp(-row_max).to(working_dtype(query.dtype))
    chunk, before, reference = chunks.chunk_size(query, value, first is not None or wants_last), None, None
    if chunk:
        reference = chunks.references(log_max, chunk, first_max)
        before = chunks.states(key, value, None, log_weight, reference, first, chunk, after=False)
    rows = (query, key, value, log_weight, log_max, floor)
    operands = (*rows, norm_weight, norm_bias, before, reference, norm, eps, norm_eps, scale, chunk)
    results = (*mlstm_tiles(*operands), decay, log_max)
    if before is None or not wants_last:
        return *results, floor.new_empty(0), row_max.new_empty(0)
    return *results, before[:, :, -1].clone(), row_max[..., -1].clone()


@torch.library.custom_op("gradfuse::mlstm", mutates_args=())
def mlstm_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    first: Tensor | None,
    first_max: Tensor | None,
    norm: bool,
    eps: float,
    norm_eps: float,
    scale: float,
    wants_last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out, normalised (empty unless weight or bias make it differ from out), sum C, rstd, F, M, and the last state.

    A state is [B, N, D * (Dv + 1)] (``chunks.pack``), and its maximum m is [B, N] in float64. The last one is empty unless
    it is wanted.
    """
    return decomposed(
        query,
        key,
        value,
        input_gate,
        forget_gate,
        norm_weight,
        norm_bias,
        first,
        first_max,
        norm,
        eps,
        norm_eps,
        scale,
        wants_last,
    )


@mlstm_op.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    *others: Any,
) -> tuple[Tensor, ...]:
    out, wants_last = rows_like(query, value.shape[-1]), others[-1]
    affine = norm_weight is not None or norm_bias is not None
    normalised = torch.empty_like(out) if affine else out.new_empty(0)
    row = query.new_empty(query.shape[:3], dtype=working_dtype(query.dtype))
    gate = query.new_empty(query.shape[:3], dtype=torch.float64)
    state = (*query.shape[:2], query.shape[-1] * (value.shape[-1] + 1)) if wants_last else (0,)
    last = row.new_empty(state), gate.new_empty(state[:-1] if wants_last else state)
    return out, normalised, row, torch.empty_like(row), gate, torch.empty_like(gate), *last


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.norm, ctx.eps, ctx.norm_eps, ctx.scale, wants_last = inputs
    query, key, value, input_gate, forget_gate, weight, bias, first, first_max = tensors
    out, normalised, *rows, last, last_max = output
    hidden = out if weight is None and bias is None else normalised
    ctx.mark_non_differentiable(normalised, *rows, *(() if wants_last else (last, last_max)))
    ctx.set_materialize_grads(False)
    ctx.affine_dtypes = tuple(None if x is None else x.dtype for x in (weight, bias))
    saved = (query, key, value, input_gate, forget_gate, weight, first, first_max, hidden, *rows)
    ctx.save_for_backward(*saved, last if wants_last else None)


def _backward(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    grad_last, grad_last_max = others[-2:]
    if grad is None and grad_last is None and grad_last_max is None:
        return (None,) * 14
    query, key, value, input_gate, forget_gate, weight, first, first_max, hidden, *rows, last = ctx.saved_tensors
    row_sum, rstd, decay, log_max = rows
    log_weight, kind = input_gate.double() - decay, row_sum.dtype
    grad = torch.zeros_like(hidden, dtype=kind) if grad is None else grad.to(kind)
    grad_hidden, delta, *of_affine = _through_norm(ctx, grad, hidden.to(kind), weight, rstd)
    floor = torch.exp(-(decay + log_max)).to(kind)
    normaliser = torch.maximum(row_sum.abs(), floor) + ctx.eps
    term = torch.where(row_sum.abs() >= floor, -delta * row_sum.sign(), 0)
    through_max = -delta * rstd * (ctx.eps / normaliser)
    log_row = log_max - torch.log(rstd / normaliser).double()
    pairs = (query, key, value, grad_hidden.to(query.dtype), log_weight, log_row, term)
    edges = (log_max, first, first_max, grad_last)
    *of_tensors, of_input, of_decay, of_first = _gradients(*pairs, *edges, ctx.scale)
    ends = grad_last is not None or grad_last_max is not None
    if ends:
        through_max = through_max + _at_the_end(_through_last_max(last, grad_last, grad_last_max), through_max)
    if ctx.eps or ends:
        to_input, to_decay = _through_maximum(through_max, log_weight, log_max)
        of_input, of_decay = of_input + to_input, of_decay + to_decay
    grad_forget = (of_decay * torch.sigmoid(-forget_gate.double())).to(forget_gate.dtype)
    # m of the first state is added to every sum of log gates that begins with the first forget gate, as this gate is.
    of_first_max = None if first_max is None else of_decay[..., 0]
    grads = (*of_tensors, of_input.to(input_gate.dtype), grad_forget, *of_affine, of_first, of_first_max)
    return (*grads, None, None, None, None, None)


def _through_norm(
    ctx: Any, grad: Tensor, hidden: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradient of h divided by rstd, delta multiplied by rstd, and the gradients of the norm's weight and bias.

    hidden: h, normalised if there is a norm. delta is the dot product of h and its gradient.
    """
    grad_weight, grad_bias = (
        None if dtype is None else term.sum((0, 2)).to(dtype)
        for dtype, term in zip(ctx.affine_dtypes, (grad * hidden, grad), strict=True)
    )
    if not ctx.norm:
        return grad, (grad * hidden).sum(-1), grad_weight, grad_bias
    scaled = grad if weight is None else grad * (1 + weight.to(grad.dtype)[:, None])
    along = (scaled * hidden).mean(-1)
    grad_hidden = scaled - scaled.mean(-1, keepdim=True) - hidden * along[..., None]
    return grad_hidden, along * (hidden.shape[-1] * ctx.norm_eps) * rstd, grad_weight, grad_bias


def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    log_weight: Tensor,
    log_row: Tensor,
    term: Tensor,
    log_max: Tensor,
    first: Tensor | None,
    first_max: Tensor | None,
    grad_last: Tensor | None,
    scale: float,
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key and value, of g (the input gates), of every step of F, and of the first state.

    They are those that go through C, the weights of all pairs of a row and a column.
    """
    with_states = first is not None or grad_last is not None
    chunk, before, after, reference = chunks.chunk_size(query, value, with_states), None, None, None
    if chunk:
        reference = chunks.references(log_max, chunk, first_max)
        before = chunks.states(key, value, None, log_weight, reference, first, chunk, after=False)
        outer = None if grad_last is None else grad_last / scale
        after = chunks.states(query, grad, term, -log_row, -reference, outer, chunk, after=True)
    operands = (query, key, value, grad, log_weight, log_row, term, before, after, reference, scale, chunk)
    *of_tensors, of_rows, of_columns, of_later = mlstm_tiles_backward(*operands)
    if before is None or after is None or reference is None:
        return *of_tensors, of_columns, _from_here(of_rows.double() - of_columns), None
    across = chunks.across(before, after, reference, scale)
    of_decay = chunks.sums_across_positions(of_rows, of_columns, of_later, across, chunk)
    of_first = None if first is None else scale * after[:, :, 0]
    return *of_tensors, of_columns + of_later, of_decay, of_first


def _through_last_max(last: Tensor, grad_last: Tensor | None, grad_last_max: Tensor | None) -> Tensor:
    """The gradient of m at the last position, [B, N], that comes from the last state, which is relative to it, and its m."""
    through_state = 0.0 if grad_last is None else (grad_last * last).sum(-1)
    return (0.0 if grad_last_max is None else grad_last_max) - through_state


def _at_the_end(amount: Tensor, rows: Tensor) -> Tensor:
    """``amount`` [B, N] at the last position of [B, N, S], the shape of ``rows``, and zeros elsewhere."""
    positions = torch.arange(rows.shape[-1], device=rows.device)
    return torch.where(positions == rows.shape[-1] - 1, amount[..., None], 0)


def _from_here(x: Tensor) -> Tensor:
    """The sums of x [..., S] over this and all later positions."""
    return x.flip(-1).cumsum(-1).flip(-1)


def _through_maximum(amounts: Tensor, log_weight: Tensor, log_max: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of g and of the steps of F if row t passes ``amounts_t`` to the column of its maximum.

    All are [B, N, S]. The column of a maximum is the first one that reaches it, and it gets the amounts of the rows from its
    own up to where the maximum rises again. What the rows before the first such column pass goes to the first state; it is
    among the gradients of the first step. Returns two tensors in float64.
    """
    before = F.pad(log_max[..., :-1], (1, 0), value=-torch.inf)
    is_maximum = (log_weight == log_max) & (log_max > before)
    # The maximum never decreases, so that a search finds where it rises.
    next_rise = torch.searchsorted(log_max, log_max, right=True)
    from_here = F.pad(_from_here(amounts.double()), (0, 1))
    up_to_there = from_here[..., :-1] - from_here.gather(-1, next_rise)
    return torch.where(is_maximum, up_to_there, 0), torch.where(is_maximum, 0, up_to_there)


mlstm_op.register_autograd(_backward, setup_context=_save)
