"""The lowering of scan_backward: its kernel and the op's eager loop are compared with autograd of a loop in float64."""

import contextlib
import importlib

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from inductor_ext.scan import lower_backward as lowering
from tests.attention.case import relative_error
from tests.support import snapshots
from tests.support.emitted import body, kernels_of
from tests.support.interpreter import DEVICES, INTERPRETED, triton_on_cpu

from .test_scan import (
    affine_pairs,
    backwards,
    complex_product,
    gated,
    log_space,
    loop,
    matrix_product,
    product,
    softmax_denominator,
    two_gates,
)

# In the package, the modules' names are bound to ops.
scan_backward = importlib.import_module("inductor_ext.scan.scan_backward")


def greatest_and_sum(m1, s1, m2, s2):
    """Two running values of the second and the first operand, and one whose coefficient depends on both times."""
    return torch.maximum(m1, m2), torch.tanh(s1) * s2 + s2


LEAVES = {matrix_product: 4, complex_product: 2, log_space: 2, affine_pairs: 3, greatest_and_sum: 2, softmax_denominator: 2}
#: No leaf of these interacts with another.
APART = {log_space, greatest_and_sum}


class Problem:
    """A scan [T, ...] with time at ``dim`` in memory, and gradients of the leaves ``used`` of its result."""

    def __init__(self, combine, shape, used, dtype=torch.float32, dim=0, reverse=False, device="cpu"):
        generator = torch.Generator().manual_seed(0)

        def rounded(x):
            return x.to("cuda" if device == "cuda" else "cpu", dtype).movedim(0, dim).contiguous().movedim(dim, 0)

        count = LEAVES[combine]
        self.combine, self.used, self.count, self.reverse, self.device = combine, used, count, reverse, device
        self.xs = [rounded(0.3 + 0.4 * torch.rand(shape, generator=generator)) for _ in range(count)]
        self.exact = [x.double().requires_grad_() for x in self.xs]
        self.exact_ys = (backwards if reverse else loop)(combine, self.exact)
        self.ys = [rounded(y.detach()) for y in self.exact_ys]
        self.grads = [rounded(torch.randn(shape, generator=generator)) for _ in used]

    def gradients(self):
        apart = self.combine in APART
        product = scan_backward.product(self.combine, self.count, self.used if apart else range(self.count), apart)

        def gradients(xs, ys, grads):
            given = dict(zip(self.used, grads, strict=True))
            return scan_backward.gradients(product, ys, xs, [given.get(i) for i in range(self.count)], self.reverse)

        return gradients

    def run(self):
        return torch.compile(self.gradients(), backend="gradfuse", fullgraph=True)

    def errors(self, run):
        with triton_on_cpu() if self.device == "interpreter" else contextlib.nullcontext():
            got = run(self.xs, self.ys, self.grads)
        outputs = [self.exact_ys[i] for i in self.used]
        want = torch.autograd.grad(
            outputs, self.exact, [g.double() for g in self.grads], retain_graph=True, allow_unused=True
        )
        assert all(g.dtype == x.dtype and g.shape == x.shape for g, x in zip(got, self.xs, strict=True))
        assert all(w is not None or not g.any() for g, w in zip(got, want, strict=True))
        return [relative_error(g, w) for g, w in zip(got, want, strict=True) if w is not None]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", ["cpu", *DEVICES])
