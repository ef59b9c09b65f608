"""The gradient of associative_scan, by one pass backwards in time, compared with autograd of a loop in float64."""

import importlib
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import symbolic_trace

from inductor_ext.scan.scan import scan
from tests.attention.case import relative_error

# In the package, the module's name is bound to the op.
associative_module = importlib.import_module("inductor_ext.scan.associative")
linear_scan_module = importlib.import_module("inductor_ext.core.linear_scan")
plan_module = importlib.import_module("inductor_ext.scan.plan")
linear_scan = linear_scan_module.linear_scan


def gated(a1, x1, a2, x2):
    return a1 * a2, x1 * a2 + x2


def total(x1, x2):
    return (x1 + x2,)


def product(x1, x2):
    return (x1 * x2,)


def largest(x1, x2):
    return (torch.maximum(x1, x2),)


def logsumexp(x1, x2):
    return (torch.logaddexp(x1, x2),)


def complex_product(r1, i1, r2, i2):
    return r1 * r2 - i1 * i2, r1 * i2 + i1 * r2


def matrix_product(a1, b1, c1, d1, a2, b2, c2, d2):
    """The later matrix times the earlier one."""
    return a2 * a1 + b2 * c1, a2 * b1 + b2 * d1, c2 * a1 + d2 * c1, c2 * b1 + d2 * d1


def upper_triangular(a1, b1, d1, a2, b2, d2):
    """b depends on the other leaves, and they do not depend on b."""
    return a2 * a1, a2 * b1 + b2 * d1, d2 * d1


def log_space(la1, lx1, la2, lx2):
    return la1 + la2, torch.logaddexp(lx1 + la2, lx2)


def affine_pairs(a1, x1, y1, a2, x2, y2):
    """Two states have one gate."""
    return a1 * a2, x1 * a2 + x2, y1 * a2 + y2


def unrelated(x1, y1, x2, y2):
    return x1 + x2, y1 * y2


def two_gates(a1, b1, x1, a2, b2, x2):
    return a1 * a2, b1 * b2, x1 * a2 * b2 + x2


def delayed(a1, x1, z1, a2, x2, z2):
    """A recurrence z that is driven by another recurrence, x."""
    return a1 * a2, x1 * a2 + x2, z1 + z2 + 0 * x1


def segmented(flag1, x1, flag2, x2):
    """A sum that starts again at each flag (an integer leaf) that is set."""
    return flag1 | flag2, torch.where(flag2 != 0, x2, x1 + x2)


def largest_and_where(x1, i1, x2, i2):
    later = x2 > x1
    return torch.where(later, x2, x1), torch.where(later, i2, i1)


def softmax_denominator(m1, s1, m2, s2):
    """The maximum of logits so far, and the sum of their exponentials relative to it. The leaves interact."""
    m = torch.maximum(m1, m2)
    return m, s1 * torch.exp(m1 - m) + s2 * torch.exp(m2 - m)


COMBINES = {
    gated: "ff",
    total: "f",
    product: "f",
    largest: "f",
    logsumexp: "f",
    complex_product: "ff",
    matrix_product: "ffff",
    upper_triangular: "fff",
    log_space: "ff",
    affine_pairs: "fff",
    unrelated: "ff",
    two_gates: "fff",
    delayed: "fff",
    segmented: "if",
    largest_and_where: "fi",
    softmax_denominator: "ff",
}


def leaves(kinds, length, dtype=torch.float64, device="cpu"):
    made = []
    for kind in kinds:
        if kind == "i":
            made.append(torch.randint(0, 2, (length, 3, 2), device=device))
        else:
            made.append((0.5 + torch.rand(length, 3, 2, dtype=dtype, device=device)).requires_grad_())
    return made


def loop(combine, xs):
    ys = [tuple(x[0] for x in xs)]
    for t in range(1, len(xs[0])):
        ys.append(tuple(combine(*ys[-1], *(x[t] for x in xs))))
    return [torch.stack(y) for y in zip(*ys, strict=True)]


