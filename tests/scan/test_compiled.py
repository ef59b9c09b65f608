"""Compiled scans and their gradients, in Triton's interpreter and on a GPU, compared with a plain loop in float64."""

import contextlib
import importlib
import re

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch._inductor.utils import run_and_get_code

from inductor_ext.core.linear_scan import linear_scan
from inductor_ext.torch_api.higher_order import associative_scan_hop
from tests.attention.case import relative_error
from tests.support.emitted import kernels_of
from tests.support.interpreter import INTERPRETED, triton_on_cpu

from .test_scan import (
    COMBINES,
    complex_product,
    decayed,
    gated,
    gradients,
    largest,
    leaves,
    log_space,
    loop,
    matrix_product,
    softmax_denominator,
    total,
    two_gates,
    upper_triangular,
)

associative_module = importlib.import_module("inductor_ext.scan.associative")
channels_module = importlib.import_module("inductor_ext.core.channels")
linear_scan_module = importlib.import_module("inductor_ext.core.linear_scan")

#: These tests run on every version of torch, because Dynamo, AOTAutograd and code generation differ between versions.
DEVICES = [pytest.param("interpreter", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    with triton_on_cpu() if request.param == "interpreter" else contextlib.nullcontext():
        yield "cpu" if request.param == "interpreter" else "cuda"


def few_channels_are_enough(monkeypatch):
    """Use the kernels over channels for small tensors, and the kernels along rows for few rows."""
    for name in ("FEWEST_CHANNELS", "FEWEST_NEIGHBOURS"):
        monkeypatch.setattr(channels_module, name, 1)
    monkeypatch.setattr(linear_scan_module, "FEWEST_ROWS", 1)


def pointwise_scan(combine, xs, dim, reverse):
    """associative_scan in pointwise mode. On CPU tensors, which the front end refuses, the same steps are done here."""
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
    """Check the outputs of a scan along dim 0, and the gradients through the outputs at ``used``."""
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


#: These have leaves that interact, that do not interact, that need no gradient, and that are not floating. test_scan.py
#: differentiates the others.
QUICK = {"gated", "matrix_product", "log_space", "segmented", "largest_and_where"}


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "combine",
    [pytest.param(c, id=c.__name__, marks=[] if c.__name__ in QUICK else [pytest.mark.slow]) for c in COMBINES],
)
def test_against_a_loop(combine, device):
    xs = leaves(COMBINES[combine], 97, torch.float32, device)
    xs = [(x.detach() * 0.8).requires_grad_() if x.is_floating_point() else x for x in xs]
    check(combine, xs, compiled(combine)(*xs), range(len(xs)))


def test_conditions_of_few_channels(device):
    """Sums that start again where a flag is set. Triton does not scan tiles of conditions, only the interpreter does."""

    def either_and_sum(flag1, x1, flag2, x2):
        return flag1 | flag2, torch.where(flag2, x2, x1 + x2)

    generator = torch.Generator().manual_seed(0)
    flags = (torch.rand(97, 3, generator=generator) < 0.2).to(device)
    x = torch.randn(97, 3, generator=generator).to(device).requires_grad_()
    run = compiled(either_and_sum)
    ys, codes = run_and_get_code(run, flags, x)
    assert ys[0].dtype is torch.bool and "tl.associative_scan" in codes[0]
    # A tile of conditions is cast to what Triton calls int1.
    assert not re.search(r"= tmp\d+\.to\(tl\.int1\)", codes[0])
    check(either_and_sum, [flags, x], ys, [1])


@pytest.mark.breadth(1)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_captured_number_of_one_sequence(device, reverse):
    """The gradient of the number is a sum over all steps but the first. The kernel of the scan computes this sum too."""

    def along(x, c):
        x = x.flip(0) if reverse else x
        if x.is_cuda:
            y = associative_scan(lambda a, b: a + b + c, x, 0, combine_mode="pointwise")
        else:
            (y,) = associative_scan_hop(lambda a, b, c: [a + b + c], [x], (c,))
        return y.flip(0) if reverse else y

    x, c = torch.randn(64, device=device, requires_grad=True), torch.tensor(0.9, device=device, requires_grad=True)
    weight = torch.randn(64, device=device)
    torch._dynamo.reset()
    got = torch.autograd.grad(torch.compile(along, backend="gradfuse", fullgraph=True)(x, c), (x, c), weight)
    exact = [x.detach().double().requires_grad_(), c.detach().double().requires_grad_()]
    turned = exact[0].flip(0) if reverse else exact[0]
    wanted = turned.cumsum(0) + torch.arange(64, device=device) * exact[1]
    want = torch.autograd.grad(wanted.flip(0) if reverse else wanted, exact, weight.double())
    for mine, right in zip(got, want, strict=True):
        assert relative_error(mine, right) < 1e-6


@pytest.mark.breadth(0)
@pytest.mark.parametrize("combine", [gated, total], ids=lambda f: f.__name__)
def test_dynamic_lengths(combine, device):
    run = compiled(combine, dynamic=True)
    for length in (97, 8, 300):
        xs = leaves(COMBINES[combine], length, torch.float32, device)
        check(combine, xs, run(*xs), range(len(xs)))


@pytest.mark.breadth(1)
@pytest.mark.parametrize("length", [1, 33, 100])
def test_in_two_levels(length, device, monkeypatch):
    monkeypatch.setattr(associative_module, "CHUNK", 16)
    monkeypatch.setattr(associative_module, "FEWEST_CHUNKS", 2)
    xs = leaves("ff", length, torch.float32, device)
    check(gated, xs, compiled(gated)(*xs), (0, 1))


@pytest.mark.breadth(0)
def test_in_two_levels_with_dynamic_lengths(device, monkeypatch):
    monkeypatch.setattr(associative_module, "CHUNK", 16)
    monkeypatch.setattr(associative_module, "FEWEST_CHUNKS", 2)
    run = compiled(gated, dynamic=True)
    for length in (100, 37, 64):
        xs = leaves("ff", length, torch.float32, device)
        check(gated, xs, run(*xs), (0, 1))


@pytest.mark.breadth(1)
def test_leaves_of_several_shapes(device):
    """Stock reads every leaf with the shape of the first leaf."""
    shapes = [(3, 1), (3, 4)]
    xs = [(0.5 + 0.5 * torch.rand(97, *channels, device=device)).requires_grad_() for channels in shapes]
    check(gated, xs, compiled(gated)(*xs), (0, 1))


def spun(r1, i1, r2, i2, rate):
    """The product of two complex numbers and a real number."""
    return rate * (r1 * r2 - i1 * i2), rate * (r1 * i2 + i1 * r2)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("combine, enough", [(decayed, False), (spun, True)], ids=["apart", "interacting"])
def test_captured_tensors(combine, enough, device, monkeypatch):
    """The leaves of one do not interact. Those of the other do, and it runs over many channels."""
    if enough:
        few_channels_are_enough(monkeypatch)
    xs = leaves("ff", 97, torch.float32, device)
    rate = (0.5 + 0.4 * torch.rand(3, 2, device=device)).requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (*xs, rate)]
    y = compiled(lambda *operands: combine(*operands, rate))(*xs)[1]
    exactly = loop(lambda *operands: combine(*operands, exact[2]), exact[:2])[1]
    weight = torch.randn_like(y)
    got = torch.autograd.grad(y, [*xs, rate], weight)
    want = torch.autograd.grad(exactly, exact, weight.double())
    assert max(map(relative_error, got, want)) < 1e-5


