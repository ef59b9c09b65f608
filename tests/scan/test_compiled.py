"""Compiled scans and their gradients, by Triton's interpreter and on a GPU, in float64 against a plain loop."""

import contextlib
import importlib

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch._inductor.utils import run_and_get_code

from inductor_ext.compat import associative_scan_hop
from inductor_ext.ops.linear_scan import linear_scan
from tests.emitted import kernels_of
from tests.flex.case import relative_error
from tests.interpreter import INTERPRETED, triton_on_cpu

from .test_scan import COMBINES, decayed, gated, gradients, leaves, loop, total

associative_module = importlib.import_module("inductor_ext.ops.associative")

#: On every torch: what Dynamo, AOTAutograd and stock's code generation make of a scan differs between them.
DEVICES = [pytest.param("interpreter", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    with triton_on_cpu() if request.param == "interpreter" else contextlib.nullcontext():
        yield "cpu" if request.param == "interpreter" else "cuda"


def pointwise_scan(combine, xs, dim, reverse):
    """associative_scan in pointwise mode; on CPU tensors, which the front end refuses, what it does there on others."""
    if xs[0].is_cuda:
        pairs = lambda left, right: tuple(combine(*left, *right))  # noqa: E731
        return associative_scan(pairs, tuple(xs), dim, reverse=reverse, combine_mode="pointwise")
    views = [x.movedim(dim, 0) for x in xs]
    views = [x.flip(0) for x in views] if reverse else views
    ys = associative_scan_hop(lambda *flat: list(combine(*flat)), views, ())
    return tuple((y.flip(0) if reverse else y).movedim(0, dim) for y in ys)


def compiled(combine, dim=0, reverse=False, **options):
    torch._dynamo.reset()
    run = lambda *xs: pointwise_scan(combine, xs, dim, reverse)  # noqa: E731
    return torch.compile(run, backend="gradfuse", fullgraph=True, **options)


def check(combine, xs, ys, used, bound=1e-5):
    """The outputs, and the gradients through those at ``used``, of a scan along dim 0."""
    exact = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in xs]
    wants = loop(combine, exact)
    pairs = [*zip(ys, wants, strict=True), *zip(gradients(ys, xs, used), gradients(wants, exact, used), strict=True)]
    for got, want in pairs:
        if want is None:
            assert got is None or not got.any()
        elif want.is_floating_point():
            assert relative_error(got, want) < bound
        else:
            assert torch.equal(got, want)


#: Leaves that mix, that do not, that need no gradient, that are no numbers; the others are differentiated by test_scan.py.
QUICK = {"gated", "matrix_product", "log_space", "segmented", "largest_and_where"}


@pytest.mark.parametrize(
    "combine",
    [pytest.param(c, id=c.__name__, marks=[] if c.__name__ in QUICK else [pytest.mark.slow]) for c in COMBINES],
)
def test_against_a_loop(combine, device):
    xs = leaves(COMBINES[combine], 97, torch.float32, device)
    xs = [(x.detach() * 0.8).requires_grad_() if x.is_floating_point() else x for x in xs]
    check(combine, xs, compiled(combine)(*xs), range(len(xs)))


@pytest.mark.parametrize("combine", [gated, total], ids=lambda f: f.__name__)
def test_dynamic_lengths(combine, device):
    run = compiled(combine, dynamic=True)
    for length in (97, 8, 300):
        xs = leaves(COMBINES[combine], length, torch.float32, device)
        check(combine, xs, run(*xs), range(len(xs)))


@pytest.mark.parametrize("length", [1, 33, 100])
def test_in_two_levels(length, device, monkeypatch):
    monkeypatch.setattr(associative_module, "CHUNK", 16)
    monkeypatch.setattr(associative_module, "FEWEST_CHUNKS", 2)
    xs = leaves("ff", length, torch.float32, device)
    check(gated, xs, compiled(gated)(*xs), (0, 1))


def test_in_two_levels_with_dynamic_lengths(device, monkeypatch):
    monkeypatch.setattr(associative_module, "CHUNK", 16)
    monkeypatch.setattr(associative_module, "FEWEST_CHUNKS", 2)
    run = compiled(gated, dynamic=True)
    for length in (100, 37, 64):
        xs = leaves("ff", length, torch.float32, device)
        check(gated, xs, run(*xs), (0, 1))


def test_leaves_of_several_shapes(device):
    """Stock reads every leaf by the shape of the first."""
    shapes = [(3, 1), (3, 4)]
    xs = [(0.5 + 0.5 * torch.rand(97, *lanes, device=device)).requires_grad_() for lanes in shapes]
    check(gated, xs, compiled(gated)(*xs), (0, 1))


def test_captured_tensors(device):
    xs = leaves("ff", 97, torch.float32, device)
    rate = (0.5 + 0.4 * torch.rand(3, 2, device=device)).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (*xs, rate)]
    y = compiled(lambda *operands: decayed(*operands, rate))(*xs)[1]
    exactly = loop(lambda *operands: decayed(*operands, exact[2]), exact[:2])[1]
    weight = torch.randn_like(y)
    got = torch.autograd.grad(y, [*xs, rate], weight)
    want = torch.autograd.grad(exactly, exact, weight.double())
    assert max(map(relative_error, got, want)) < 1e-5


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_gradient_that_was_zero(dim, reverse, device):
    """pointwise mode, the gated recurrence: stock returns zeros for the gate. Results lie in memory as their operands."""
    xs = [(0.5 + torch.rand(4, 5, 6, device=device)), torch.randn(4, 5, 6, device=device)]
    xs = [x.requires_grad_() for x in xs]
    y = compiled(gated, dim, reverse)(*xs)[1]
    weight = torch.randn(y.shape, device=device)
    got = torch.autograd.grad(y, xs, weight)
    assert all(x.is_contiguous() for x in (y, *got))

    def forwards(x):
        x = x.detach().double().movedim(dim, 0)
        return x.flip(0) if reverse else x

    exact = [forwards(x).requires_grad_() for x in xs]
    want = torch.autograd.grad(loop(gated, exact)[1], exact, forwards(weight))
    for g, w in zip(got, want, strict=True):
        assert w.norm() > 0 and relative_error(forwards(g), w) < 1e-6