def gradients(ys, xs, used, seed=0):
    """The gradients of the outputs at ``used``, with random weights, for every leaf that has a gradient."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [y for at, y in enumerate(ys) if y.is_floating_point() and at in used]
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in chosen]
    floating = [x for x in xs if x.requires_grad]
    return torch.autograd.grad(chosen, floating, weights, allow_unused=True)


def backwards(combine, xs):
    """``loop``, run from the end."""
    return [y.flip(0) for y in loop(combine, [x.flip(0) for x in xs])]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("combine", COMBINES, ids=lambda f: f.__name__)
def test_against_a_loop(combine, length, reverse):
    xs = leaves(COMBINES[combine], length)
    exactly = backwards if reverse else loop
    ys, wants = scan(combine, xs, reverse=reverse), exactly(combine, xs)
    for y, want in zip(ys, wants, strict=True):
        torch.testing.assert_close(y, want)
    everything = range(len(xs))
    for used in (everything, everything[-1:], everything[:1]):
        if not any(ys[i].is_floating_point() for i in used):
            continue
        got = gradients(scan(combine, xs, reverse=reverse), xs, used)
        exact = gradients(exactly(combine, xs), xs, used)
        for g, e in zip(got, exact, strict=True):
            zero = torch.zeros_like(xs[0], dtype=torch.float64)
            torch.testing.assert_close(zero if g is None else g, zero if e is None else e)


@pytest.fixture
def small_chunks(monkeypatch):
    """Scan more than one leaf always in two levels, and from 16 elements on in three."""
    monkeypatch.setattr(associative_module, "CHUNK", 4)
    monkeypatch.setattr(associative_module, "FEWEST_CHUNKS", 1)
    monkeypatch.setattr(associative_module, "uses_triton_on_cpu", lambda: True)


@pytest.mark.parametrize("length", [4, 7, 37])
@pytest.mark.parametrize("combine", [c for c, kinds in COMBINES.items() if len(kinds) > 1], ids=lambda f: f.__name__)
def test_in_two_levels(combine, length, small_chunks):
    xs = leaves(COMBINES[combine], length)
    with mock.patch.object(associative_module, "associative_scan_hop", wraps=associative_module.associative_scan_hop) as hop:
        ys = scan(combine, xs)
    assert [call.args[1][0].shape[0] for call in hop.call_args_list] == {4: [4, 1], 7: [4, 2], 37: [4, 4, 3]}[length]
    for y, want in zip(ys, loop(combine, xs), strict=True):
        torch.testing.assert_close(y, want)
    everything = range(len(xs))
    exact = gradients(loop(combine, xs), xs, everything)
    for got, want in zip(gradients(ys, xs, everything), exact, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once_in_two_levels(dtype, small_chunks):
    xs = [x.detach().to(dtype) for x in leaves("ff", 100)]
    once = [y.to(dtype) for y in loop(gated, [x.float() for x in xs])]
    exact = loop(gated, [x.double() for x in xs])
    for got, rounded, want in zip(scan(gated, xs), once, exact, strict=True):
        assert got.dtype == dtype and relative_error(got, want) <= 1.2 * relative_error(rounded, want)


def test_few_long_rows_alone_are_cut():
    def cut(*shape, count=2):
        with mock.patch.object(associative_module, "uses_triton_on_cpu", lambda: True):
            return associative_module.long_and_few([torch.empty(shape, device="meta")] * count)

    assert cut(131072, 1, 16) and cut(131072)
    assert not cut(131072, 512) and not cut(2048, 4) and not cut(131072, 16, count=1)


def test_leaves_of_several_shapes():
    """One gate for all channels of a head, and one gate for all elements of a time."""
    xs = [(0.5 + torch.rand(9, *channels, dtype=torch.float64)).requires_grad_() for channels in ((3, 1), (3, 4), ())]

    def combine(a1, x1, b1, a2, x2, b2):
        return a1 * a2, x1 * a2 * b2 + x2, b1 * b2

    ys, wants = scan(combine, xs), loop(combine, xs)
    assert [y.shape for y in ys] == [x.shape for x in xs]
    for got, want in zip((*ys, *gradients(ys, xs, (0, 1, 2))), (*wants, *gradients(wants, xs, (0, 1, 2))), strict=True):
        torch.testing.assert_close(got, want)


def decayed(t1, y1, t2, y2, rate):
    """y decays by a captured rate, for a duration t."""
    return t1 + t2, y1 * rate**t2 + y2


@pytest.mark.parametrize("shape", [(3, 2), (2,), (3, 1), ()])
def test_captured_tensors_have_gradients(shape):
    xs = leaves("ff", 9)
    rate = (0.5 + torch.rand(shape, dtype=torch.float64)).requires_grad_()
    ys = scan(decayed, xs, (rate,))
    assert len(ys) == 2
    wants = loop(lambda *operands: decayed(*operands, rate), xs)
    weights = [torch.randn_like(y) for y in ys]
    got, exact = (torch.autograd.grad(out, [*xs, rate], weights) for out in (ys, wants))
    for a, b in zip((*ys, *got), (*wants, *exact), strict=True):
        torch.testing.assert_close(a, b)


def shifted(y1, y2, rate):
    return y1 + y2 + rate


def driven_from_two_on(y1, y2, rate):
    return y1 + y2 * torch.where(y2 + rate >= 2, rate, 0 * rate)


@pytest.mark.parametrize("combine, rate", [(shifted, 0.95), (driven_from_two_on, 0.0045)])
def test_the_gradient_of_a_captured_number_is_rounded_once(combine, rate):
    """Its terms are added in fp32. Only the values are rounded: 1.9921875 + 0.0045 is two in bf16, and less in fp32."""
    traced = symbolic_trace(combine)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x, weight = (torch.randn(97, 2, 3, generator=generator).bfloat16() for _ in range(2))
        x[::7] = 1.9921875
        x.requires_grad_()
        c = torch.tensor(rate, dtype=torch.bfloat16, requires_grad=True)
        (y,) = scan(traced, [x], (c,))
        (got,) = torch.autograd.grad(y, c, weight)
        through = weight.double().flip(0).cumsum(0).flip(0)[1:]
        terms = through if combine is shifted else through * torch.where(x + c >= 2, x, 0).double()[1:]
        exact = terms.sum().detach()
        assert abs(got.double() - exact) <= 1.2 * abs(exact.bfloat16().double() - exact) + 1e-5 * abs(terms).sum()


def mantissa(y1, y2, rate):
    return y1 + y2 + torch.frexp(rate).mantissa


def length(y1, y2, rate):
    return y1 + y2 + torch.complex(rate.float(), y2.float()).abs().to(y2.dtype)


@pytest.mark.parametrize("combine", [mantissa, length])
def test_captured_numbers_behind_several_and_complex_results(combine):
    xs, c = torch.randn(20, 3).bfloat16(), torch.tensor(0.75, dtype=torch.bfloat16, requires_grad=True)
    (y,) = scan(symbolic_trace(combine), [xs], (c,))
    (got,) = torch.autograd.grad(y.sum(), c)
    exact = c.detach().double().requires_grad_()
    wide = [x.double() for x in xs]
    total = wide[0]
    outputs = [total]
    for x in wide[1:]:
        total = combine(total, x, exact)
        outputs.append(total)
    (want,) = torch.autograd.grad(torch.stack(outputs).sum(), exact)
    assert relative_error(got, want) < 0.01


def test_captured_numbers():
    xs = leaves("ff", 9)
    (got,), (want,) = (
        torch.autograd.grad(y[1].sum(), xs[1])
        for y in (scan(decayed, xs, (2,)), loop(lambda *operands: decayed(*operands, 2), xs))
    )
    torch.testing.assert_close(got, want)


MAPS = {
    "exp": (torch.exp, torch.log),
    "sinh": (torch.sinh, torch.asinh),
    "scaled": (lambda x: 3 * x, lambda x: x / 3),
    "cubed": (lambda x: x**3, lambda x: x ** (1 / 3)),
    "inverse": (torch.reciprocal, torch.reciprocal),
}


@given(st.sampled_from(list(MAPS)), st.sampled_from(list(MAPS)), st.integers(2, 12), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_affine_maps_conjugated(of_gate, of_state, length, seed):
    """These functions are associative by construction: affine maps whose two numbers go through bijections."""
    (gate_to, gate_from), (state_to, state_from) = MAPS[of_gate], MAPS[of_state]

    def combine(a1, x1, a2, x2):
        a1, a2, x1, x2 = gate_from(a1), gate_from(a2), state_from(x1), state_from(x2)
        return gate_to(a1 * a2), state_to(x1 * a2 + x2)

    generator = torch.Generator().manual_seed(seed)
    plain = [0.5 + 0.5 * torch.rand(length, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    xs = [to(x).requires_grad_() for to, x in zip((gate_to, state_to), plain, strict=True)]
    for got, want in zip(gradients(scan(combine, xs), xs, (0, 1)), gradients(loop(combine, xs), xs, (0, 1)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_many_channels_take_the_linear_scan(graph, dtype):
    """The forward (if the combine_fn is known to be a gated recurrence) and the backward, by the op's eager code."""
    a, x = (0.5 + 0.5 * torch.rand(4, 11, 3, 20).to(dtype) for _ in range(2))
    xs = [t.movedim(1, 0).requires_grad_() for t in (a, x)]
    combine = torch.fx.symbolic_trace(gated) if graph else gated
    calls = []

    def counting(*operands):
        calls.append(operands[4])
        return linear_scan(*operands)

    with (
        mock.patch.object(plan_module, "supported", lambda x: True),
        mock.patch.object(linear_scan_module, "linear_scan", counting),
    ):
        ys = scan(combine, xs)
        got = gradients(ys, xs, (1,))
    assert calls == ([False, True] if graph else [True])
    exact = [t.detach().double().requires_grad_() for t in xs]
    want = loop(gated, exact)
    bound = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 6e-3}[dtype]
    for g, e in zip((ys[1], *got), (want[1], *gradients(want, exact, (1,))), strict=True):
        assert relative_error(g, e) < bound and g.dtype == dtype


def test_leaves_that_need_no_gradient():
    a, x = leaves("ff", 7)
    (want,) = gradients(loop(gated, [a.detach(), x]), [x], (1,))
    (got,) = gradients(scan(gated, [a.detach(), x]), [x], (1,))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    "combine, scans", [(gated, [2, 2]), (total, [1, 1]), (product, [1, 2]), (matrix_product, [4, 6, 6])]
)
def test_only_what_meets_is_scanned(combine, scans):
    """The number of leaves in each scan: first the forward, then the gradient through the last leaf.

    A gated recurrence scans one coefficient and one value, and not six leaves. A sum scans no coefficient. A matrix product
    scans its two columns separately.
    """
    with mock.patch.object(associative_module, "associative_scan_hop", wraps=associative_module.associative_scan_hop) as hop:
        xs = leaves(COMBINES[combine], 7)
        gradients(scan(combine, xs), xs, (0,) if len(xs) == 1 else (1,) if len(xs) == 2 else range(4))
    assert [len(call.args[1]) for call in hop.call_args_list] == scans
