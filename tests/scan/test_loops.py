"""Linear recurrences in a Python loop over time, which become a scan, and loops that stay as they are."""

import contextlib

import pytest
import torch

from inductor_ext.core.report import collect
from inductor_ext.options import Options
from inductor_ext.scan import loops
from tests.attention.case import relative_error
from tests.support.interpreter import DEVICES, INTERPRETED, triton_on_cpu

from .loop_programs import SCANS, as_in_recurrent_gemma, backwards, in_chunks, last_state, of_expressions, stacked
from .loops_that_stay import OTHERS

LENGTH = 11


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


@pytest.mark.breadth(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", SCANS, ids=lambda f: f.__name__)
def test_loops_that_are_scans(function, device):
    (results, grads), decisions = compiled(function, operands(), device)
    assert [d.path for d in decisions] == ["scan"] * SCANS[function]
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


@INTERPRETED
@pytest.mark.breadth(3)
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
def deep_before(a, x, h):
    for _ in range(1200):
        h = (h * 1.0001).tanh()
    return last_state(a, x, h)


def deep_behind(a, x, h):
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
    for _ in range(1200):
        h = (h * 1.0001).tanh()
    return torch.stack([h, -h])


@pytest.mark.parametrize(("function", "path"), [(deep_before, "stock"), (deep_behind, "scan")])
def test_a_long_chain_is_read_without_recursion(function, path):
    """A chain of element-wise ops is deeper than Python's recursion goes."""

    def backend(gm, inputs):
        loops.rewrite(gm, Options())
        return gm

    torch._dynamo.reset()
    with collect() as report, contextlib.nullcontext() if path == "stock" else triton_on_cpu():
        torch.compile(function, backend=backend, dynamic=False)(*operands())
    assert [d.path for d in report.decisions if d.pass_name == "time_loops"] == [path]
