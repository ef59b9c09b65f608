"""mLSTM as people write it in plain PyTorch, and near misses: similar code that is not mLSTM.

Every form takes query, key [B, N, S, D], value [B, N, S, Dv], input_gate, forget_gate [B, N, S] and weight [N * Dv]
(0 is the identity) and returns [B, S, N * Dv].
"""

import math

import torch
import torch.nn.functional as F

EPS = 1e-6


def by_groups(hidden, weight, eps=EPS):
    batch, heads, length, width = hidden.shape
    rows = hidden.transpose(1, 2).reshape(batch * length, heads * width)
    return F.group_norm(rows, heads, weight=1.0 + weight, bias=None, eps=eps).view(batch, length, heads * width)


def by_layer(hidden, weight, eps=EPS):
    heads, width = hidden.shape[1], hidden.shape[3]
    normalised = F.layer_norm(hidden, (width,), eps=eps) * (1 + weight.view(heads, 1, width))
    return normalised.transpose(1, 2).flatten(2)


def repeated(query, key, value, input_gate, forget_gate, weight):
    """The cumulative sums follow a zero. They are repeated to a square, from which its transpose is subtracted."""
    batch, heads, length, width = query.shape
    input_gate, forget_gate = input_gate[..., None], forget_gate[..., None]
    zeros = torch.zeros((batch, heads, 1, 1), dtype=query.dtype, device=query.device)
    sums = torch.cat([zeros, torch.cumsum(F.logsigmoid(forget_gate), dim=-2)], dim=-2)
    square = sums.repeat(1, 1, 1, length + 1)
    differences = square - square.transpose(-2, -1)
    causal = torch.tril(torch.ones((length, length), dtype=torch.bool, device=query.device))
    decays = torch.where(causal, differences[:, :, 1:, 1:], -float("inf"))
    log_weights = decays + input_gate.transpose(-2, -1)
    row_max, _ = torch.max(log_weights, dim=-1, keepdim=True)
    weights = torch.exp(log_weights - row_max)
    combined = (query @ (key / math.sqrt(width)).transpose(-2, -1)) * weights
    normaliser = torch.maximum(combined.sum(dim=-1, keepdim=True).abs(), torch.exp(-row_max))
    hidden = (combined / (normaliser + EPS)) @ value
    return by_groups(hidden, weight)


def broadcast(query, key, value, input_gate, forget_gate, weight):
    """Vectors are broadcast by indexing, the mask is applied by masked_fill, and the division is the last op."""
    length = query.shape[2]
    decay = F.logsigmoid(forget_gate).cumsum(-1)
    log_weights = decay[..., :, None] - decay[..., None, :] + input_gate[..., None, :]
    log_weights = log_weights.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
    row_max = log_weights.amax(-1, keepdim=True)
    combined = torch.exp(log_weights - row_max) * (query @ key.mT * query.shape[-1] ** -0.5)
    normaliser = torch.maximum(torch.exp(-row_max), torch.abs(combined.sum(-1, True))) + EPS
    return by_layer(combined @ value / normaliser, weight)


def compared(query, key, value, input_gate, forget_gate, weight):
    """The mask compares positions, and vectors use unsqueeze and expand. The norm is one that the op does not have (RMS)."""
    batch, heads, length, width = query.shape
    decay = torch.cumsum(F.logsigmoid(forget_gate), 2).unsqueeze(-1)
    positions = torch.arange(length)
    column = (input_gate.unsqueeze(-1) - decay).transpose(2, 3).expand(batch, heads, length, length)
    log_weights = torch.where(positions[:, None] >= positions[None, :], decay + column, float("-inf"))
    row_max = log_weights.max(-1, keepdim=True).values
    combined = torch.mul(torch.matmul(query / math.sqrt(width), key.transpose(2, 3)), torch.exp(log_weights - row_max))
    normaliser = torch.maximum(combined.sum(-1, keepdim=True).abs(), (-row_max).exp())
    hidden = torch.matmul(combined.div(normaliser + EPS), value)
    hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + EPS)
    return (hidden * (1 + weight.view(heads, 1, -1))).transpose(1, 2).flatten(2)