@pytest.mark.breadth(2)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_gradient_that_was_zero(dim, reverse, device):
    """Stock's pointwise mode gives zeros as the gradient of the gate. Results have the memory order of the operands."""
    xs = [(0.5 + torch.rand(4, 5, 6, device=device)), torch.randn(4, 5, 6, device=device)]
    xs = [x.requires_grad_() for x in xs]
    products, y = compiled(gated, dim, reverse)(*xs)
    weight = torch.randn(y.shape, device=device)
    got = torch.autograd.grad(y, xs, weight)
    assert all(x.is_contiguous() for x in (products, y, *got))

    def forwards(x):
        x = x.detach().double().movedim(dim, 0)
        return x.flip(0) if reverse else x

    exact = [forwards(x).requires_grad_() for x in xs]
    want = torch.autograd.grad(loop(gated, exact)[1], exact, forwards(weight))
    for g, w in zip(got, want, strict=True):
        assert w.norm() > 0 and relative_error(forwards(g), w) < 1e-6


def codes_of(combine, xs, dim, reverse=False, around=lambda x: x):
    """The kernels of the forward, and then those of the backward, for a gradient through the last leaf.

    around: what is applied to the leaves before the scan, and to the result.
    """

    def step():
        torch._dynamo.reset()
        scan = lambda *xs: around(pointwise_scan(combine, [around(x) for x in xs], dim, reverse)[-1])  # noqa: E731
        y = torch.compile(scan, backend="gradfuse", fullgraph=True)(*xs)
        y.backward(torch.rand_like(y))

    _, codes = run_and_get_code(step)
    return [kernels_of(code) for code in codes]


