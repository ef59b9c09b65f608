"""Loops over time as people write them: those that are a linear recurrence, and others that only look like it.

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
}


def read_within(a, x, h):
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        out[:, t] = h + out[:, t - 1]
    return out


def partly_filled(a, x, h):
    out = torch.zeros_like(x)
    for t in range(1, x.shape[1]):
        h = a[:, t] * h + x[:, t]
        out[:, t] = h
    return out


def filled_input(a, x, h):
    out = a * 2
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        out[:, t] = h
    return out


def changed_operand(a, x, h):
    x, outs = x * 1.5, []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        x[:, -1] += h
        outs.append(h)
    return torch.stack(outs, 1)


def changed_state(a, x, h):
    outs = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        outs.append(h)
    outs[-1].mul_(2)
    return torch.stack(outs, 1)


def nonlinear(a, x, h):
    outs = []
    for t in range(x.shape[1]):
        h = a[:, t] * torch.tanh(h) + x[:, t]
        outs.append(h)
    return torch.stack(outs, 1)


def gated_by_the_state(a, x, h):
    outs = []
    for t in range(x.shape[1]):
        h = a[:, t] * h.sigmoid() * h + x[:, t]
        outs.append(h)
    return torch.stack(outs, 1)


def with_a_shift(a, x, h):
    outs = []
    for t in range(1, x.shape[1]):
        h = a[:, t - 1] * h + x[:, t]
        outs.append(h)
    return torch.stack(outs, 1)


def used_one_by_one(a, x, h):
    outs = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        outs.append(h.sum(-1) @ h)
    return torch.stack(outs)


def under_no_grad(a, x, h):
    outs = []
    with torch.no_grad():
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
            outs.append(h)
    return torch.stack(outs, 1) * x


def shuffled(a, x, h):
    outs = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        outs.append(h)
    return torch.stack(outs[2:] + outs[:2], 1)


def changed_outside(a, x, h):
    """What is derived from the states reads a tensor that changes."""
    rest, outs = torch.ones((), device=x.device), []
    for t in range(x.shape[1]):
        h = 0.9 * h + 0.1 * x[:, t]
        rest.mul_(0.9)
        outs.append(h / (1 - rest))
    return torch.stack(outs, 1)


def changed_derived(a, x, h):
    outs = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        outs.append(h.tanh() * 2)
    outs[0].add_(1)
    return torch.stack(outs, 1)


def cleared_part(a, x, h):
    b, out = a * 1, torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        out[:, t] = h + b[:, t]
        b[:, t] = 0.0
    return out


def gates_without_gradient(a, x, h):
    outs = []
    for t in range(x.shape[1]):
        with torch.no_grad():
            gate = a[:, t].sigmoid()
        h = gate * h + x[:, t]
        outs.append(h)
    return torch.stack(outs, 1)


def assigned_without_gradient(a, x, h):
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        with torch.set_grad_enabled(t == x.shape[1] - 1):
            out[:, t] = h
    return out


def of_an_earlier_value(a, x, h):
    w = a.mean(1)
    total, outs = w.sigmoid().sum(), []
    w.mul_(0.5)
    for t in range(x.shape[1]):
        h = w.sigmoid() * h + (x[:, t] + w)
        outs.append(h)
    return torch.stack(outs, 1) * total


def rounded_states(a, x, h):
    outs = []
    for t in range(x.shape[1]):
        h = a[:, t] * h.to(torch.int32) + x[:, t] * 3
        outs.append(h)
    return torch.stack(outs, 1)


def shared_products(a, x, h):
    outs, products = [], []
    for t in range(x.shape[1]):
        product = a[:, t] * h
        h = product + x[:, t]
        outs.append(h)
        products.append(product)
    return torch.stack(outs, 1), torch.stack(products, 1)


def under_a_transform(a, x, h):
    return torch.func.grad(lambda a: stacked(a, x, h).sin().sum())(a)


def cleared_before_the_last_op(a, x, h):
    w, outs = h * 2, []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        outs.append(h + w)
    w.zero_()
    return torch.stack([out.exp() for out in outs], 1)


def growing(a, x, h):
    outs = []
    for t in range(x.shape[1]):
        h = 8.0 * h + x[:, t]
        outs.append(h)
    return torch.stack(outs, 1)


def cast_within(a, x, h):
    outs = []
    with torch.autocast(x.device.type, torch.bfloat16):
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
            outs.append(h.exp())
    return torch.stack(outs, 1)


def results_cast_within(a, x, h):
    outs = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        with torch.autocast(x.device.type, torch.bfloat16):
            outs.append(h.exp())
    return torch.stack(outs, 1)


def partly_without_gradient(a, x, h):
    """What is between a state and what is assembled has no gradient."""
    outs = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        with torch.no_grad():
            double = h * 2
        outs.append(double + x[:, t])
    return torch.stack(outs, 1)


def changed_in_between(a, x, h):
    outs = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        double = h * 2
        if t == 5:
            double.add_(1)
        outs.append(double * 3)
    return torch.stack(outs, 1)


def changed_for_each_step(a, x, h):
    """The same tensor is read by every step, and changes between them."""
    b, outs = torch.ones_like(h), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + (x[:, t] + b)
        b.mul_(0.5)
        outs.append(h)
    return torch.stack(outs, 1)


OTHERS = (read_within, partly_filled, filled_input, changed_operand, changed_state, nonlinear, gated_by_the_state)
OTHERS += (with_a_shift, used_one_by_one, under_no_grad, shuffled, changed_outside, changed_derived, cleared_part)
OTHERS += (gates_without_gradient, assigned_without_gradient, of_an_earlier_value, rounded_states, shared_products)
OTHERS += (under_a_transform, cleared_before_the_last_op, growing, cast_within, results_cast_within)
OTHERS += (partly_without_gradient, changed_in_between, changed_for_each_step)