def transposed(query, key, value, input_gate, forget_gate, weight):
    """The gates are [B, S, N], as a Linear layer gives them, and are summed like that. Some results are not used."""
    length = query.shape[2]
    input_gate, forget_gate = (gate.transpose(1, 2) * 1.0 for gate in (input_gate, forget_gate))
    decay = F.logsigmoid(forget_gate).cumsum(1).transpose(1, 2).unsqueeze(-1)
    causal = torch.tril(torch.ones(length, length, dtype=torch.bool))
    decays = torch.where(causal, decay - decay.transpose(-2, -1), -float("inf"))
    log_weights = decays + input_gate.transpose(-1, -2).unsqueeze(-1).transpose(-2, -1)
    row_max, _ = torch.max(log_weights, dim=-1, keepdim=True)
    combined = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5 * torch.exp(log_weights - row_max)
    normaliser = torch.maximum(combined.sum(dim=-1, keepdim=True).abs(), torch.exp(-row_max))
    hidden = (combined / (normaliser + EPS)) @ value
    _ = normaliser.squeeze(-1), row_max.squeeze(-1)
    return by_groups(hidden, weight)


def of_layers(query, key, value, input_gate, forget_gate, weight):
    """Queries, keys and values are [B, S, N * D], as Linear layers give them, and heads are moved to the front."""
    heads, width = query.shape[1], query.shape[3]
    query, key, value = (x.transpose(1, 2).flatten(2) * 1.0 for x in (query, key, value))
    query, key, value = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (query, key * width**-0.5, value))
    return broadcast(query * width**0.5, key, value, input_gate, forget_gate, weight)


def _in_place(log_weights, decay, input_gate):
    """An in-place op changes the exponents. No other op uses its result."""
    log_weights = log_weights.clone()
    log_weights.mul_(0.5)
    return log_weights


def _with(normaliser=None, mask=None, exponent=None, side=False, norm=True):
    def form(query, key, value, input_gate, forget_gate, weight):
        length = query.shape[2]
        decay = F.logsigmoid(forget_gate).cumsum(-1)
        log_weights = decay[..., :, None] - decay[..., None, :] + input_gate[..., None, :]
        if exponent is not None:
            log_weights = exponent(log_weights, decay, input_gate)
        causal = torch.ones(length, length, dtype=torch.bool).tril() if mask is None else mask(length)
        log_weights = log_weights.masked_fill(~causal, -math.inf)
        row_max = log_weights.amax(-1, keepdim=True)
        combined = query @ key.mT * query.shape[-1] ** -0.5 * torch.exp(log_weights - row_max)
        if normaliser is None:
            scale = torch.maximum(combined.sum(-1, keepdim=True).abs(), torch.exp(-row_max)) + EPS
        else:
            scale = normaliser(combined, row_max)
        hidden = combined @ value / scale
        out = by_layer(hidden, weight) if norm else hidden
        return out + combined.mean() if side else out

    return form


def _written_mask(length):
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    causal[2, 5] = True
    return causal


def _halved_in_place(log_weights, decay, input_gate):
    decay.mul_(0.5)
    return decay[..., :, None] - decay[..., None, :] + input_gate[..., None, :]


def _behind_zeros(log_weights, decay, input_gate):
    """The first gate is sliced off and a zero put in its place."""
    first = torch.zeros_like(input_gate[..., :1])
    shifted = torch.cat([first, input_gate[..., 1:]], -1)
    return decay[..., :, None] - decay[..., None, :] + shifted[..., None, :]


def _without_gradient(log_weights, decay, input_gate):
    with torch.no_grad():
        log_weights = decay[..., :, None] - decay[..., None, :]
    return log_weights + input_gate[..., None, :]


def anti_causal(query, key, value, input_gate, forget_gate, weight):
    """The exponents are transposed after the mask was applied."""
    length = query.shape[2]
    decay = F.logsigmoid(forget_gate).cumsum(-1)
    other = decay[..., None, :] - decay[..., :, None] + input_gate[..., :, None]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    log_weights = torch.where(causal, other, -math.inf).transpose(-2, -1)
    row_max = log_weights.amax(-1, keepdim=True)
    combined = query @ key.mT * query.shape[-1] ** -0.5 * torch.exp(log_weights - row_max)
    normaliser = torch.maximum(combined.sum(-1, keepdim=True).abs(), torch.exp(-row_max)) + EPS
    return by_layer(combined @ value / normaliser, weight)