def stores(*arguments, **options):
    """The number of tensors that each kernel of ``codes_of`` stores."""
    return [[kernel.count("tl.store(") for kernel in kernels] for kernels in codes_of(*arguments, **options)]


@pytest.mark.breadth(1)
@pytest.mark.parametrize("dim", [1, 2])
def test_a_linear_recurrence_from_the_end_has_the_kernels_of_one_from_the_start(dim, device, monkeypatch):
    """The tensors that the front end flips are read and written from the end instead."""
    few_channels_are_enough(monkeypatch)
    xs = [torch.rand(3, 4, 5, device=device, requires_grad=True) for _ in range(2)]
    from_the_end = stores(gated, xs, dim, reverse=True, around=torch.sin)
    assert from_the_end == stores(gated, xs, dim, around=torch.sin) and len(from_the_end) == 2


def rooted(a1, x1, a2, x2):
    """A gated recurrence whose input is a function of the leaf, with its own derivative."""
    return a1 * a2, x1 * a2 + x2.sqrt()


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_few_channels_are_scanned_by_stock(dim, device):
    """The kernels store the state, its gradient through all later elements, and the gradients of the operands, each once.

    Where times are next to each other in memory, the scan backwards and the gradients of the operands are one kernel. Elsewhere
    they are if Inductor changes the order of loops, as it does for a GPU.
    """
    xs = [torch.rand(4, 5, 6, device=device, requires_grad=True) for _ in range(2)]
    forward, backward = stores(gated, xs, dim)
    assert forward == [1] and (backward == [2] or (dim < 2 and device == "cpu" and backward == [1, 2]))


@pytest.mark.breadth(1)
def test_leaves_that_interact_along_the_innermost_dim_are_one_kernel_each_way(device):
    """Two of four leaves have a gradient of their own, which the backward does not store, and all four get one."""
    xs = [torch.rand(6, 20, 16, device=device).requires_grad_() for _ in range(4)]
    assert stores(matrix_product, xs, 2) == [[2], [4]]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("combine", [gated, pytest.param(rooted, marks=pytest.mark.slow)])