@INTERPRETED
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_one_kernel_forward_and_two_backward(dim):
    """Each stores two tensors once: the leaves; what of the leaves the gradient is of; the gradients of the operands."""
    xs = [torch.rand(4, 5, 6, requires_grad=True) for _ in range(2)]

    def step():
        compiled(gated, dim)(*xs)[1].backward(torch.rand(4, 5, 6))

    with triton_on_cpu():
        _, codes = run_and_get_code(step)
    stores = [kernel.count("tl.store(") for code in codes for kernel in kernels_of(code)]
    assert stores == [2, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, dim", [((2, 300, 1200), 1), ((700, 2048), 0), ((2, 33, 3, 512), 1), ((1, 2048), 0), ((70000, 2048), 0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_lanes(shape, dim, dtype):
    """Those of the kernel of linear_scan, against its eager loop in float64; the longest at its end alone."""
    xs = [(0.5 + 0.5 * torch.rand(shape, device="cuda")).to(dtype).requires_grad_() for _ in range(2)]
    ys = compiled(gated, dim)(*xs)
    got = gradients(ys, xs, (1,))
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).cuda()
    a, x, weight = (t.detach().double().movedim(dim, 0).flatten(1)[:, None] for t in (*xs, weight.to(dtype)))
    if shape[dim] > 1000:
        a, x, weight = a[-600:], x[-600:], weight[-600:]
    y = linear_scan(a[1:], x, False, torch.float64)
    gradient = linear_scan(a[1:], weight, True, torch.float64)
    of_gate = torch.cat([torch.zeros_like(y[:1]), gradient[1:] * y[:-1]])
    settled = slice(300, None) if shape[dim] > 1000 else slice(None)
    for found, want in zip((ys[1], *got), (y, of_gate, gradient), strict=True):
        found = found.movedim(dim, 0).flatten(1)[:, None][-len(want) :]
        bound = 1e-6 if dtype is torch.float32 else 6e-3
        assert relative_error(found[settled], want[settled]) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("length", [4096, 100_000, 131_072])
def test_few_long_rows(length):
    """In two levels, along the innermost dim; the gates let 300 elements through."""
    a = (0.8 + 0.1 * torch.rand(2, 3, length, device="cuda")).requires_grad_()
    x = torch.randn(2, 3, length, device="cuda", requires_grad=True)
    ys = compiled(gated, 2)(a, x)
    weight = torch.randn_like(x)
    got = torch.autograd.grad(ys[1], [a, x], weight)
    exact = [t.detach()[..., -1200:].double().movedim(-1, 0).flatten(1)[:, None] for t in (a, x, weight)]
    y = linear_scan(exact[0][1:], exact[1], False, torch.float64)
    gradient = linear_scan(exact[0][1:], exact[2], True, torch.float64)
    of_gate = torch.cat([torch.zeros_like(y[:1]), gradient[1:] * y[:-1]])
    for found, want in zip((ys[1], *got), (y, of_gate, gradient), strict=True):
        found = found.movedim(-1, 0).flatten(1)[:, None][-600:]
        assert relative_error(found, want[-600:]) < 1e-6
