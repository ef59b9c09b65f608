"""Loops over time as people write them that are linear recurrences. Others are in loops_that_stay.py.

Every program takes a, x [B, T, D] and the state before the loop, h [B, D].
"""

import torch
from torch.utils.checkpoint import checkpoint


def as_in_recurrent_gemma(a, x, h):
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = a[:, t].type(torch.float32) * h.to(a.device)
        h = h + x[:, t].type(torch.float32)
        out[:, t] = h.type(x.dtype)
    return out, h


def stacked(a, x, h):
    outs = []
    for t in range(x.shape[1]):
        h = x.select(1, t) + h * a.select(1, t)
        outs.append(h)
    return torch.stack(outs, dim=-1)


def of_expressions(a, x, h):
    """An exponential moving average from the first element on, and what follows it in the loop."""
    h, outs = x[:, 0], []
    for t in range(1, x.shape[1]):
        gate = torch.sigmoid(a[:, t])
        h = gate * h + (1 - gate) * x[:, t]
        outs.append(torch.tanh(h * a[:, t]) - 0.5)
    return torch.stack(outs, 1)


def backwards(a, x, h):
    outs = []
    for t in reversed(range(x.shape[1])):
        h = a[:, t] * h + x[:, t]
        outs.append(h)
    return torch.stack(outs, 1), torch.stack(outs[::-1], 1)


def of_constants(a, x, h):
    y, decay, outs, others = h, a.mean(1), [], []
    for t in range(x.shape[1]):
        h, y = 0.9 * h + x[:, t], (-decay).exp() * y + x[:, t]
        outs.append(h)
        others.append(y)
    return torch.cat(outs, -1), torch.stack(others)


def broadcast(a, x, h):
    a, x, outs = a.mean(-1, keepdim=True), x[0], []
    for t in range(len(x)):
        h = a[:, t] * h + x[t]
        outs.append(h)
    return torch.stack(outs, 1)


def twice(a, x, h):
    y, last = as_in_recurrent_gemma(a, x, h)
    return as_in_recurrent_gemma(y.sigmoid(), y * 2, last)


def last_state(a, x, h):
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
    return h.sin()


def of_other_dims(a, x, h):
    a, x, h, outs = a.permute(1, 2, 0), x.permute(1, 2, 0), h.T, []
    for t in range(len(x)):
        h = a[t] * h + x[t, ...]
        outs.append(h)
    return torch.stack(outs)


def checkpointed(a, x, h):
    return checkpoint(stacked, a, x, h, use_reentrant=False).sin()


def changed_result(a, x, h):
    out = stacked(a, x, h)
    return out.mul(2).add_(1), out


def quotients(a, x, h):
    """Two recurrences in one loop, joined along an axis."""
    d, outs = h.exp(), []
    for t in range(x.shape[1]):
        h, d = a[:, t] * h + x[:, t], a[:, t] * d + x[:, t].exp()
        outs.append(h / d)
    return torch.cat(outs, axis=1)


def in_chunks(a, x, h):
    """Each loop begins with the last state of the one before it."""
    parts = []
    for a_part, x_part in zip(a.split(8, 1), x.split(8, 1), strict=True):
        outs = []
        for t in range(x_part.shape[1]):
            h = a_part[:, t] * h + x_part[:, t]
            outs.append(h)
        parts.append(torch.stack(outs, axis=1))
    return torch.cat(parts, 1)


def of_deep_expressions(a, x, h):
    """The sizes of these expressions are exponential if each use of an operand counts."""
    outs = []
    for t in range(x.shape[1]):
        gate = a[:, t]
        for _ in range(6):
            gate = gate * torch.sigmoid(gate)
        h = gate * h + x[:, t]
        outs.append(h)
    for _ in range(400):
        h = -h
    return torch.stack(outs, 1), h


def of_other_strides(a, x, h):
    """The result has the strides of x, so that this view of it exists."""
    x = x.transpose(0, 1).relu()
    out = torch.zeros_like(x)
    for t in range(len(x)):
        h = a[:, t] * h + x[t]
        out[t] = h
    return out.transpose(0, 1).view(2, -1)


def of_all_results(a, x, h):
    """The factor of the second loop is what the first one assembles, and is the first operand of the product."""
    outs, others, g, rows = [], [], x, x.unsqueeze(2)
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        outs.append(h)
    ys = torch.stack(outs, 1)
    for t in range(x.shape[1]):
        g = ys * g + rows[:, t]
        others.append(g)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        out[:, t] = h
    return torch.stack(others, 1), torch.sum(input=out, dim=1)


def beside_autocast(a, x, h):
    """As in a model whose rotary embeddings are computed in fp32."""
    with torch.autocast(x.device.type, enabled=False):
        a = a.sigmoid()
    y, _ = as_in_recurrent_gemma(a, x, h)
    with torch.autocast(x.device.type, enabled=False):
        return y.exp()


def as_in_mamba(a, x, h):
    """The states have one dim more than what is read of them, by a matrix product and an index (transformers' Mamba)."""
    n = torch.arange(1.0, 4.0, device=a.device)
    factors, added = torch.exp(-a.mT[..., None] * n), x.mT[..., None] * torch.cos(n)
    c, state, outs = torch.sin(a[:, :, :3] * n), h[..., None] * n, []
    for t in range(x.shape[1]):
        state = factors[:, :, t] * state + added[:, :, t]
        y = torch.matmul(state.to(x.dtype), c[:, t, :].unsqueeze(-1))
        outs.append(y[:, :, 0])
    return torch.stack(outs, dim=-1), state


def read_by_einsum(a, x, h):
    """The same, as in the reference of mamba_ssm, with x and the gate of a head spread in the loop."""
    c, state, outs = torch.sin(a[:, :, :3]), torch.stack([h, h * 2, h * 3], -1), []
    for t in range(x.shape[1]):
        state = a[:, t, :, None] * state + torch.sigmoid(x[:, t]).unsqueeze(-1)
        outs.append(torch.einsum("bdn, bn -> bd", state, c[:, t, :]))
    return torch.stack(outs, 2)


def read_by_sums(a, x, h):
    a, w, bias, outs, sums = a.mean(-1), torch.outer(h[0], h[1]), h.mean(0) + 1, [], []
    for t in reversed(range(x.shape[1])):
        h = a[None, :, t, None].squeeze(0) * h + x[:, t]
        outs.append(torch.nn.functional.linear(h, w, bias) + (w @ h.unsqueeze(-1)).squeeze(-1))
        sums.append((h[:, None] * x[:, t, :, None]).sum(dim=(1, -1)) + (h * h).sum(1))
    return torch.stack(outs, 1), torch.stack(sums)


#: The loops that are scans, and how many each program has.
SCANS = {
    as_in_recurrent_gemma: 1,
    stacked: 1,
    of_expressions: 1,
    backwards: 1,
    of_constants: 2,
    broadcast: 1,
    twice: 2,
    last_state: 1,
    of_other_dims: 1,
    checkpointed: 1,
    changed_result: 1,
    quotients: 2,
    of_deep_expressions: 1,
    of_other_strides: 1,
    of_all_results: 3,
    beside_autocast: 1,
    as_in_mamba: 1,
    read_by_einsum: 1,
    read_by_sums: 1,
}