def test_a_linear_recurrence_is_one_kernel_each_way(combine, dim, dtype, device, monkeypatch):
    """The backward stores the gradients of both operands. No tensor is copied from one memory order to another."""
    few_channels_are_enough(monkeypatch)
    xs = [torch.rand(3, 4, 3, 5, dtype=dtype, device=device).requires_grad_() for _ in range(2)]
    assert stores(combine, xs, dim) == [[1], [2]]


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "combine",
    [
        matrix_product,
        log_space,
        softmax_denominator,
        *(pytest.param(c, marks=pytest.mark.slow) for c in (complex_product, upper_triangular, largest, two_gates)),
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("reverse", [False, True])
def test_any_combine_fn_over_many_channels(combine, reverse, device, monkeypatch):
    few_channels_are_enough(monkeypatch)
    xs = [(x.detach() * 0.8).requires_grad_() for x in leaves(COMBINES[combine], 97, torch.float32, device)]
    forwards = [x.flip(0) for x in xs] if reverse else xs
    ys = compiled(combine, reverse=reverse)(*forwards)
    check(combine, xs, [y.flip(0) for y in ys] if reverse else ys, range(len(xs)))


@pytest.mark.breadth(1)
@pytest.mark.parametrize("reverse", [False, True])
def test_leaves_that_interact_are_one_kernel_each_way(reverse, device, monkeypatch):
    """The forward stores the leaves that the backward reads: two of four, because the gradient is through one leaf."""
    few_channels_are_enough(monkeypatch)
    xs = [torch.rand(6, 16, 20, device=device).requires_grad_() for _ in range(4)]
    if reverse:
        inside = {"around": torch.sin}
        assert stores(matrix_product, xs, 1, reverse, **inside) == stores(matrix_product, xs, 1, **inside)
    else:
        assert stores(matrix_product, xs, 1) == [[2], [4]]


@pytest.mark.breadth(0)
def test_the_forward_computes_nothing_for_the_backward(device, monkeypatch):
    """Only operands and results are saved, and no tensor computed from them. Over many channels gradfuse's kernel runs."""
    few_channels_are_enough(monkeypatch)
    xs = [torch.rand(6, 16, 20, device=device).requires_grad_() for _ in range(2)]
    (kernel,), _ = codes_of(log_space, xs, 1)
    assert kernel.count("tl.store(") == 1 and "SPANS" in kernel


def test_coefficients_are_computed_where_they_are_used(device, monkeypatch):
    """The gradient of a recurrence in log space is one kernel, which stores the gradients of both leaves."""
    few_channels_are_enough(monkeypatch)
    xs = [torch.rand(6, 16, 20, device=device).requires_grad_() for _ in range(2)]
    assert stores(log_space, xs, 1) == [[1], [2]]


def test_the_gradient_of_a_running_sum_reads_nothing_else(device, monkeypatch):
    few_channels_are_enough(monkeypatch)
    xs = [torch.rand(3, 4, 5, device=device).requires_grad_()]
    check(total, xs, compiled(total)(*xs), (0,))
    _, (backward,) = codes_of(total, xs, 1)
    assert backward.count("tl.load(") == 1


#: If the coefficients are at most 0.9, the elements after this many are exact to 1e-13, whatever comes before.
SETTLING = 300


def recurrence(a, x, weight, saved):
    """y, and the gradients of a and x, of the gated recurrence [P, T, 1], computed by the op's eager loop.

    They have the dtype of the operands. The backward reads ``saved(y)``.
    """
    y = linear_scan(a[:, 1:], x, list(x.shape), 1, False, a.dtype)
    of_state = linear_scan(a[:, 1:], weight, list(x.shape), 1, True, a.dtype)
    return y, torch.cat([torch.zeros_like(y[:, :1]), of_state[:, 1:] * saved(y)[:, :-1]], 1), of_state


def check_end(dim, xs, y, weight, got):
    """Compare ``y`` and the gradients of the gated recurrence along ``dim`` with float64.

    Only the last 600 elements are compared, which do not depend on earlier ones. In half precision the error is at most that
    of the formula in fp32, rounded once.
    """
    dtype, rows = y.dtype, lambda t: t.detach().movedim(dim, 0).flatten(1)[-600 - SETTLING :].T[..., None]
    operands = [rows(t) for t in (*xs, weight)]
    wants = recurrence(*(t.double() for t in operands), saved=lambda y: y)
    formula = recurrence(*(t.float() for t in operands), saved=lambda y: y.to(dtype).float())
    settled = slice(None) if xs[0].shape[dim] == wants[0].shape[1] else slice(SETTLING, None)
    for found, want, fp32 in zip((y, *got), wants, formula, strict=True):
        error, rounded = (relative_error(t[:, settled], want[:, settled]) for t in (rows(found), fp32.to(dtype)))
        assert error < (1e-6 if dtype is torch.float32 else 1.2 * rounded + 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, dim",
    [
        *(((2, 300, 1200), 1), ((700, 2048), 0), ((2, 33, 3, 512), 1), ((1, 2048), 0), ((70000, 2048), 0)),
        *(((600, 1000), 1), ((4, 200, 257), 2), ((70000, 33), 1), ((512, 70000), 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_channels(shape, dim, dtype):
    """Both forms of the kernel of linear_scan: first with channels innermost, and then with time innermost."""
    a, x, weight = (
        t.to(dtype) for t in (0.5 + 0.4 * torch.rand(shape, device="cuda"), *torch.randn(2, *shape, device="cuda"))
    )
    xs = [a.requires_grad_(), x.requires_grad_()]
    y = compiled(gated, dim)(*xs)[1]
    check_end(dim, xs, y, weight, torch.autograd.grad(y, xs, weight))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_linear_recurrence(dim, dtype, reverse, device, monkeypatch):
    few_channels_are_enough(monkeypatch)
    a, x, weight = (
        t.to(dtype) for t in (0.5 + 0.4 * torch.rand(2, 12, 20, device=device), *torch.randn(2, 2, 12, 20, device=device))
    )
    xs = [a.requires_grad_(), x.requires_grad_()]
    turned = lambda t: t.flip(dim) if reverse else t  # noqa: E731
    products, y = map(turned, compiled(gated, dim, reverse)(*map(turned, xs)))
    assert products.is_contiguous() and y.is_contiguous()
    check_end(dim, xs, y, weight, torch.autograd.grad(y, xs, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [4096, 100_000, 131_072])
def test_few_long_rows(length):
    """These are scanned in two levels, along the innermost dim."""
    a = (0.8 + 0.1 * torch.rand(2, 3, length, device="cuda")).requires_grad_()
    x = torch.randn(2, 3, length, device="cuda", requires_grad=True)
    y, weight = compiled(gated, 2)(a, x)[1], torch.randn_like(x)
    check_end(2, [a, x], y, weight, torch.autograd.grad(y, [a, x], weight))