def _leaky(combined, row_max):
    """Nobody uses the result of an op that writes to its operand, as its third argument says."""
    F.leaky_relu(combined, 0.1, True)
    return torch.maximum(combined.sum(-1, keepdim=True).abs(), torch.exp(-row_max)) + EPS


def by_name(query, key, value, input_gate, forget_gate, weight):
    """Operands are passed by their names."""
    length = query.shape[2]
    decay = F.logsigmoid(input=forget_gate).cumsum(dim=-1)
    column = (input_gate - decay)[..., None].permute(dims=(0, 1, 3, 2))
    later = torch.logical_not(input=torch.ones(length, length, dtype=torch.bool).tril(diagonal=0))
    log_weights = (decay[..., None] + column).masked_fill(mask=later, value=-math.inf)
    row_max = torch.amax(input=log_weights, dim=-1, keepdim=True)
    weights = torch.exp(input=log_weights - row_max)
    combined = query @ key.swapaxes(axis0=-1, axis1=-2) * query.shape[-1] ** -0.5 * weights
    floor = torch.exp(input=torch.neg(input=row_max))
    normaliser = torch.maximum(torch.abs(input=torch.sum(input=combined, dim=-1, keepdim=True)), floor) + EPS
    return by_layer(combined @ value / normaliser, weight)


PLAIN = {"repeated": repeated, "broadcast": broadcast, "compared": compared, "transposed": transposed, "by_name": by_name}
PLAIN["of_layers"] = of_layers
NEAR_MISSES = {
    "normaliser_of_one": _with(normaliser=lambda c, m: torch.clamp(c.sum(-1, keepdim=True).abs(), min=1.0)),
    "normaliser_signed": _with(normaliser=lambda c, m: torch.maximum(c.sum(-1, keepdim=True), torch.exp(-m)) + EPS),
    "normaliser_of_other_floor": _with(normaliser=lambda c, m: torch.maximum(c.sum(-1, keepdim=True).abs(), torch.exp(m))),
    "banded_mask": _with(mask=lambda n: torch.ones(n, n, dtype=torch.bool).tril().triu(-5)),
    "strict_mask": _with(mask=lambda n: torch.ones(n, n, dtype=torch.bool).tril(-1) | torch.eye(n, dtype=torch.bool)),
    "gate_on_rows": _with(exponent=lambda d, decay, i: decay[..., :, None] - decay[..., None, :] + i[..., :, None]),
    "anti_causal": anti_causal,
    "written_at_a_position": _with(normaliser=_leaky),
    "written_mask": _with(mask=_written_mask),
    "mask_of_three_dims": _with(mask=lambda n: torch.ones(3, n, n, dtype=torch.bool).tril()),
    "range_with_an_end": _with(mask=lambda n: torch.arange(3, end=n + 3)[:, None] >= torch.arange(n)),
    "flipped_bits": _with(mask=lambda n: (~torch.ones(n, n).triu(1).to(torch.int32)).bool()),
    "halved_in_place": _with(exponent=_halved_in_place),
    "without_gradient": _with(exponent=_without_gradient),
    "integer_sums": _with(
        exponent=lambda d, decay, i: (
            (c := (10 * decay).to(torch.int32).cumsum(-1))[..., :, None] - c[..., None, :] + i[..., None, :]
        )
    ),
    "gate_of_other_heads": _with(
        exponent=lambda d, decay, i: decay[..., :, None] - decay.flip(1)[..., None, :] + i[..., None, :]
    ),
    "gate_twice": _with(exponent=lambda d, decay, i: d + i[..., None, :]),
    "reversed_decay": _with(exponent=lambda d, decay, i: decay[..., None, :] - decay[..., :, None] + i[..., None, :]),
    "side_output": _with(side=True),
    "in_place": _with(exponent=_in_place),
    "normaliser_doubled": _with(
        normaliser=lambda c, m: torch.add(torch.maximum(c.sum(-1, keepdim=True).abs(), torch.exp(-m)), EPS, alpha=2e5)
    ),
    "quotient_rounded": _with(
        normaliser=lambda c, m: torch.maximum(
            torch.div(c.sum(-1, keepdim=True), 0.1, rounding_mode="floor").abs(), torch.exp(-m)
        )
    ),
}
