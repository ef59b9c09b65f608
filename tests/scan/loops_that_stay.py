"""Loops over time that must stay as they are, because the scan would have other results or other effects."""

import torch

from .loop_programs import stacked


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


def expressions_cast_within(a, x, h):
    """What is between a state and what is assembled is in a region of autocast."""
    outs = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        with torch.autocast(x.device.type, torch.bfloat16):
            y = h.exp()
        outs.append(y * 2)
    return torch.stack(outs, 1)


def steps_within(a, x, h):
    """Only the last state is read."""
    operands = [(a[:, t], x[:, t]) for t in range(x.shape[1])]
    for factor, addend in operands:
        with torch.autocast(x.device.type, torch.bfloat16):
            h = factor * h + addend
    return h


def stacked_within(a, x, h):
    outs = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        outs.append(h.exp())
    with torch.autocast(x.device.type, torch.bfloat16):
        return torch.stack(outs, 1)


def operands_cast_within(a, x, h):
    outs = []
    for t in range(x.shape[1]):
        with torch.autocast(x.device.type, torch.bfloat16):
            factor = a[:, t].sigmoid()
        h = factor * h + x[:, t]
        outs.append(h)
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
OTHERS += (expressions_cast_within, operands_cast_within, stacked_within)
OTHERS += (steps_within,)
OTHERS += (partly_without_gradient, changed_in_between, changed_for_each_step)
