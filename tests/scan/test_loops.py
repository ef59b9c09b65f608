"""Linear recurrences in a Python loop over time, which become a scan, and loops that stay as they are."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from inductor_ext.core.report import collect
from inductor_ext.options import Options
from inductor_ext.scan import loops
from tests.attention.case import relative_error
from tests.support.interpreter import DEVICES, INTERPRETED, triton_on_cpu

LENGTH = 11


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
    y, outs, others = h, [], []
    for t in range(x.shape[1]):
        h, y = 0.9 * h + x[:, t], a[:, 0].exp() * y + x[:, t]
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
    outs, others, g = [], [], x
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        outs.append(h)
    ys = torch.stack(outs, 1)
    for t in range(x.shape[1]):
        g = ys * g + x[:, t, None]
        others.append(g)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        out[:, t] = h
    return torch.stack(others, 1), torch.sum(input=out, dim=1)


SCANS = (
    as_in_recurrent_gemma,
    stacked,
    of_expressions,
    backwards,
    of_constants,
    broadcast,
    twice,
    last_state,
    of_other_dims,
)
SCANS += (checkpointed, changed_result, quotients, of_deep_expressions, of_other_strides, of_all_results)


def operands(dtype=torch.float32, length=LENGTH):
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(2, length, 5, generator=generator).to(dtype)
    return a, torch.randn(2, length, 5, generator=generator).to(dtype), torch.randn(2, 5, generator=generator).to(dtype)


def results_and_gradients(run, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    results = run(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    weights = [torch.linspace(-1, 1, y.numel(), device=y.device).bfloat16().to(y).view(y.shape) for y in results]
    grads = torch.autograd.grad(results, leaves, weights, allow_unused=True)
    return [y.detach().cpu() for y in results], [None if g is None else g.cpu() for g in grads]


def compiled(function, tensors, device):
    torch._dynamo.reset()
    run = torch.compile(function, backend="gradfuse", fullgraph=True, dynamic=False)
    with collect() as report:
        if device == "cuda":
            found = results_and_gradients(run, [t.cuda() for t in tensors])
        else:
            with triton_on_cpu():
                found = results_and_gradients(run, tensors)
    return found, [d for d in report.decisions if d.pass_name == "time_loops"]


@pytest.mark.breadth(6)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", SCANS, ids=lambda f: f.__name__)
def test_loops_that_are_scans(function, device):
    (results, grads), decisions = compiled(function, operands(), device)
    assert {d.path for d in decisions} == {"scan"}
    want_results, want_grads = results_and_gradients(function, [t.double() for t in operands()])
    for got, want in zip(results + grads, want_results + want_grads, strict=True):
        assert (got is None) == (want is None)
        assert want is None or (got.shape == want.shape and relative_error(got, want) < 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_half_precision(device):
    """The states are in fp32 in the loop, and so is the scan. Its result is rounded once."""
    tensors = operands(torch.bfloat16)
    (results, grads), decisions = compiled(as_in_recurrent_gemma, tensors, device)
    assert [d.path for d in decisions] == ["scan"] and results[0].dtype is torch.bfloat16
    want_results, want_grads = results_and_gradients(as_in_recurrent_gemma, [t.double() for t in tensors])
    for got, want in zip(results + grads, want_results + want_grads, strict=True):
        assert relative_error(got, want) <= 1.05 * relative_error(want.to(got.dtype), want) + 1e-6


def test_strides_are_those_of_the_loop():
    (results, _), _ = compiled(backwards, operands(), "interpreter")
    assert all(y.is_contiguous() for y in results)


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


OTHERS = (read_within, partly_filled, filled_input, changed_operand, changed_state, nonlinear, gated_by_the_state)
OTHERS += (with_a_shift, used_one_by_one, under_no_grad, shuffled, changed_outside, changed_derived, cleared_part)
OTHERS += (gates_without_gradient, assigned_without_gradient, of_an_earlier_value, rounded_states, shared_products)
OTHERS += (under_a_transform, cleared_before_the_last_op, growing, cast_within)


@INTERPRETED
@pytest.mark.breadth(6)
@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_loops_that_stay(function):
    (results, grads), decisions = compiled(function, operands(), "interpreter")
    assert all(d.path == "stock" and d.why for d in decisions)
    want_results, want_grads = results_and_gradients(function, [t.double() for t in operands()])
    for got, want in zip(results + grads, want_results + want_grads, strict=True):
        assert (got is None) == (want is None) and (want is None or relative_error(got, want) < 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_loops_that_follow_each_other(device):
    (results, grads), decisions = compiled(in_chunks, operands(length=16), device)
    assert [d.path for d in decisions] == ["scan"] * 2
    want_results, want_grads = results_and_gradients(in_chunks, [t.double() for t in operands(length=16)])
    for got, want in zip(results + grads, want_results + want_grads, strict=True):
        assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_a_constant_factor_is_not_rounded(device):
    """0.97 in bf16 is another decay, and its error grows with the length."""

    def function(x):
        h, outs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = 0.97 * h + x[:, t]
            outs.append(h)
        return torch.stack(outs, 1)

    x = torch.randn(2, 60, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    (results, grads), _ = compiled(function, [x], device)
    want_results, want_grads = results_and_gradients(function, [x.double()])
    for got, want in zip(results + grads, want_results + want_grads, strict=True):
        assert relative_error(got, want) < 2e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [stacked, of_expressions], ids=lambda f: f.__name__)
def test_double_precision(function, device):
    """Also of what is computed in the kernel of the scan, behind it."""
    tensors = [t.double() + 1e-9 for t in operands()]
    (results, grads), decisions = compiled(lambda *xs: function(*xs) * 2, tensors, device)
    assert [d.path for d in decisions] == ["scan"]
    want_results, want_grads = results_and_gradients(lambda *xs: function(*xs) * 2, tensors)
    for got, want in zip(results + grads, want_results + want_grads, strict=True):
        assert want is None or relative_error(got, want) < 1e-13


@INTERPRETED
def test_results_do_not_share_memory():
    def function(a, x, h):
        outs = []
        for t in range(len(x)):
            h = a[t] * h + x[t]
            outs.append(h)
        return torch.stack(outs), torch.stack(outs), torch.cat(outs)

    a, x, h = operands()
    torch._dynamo.reset()
    with triton_on_cpu(), torch.no_grad():
        run = torch.compile(function, backend="gradfuse", dynamic=False)
        results = run(a.transpose(0, 1).contiguous(), x.transpose(0, 1).contiguous(), h)
    assert len({y.untyped_storage().data_ptr() for y in results}) == 3


@INTERPRETED
def test_a_stack_into_a_given_tensor():
    def function(a, x, h, out):
        outs = []
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
            outs.append(h)
        torch.stack(outs, 0, out=out)
        return out * 2

    tensors = (*operands(), torch.zeros(LENGTH, 2, 5))
    torch._dynamo.reset()
    with triton_on_cpu(), torch.no_grad():
        got = torch.compile(function, backend="gradfuse", dynamic=False)(*(t.clone() for t in tensors))
    assert relative_error(got, function(*tensors)) < 1e-6


@INTERPRETED
@pytest.mark.parametrize("batch", [0, 2])
def test_other_batches(batch):
    """Of a size that may change, and empty."""
    a, x, h = (t[:batch].clone() for t in operands())
    for t in (a, x, h) if batch else ():
        torch._dynamo.mark_dynamic(t, 0)
    torch._dynamo.reset()
    with triton_on_cpu(), torch.no_grad():
        got = torch.compile(stacked, backend="gradfuse")(a, x, h)
    assert got.shape == (batch, 5, LENGTH) and (not batch or relative_error(got, stacked(a, x, h)) < 1e-6)


@INTERPRETED
def test_short_loops_stay():
    assert not compiled(stacked, operands(length=7), "interpreter")[1]
    assert compiled(stacked, operands(length=8), "interpreter")[1]


@INTERPRETED
def test_a_result_may_be_changed_before_the_backward():
    """Autograd keeps the states of a scan. What the caller gets is a copy of them."""
    a, x, h = operands()
    torch._dynamo.reset()
    with triton_on_cpu():
        for function in (as_in_recurrent_gemma, last_two):
            leaves = [t.clone().requires_grad_() for t in (a, x, h)]
            results = torch.compile(function, backend="gradfuse", dynamic=False)(*leaves)
            weights = [torch.linspace(-1, 1, y.numel()).view(y.shape) for y in results]
            total = sum((y * weight).sum() for y, weight in zip(results, weights, strict=True))
            with torch.no_grad():
                for y in results:
                    y.zero_()
            grads = torch.autograd.grad(total, leaves)
            exact = [t.double().requires_grad_() for t in (a, x, h)]
            want = torch.autograd.grad(function(*exact), exact, [w.double() for w in weights])
            for got, one in zip(grads, want, strict=True):
                assert relative_error(got, one) < 1e-6


def last_two(a, x, h):
    out, last = as_in_recurrent_gemma(a, x, h)
    return last, out


@INTERPRETED
def test_on_a_cpu_the_loop_stays():
    torch._dynamo.reset()
    with collect() as report:
        torch.compile(stacked, backend="gradfuse", dynamic=False)(*operands())
    assert [d.path for d in report.decisions if d.pass_name == "time_loops"] == ["stock"]


@INTERPRETED
def test_a_long_loop_is_read_without_recursion():
    """A chain of element-wise ops is deeper than Python's recursion goes."""

    def function(a, x, h):
        for _ in range(1200):
            h = (h * 1.0001).tanh()
        return last_state(a, x, h)

    def backend(gm, inputs):
        loops.rewrite(gm, Options())
        return gm

    torch._dynamo.reset()
    with collect() as report:
        torch.compile(function, backend=backend, dynamic=False)(*operands())
    assert [d.path for d in report.decisions if d.pass_name == "time_loops"] == ["stock"]