@pytest.mark.parametrize(
    "combine, used",
    [
        (matrix_product, (3,)),
        (matrix_product, (0, 1, 2, 3)),
        (complex_product, (0,)),
        (log_space, (1,)),
        (log_space, (0, 1)),
        (greatest_and_sum, (0, 1)),
        (greatest_and_sum, (0,)),
        (softmax_denominator, (0, 1)),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_against_autograd(combine, used, reverse, device):
    problem = Problem(combine, (37, 2, 70), used, reverse=reverse, device=device)
    assert max(problem.errors(problem.run())) < 2e-6


@pytest.mark.parametrize("reverse", [False, True])
def test_opcheck(reverse):
    problem = Problem(affine_pairs, (5, 3, 4), (1, 2), reverse=reverse)
    found = scan_backward.product(affine_pairs, 3, range(3), False)
    read = [problem.ys[i] for i in found.read]
    parts = (list(part) for part in (found.reached, found.carried, found.driven))
    arguments = (read, problem.xs, problem.grads, [1, 2], found.source, *parts, False, reverse)
    torch.library.opcheck(torch.ops.gradfuse.scan_backward.default, arguments)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [1, 2, 4, 9, 64, 65, 130])
@pytest.mark.parametrize("combine, used", [(matrix_product, (1, 2)), (log_space, (1,))])
def test_lengths(combine, used, length, device):
    problem = Problem(combine, (length, 130), used, device=device)
    assert max(problem.errors(problem.run())) < 2e-6


@pytest.mark.breadth(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("combine, used", [(affine_pairs, (1, 2)), (log_space, (0, 1))])
def test_any_memory_order(combine, used, dim, device):
    problem = Problem(combine, (9, 3, 20), used, dim=dim, device=device)
    assert max(problem.errors(problem.run())) < 2e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("combine", [complex_product, log_space])
def test_half_precision_is_rounded_once(combine, device):
    """The error is at most 1.2 times that of the op's loop in fp32."""
    problem = Problem(combine, (20, 70), (0, 1), dtype=torch.bfloat16, device=device)
    eager = problem.errors(problem.gradients())
    assert all(error <= 1.2 * rounded for error, rounded in zip(problem.errors(problem.run()), eager, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("combine", [complex_product, log_space])
def test_dynamic_lengths(combine, device):
    """The second length makes Dynamo treat the length as dynamic."""
    run = Problem(combine, (5, 70), (0, 1)).run()
    for length in (9, 30, 7):
        assert max(Problem(combine, (length, 70), (0, 1), device=device).errors(run)) < 2e-6


def grown(a1, s1, a2, s2):
    """The second leaf grows by a factor of 1000 where the next element is 0, and is replaced by any other."""
    return torch.maximum(a1, a2), torch.where(s2 > 0, s2, s1 * (1e3 + 0 * s2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [20, 100])
def test_an_infinite_product_of_coefficients(length, device):
    """The loss reads an early time only, and there are enough factors of 1000 after it to be infinite together."""
    product = scan_backward.product(grown, 2, [1], True)
    xs = [torch.zeros(length, 3, 20, device="cuda" if device == "cuda" else "cpu") for _ in range(2)]
    grad = torch.zeros_like(xs[1])
    grad[2] = 1

    def gradients(xs, grad):
        return scan_backward.gradients(product, xs, xs, [None, grad], False)

    with triton_on_cpu() if device == "interpreter" else contextlib.nullcontext():
        _, got = torch.compile(gradients, backend="gradfuse", fullgraph=True)(xs, grad)
    want = torch.zeros_like(grad)
    want[0] = 1e6
    assert torch.equal(got, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reset", [97, 88])
def test_an_infinite_product_beside_a_reset(reset, device):
    """The loss reads the last time. A coefficient of 0 on the way lets none of the factors after it matter."""
    product = scan_backward.product(grown, 2, [1], True)
    xs = [torch.zeros(100, 3, 20, device="cuda" if device == "cuda" else "cpu") for _ in range(2)]
    xs[1][reset] = 1
    grad = torch.zeros_like(xs[1])
    grad[-1] = 1e-30
    with triton_on_cpu() if device == "interpreter" else contextlib.nullcontext():
        run = torch.compile(lambda xs, g: scan_backward.gradients(product, xs, xs, [None, g], False), backend="gradfuse")
        _, got = run(xs, grad)
    assert got[:reset].eq(0).all()


@pytest.mark.parametrize(
    "combine, count, reached, taken", [(gated, 2, [1], False), (product, 1, [0], False), (two_gates, 3, [2], True)]
)
def test_coefficients_that_are_operands_need_no_computation(combine, count, reached, taken):
    assert (scan_backward.product(combine, count, reached, True) is not None) == taken


def test_a_graph_with_tensors_of_its_own_is_left():
    table = torch.rand(3)
    assert scan_backward.product(lambda x1, x2: (x1 * x2 * table[0],), 1, [0], True) is None


def emitted(combine, dtype=torch.float32):
    """The source of the kernel that computes the gradient through the last leaf."""
    problem = Problem(combine, (9, 2, 70), (LEAVES[combine] - 1,), dtype, device="interpreter")
    with triton_on_cpu():
        _, (code,) = run_and_get_code(problem.run(), problem.xs, problem.ys, problem.grads)
    (kernel,) = (k for k in kernels_of(code) if "BLOCK_L" in k)
    return kernel


@INTERPRETED
def test_where_it_is_the_way():
    """The kernel needs many channels, next to each other in memory, of fp32 or half precision."""
    x = torch.rand(4, 2, 1024)
    cases = [x, x.expand(3, 4, 2, 1024)[0], x.movedim(2, 0), x[..., ::2], x[:, :1], x.double(), x.reshape(4, -1, 2)]
    with triton_on_cpu():
        assert [scan_backward.supported([case, case]) for case in cases] == [True, True, *[False] * 5]
    assert not scan_backward.supported([x, x])


@INTERPRETED
def test_emitted_kernel():
    snapshots.check(__file__, "scan_backward", body(emitted(matrix_product)))
    snapshots.check(__file__, "scan_backward_apart", body(emitted(log_space)))


def test_fewer_loads_ahead_of_many_leaves():
    stages = [lowering._tile(4, loads)["STAGES"] for loads in (7, 16, 24, 40, 200)]
    assert stages == [4, 4, 2, 1, 1]
    assert [lowering._tile_of_times(4, loads)["STAGES"] for loads in (3, 7, 9, 20, 40)] == [3, 3, 2, 1, 1]
