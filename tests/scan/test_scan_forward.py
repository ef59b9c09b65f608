"""The lowering of scan_forward: the emitted kernel and the op's eager loop are compared with a loop in float64."""

import contextlib
import importlib

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from inductor_ext.core import channels
from inductor_ext.scan import lower_forward as lowering
from tests.attention.case import relative_error
from tests.support import snapshots
from tests.support.emitted import body, kernels_of
from tests.support.interpreter import DEVICES, INTERPRETED, triton_on_cpu

from .test_scan import COMBINES, complex_product, gated, largest, log_space, loop, matrix_product, segmented, total

# In the package, the modules' names are bound to ops.
scan_forward = importlib.import_module("inductor_ext.scan.scan_forward")


def either_and_sum(flag1, x1, flag2, x2):
    """Sums that start again where a condition holds."""
    return flag1 | flag2, torch.where(flag2, x2, x1 + x2)


def resistance(x1, x2):
    """The resistance of two parallel resistors. It is NaN where both are zero, which the masked elements are."""
    return (x1 * x2 / (x1 + x2),)


KINDS = {**COMBINES, either_and_sum: "bf", resistance: "f"}


def operands(combine, shape, dtype=torch.float32, device="cpu"):
    """Leaves [T, ...] of a combine_fn."""
    generator = torch.Generator().manual_seed(0)
    made = {
        "f": lambda: (0.3 + 0.4 * torch.rand(shape, generator=generator)).to(dtype),
        "i": lambda: (torch.rand(shape, generator=generator) < 0.1).long(),
        "b": lambda: torch.rand(shape, generator=generator) < 0.1,
    }
    return [made[kind]().to("cuda" if device == "cuda" else "cpu") for kind in KINDS[combine]]


def scan(combine, like, used=None, reverse=False):
    """The leaves ``used`` (by default all) of the scan, computed by the op, for operands of the dtypes of ``like``."""
    source = scan_forward.combination(combine, [x.dtype for x in like])

    def run(*xs):
        ys = scan_forward.scanned(source, xs, reverse)
        return [ys[i] for i in used or range(len(ys))]

    return run


def compiled(combine, like, used=None, reverse=False):
    return torch.compile(scan(combine, like, used, reverse), backend="gradfuse", fullgraph=True)


def on(device):
    return triton_on_cpu() if device == "interpreter" else contextlib.nullcontext()


def exactly(combine, xs):
    return loop(combine, [x.double() if x.is_floating_point() else x for x in xs])


def error(got, want):
    """The relative error of a floating leaf. The error of another leaf is 0 or infinite."""
    if got.is_floating_point():
        return relative_error(got, want)
    return 0.0 if torch.equal(got, want) else float("inf")


def check(combine, run, xs, device, used=None, bound=1e-6):
    with on(device):
        got = run(*xs)
    want = exactly(combine, xs)
    want = [want[i] for i in used or range(len(want))]
    assert all(g.dtype == xs[i].dtype for i, g in zip(used or range(len(xs)), got, strict=True))
    assert max(map(error, got, want)) < bound


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("combine", KINDS, ids=lambda f: f.__name__)
def test_against_a_loop(combine, device):
    xs = operands(combine, (300, 2, 20), device=device)
    check(combine, compiled(combine, xs), xs, device)


@pytest.mark.parametrize("combine", [gated, either_and_sum], ids=lambda f: f.__name__)
def test_the_op_itself(combine):
    xs = operands(combine, (9, 2, 20))
    check(combine, scan(combine, xs), xs, "cpu")
    check(combine, compiled(combine, xs), xs, "cpu")


@pytest.mark.parametrize("reverse", [False, True])
def test_opcheck(reverse):
    xs = operands(either_and_sum, (5, 3, 8))
    source = scan_forward.combination(either_and_sum, [x.dtype for x in xs])
    slices = [channels.slices(x, 2) for x in xs]
    torch.library.opcheck(torch.ops.gradfuse.scan_forward.default, (slices, source, [3, 5, 4, 2], 1, reverse))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [1, 2, 8, 9, 128, 129, 257])
def test_lengths(length, device):
    """For four leaves a span has 8 times, and a tile 128."""
    xs = operands(matrix_product, (length, 33), device=device)
    check(matrix_product, compiled(matrix_product, xs), xs, device)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_masked_spreads_nowhere(device):
    xs = operands(resistance, (3, 2, 20), device=device)
    check(resistance, compiled(resistance, xs), xs, device)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", ["cpu", *DEVICES])
@pytest.mark.parametrize("length", [7, 140])
def test_from_the_end(length, device):
    xs = operands(segmented, (length, 3, 20), device=device)
    with on(device):
        got = compiled(segmented, xs, reverse=True)(*xs)
    want = exactly(segmented, [x.flip(0) for x in xs])
    assert all(error(g, w.flip(0)) < 1e-6 for g, w in zip(got, want, strict=True))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("leaves", [1, 3, 8])
def test_numbers_of_leaves(leaves, device):
    """Spans are shorter for more leaves."""
    combine = lambda *flat: [x1 * x2 + x2 - x1 * x2 for x1, x2 in zip(flat[:leaves], flat[leaves:], strict=True)]  # noqa: E731
    xs = [torch.rand(150, 20, device="cuda" if device == "cuda" else "cpu") for _ in range(leaves)]
    with on(device):
        got = compiled(combine, xs)(*xs)
    assert all(relative_error(g, x) < 1e-6 for g, x in zip(got, xs, strict=True))


@pytest.mark.breadth(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_memory_order(dim, device):
    xs = [x.movedim(0, dim).contiguous().movedim(dim, 0) for x in operands(log_space, (40, 3, 20), device=device)]
    check(log_space, compiled(log_space, xs), xs, device)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("device", DEVICES)
def test_strided_and_expanded(device):
    first, second = operands(gated, (40, 3, 40), device=device)
    xs = [first[..., ::2], second[:1, :, :20].expand(40, 3, 20)]
    check(gated, compiled(gated, xs), xs, device)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_are_rounded_once(dtype, device):
    """Half precision is combined in fp32."""
    xs = operands(complex_product, (20, 70), dtype, device)
    want = exactly(complex_product, xs)
    with on(device):
        got = compiled(complex_product, xs)(*xs)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == dtype
        assert relative_error(g, w) <= 1.2 * relative_error(w.to(dtype), w) + 1e-12


@pytest.mark.parametrize("device", DEVICES)
def test_integers(device):
    x = torch.randint(-(2**40), 2**40, (200, 20), device="cuda" if device == "cuda" else "cpu")
    check(largest, compiled(largest, [x]), [x], device)
    small = (x % 100).int()
    check(total, compiled(total, [small]), [small], device)


@pytest.mark.breadth(0)
@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_lengths(device):
    """The second length makes Dynamo treat the length as dynamic."""
    run = compiled(complex_product, operands(complex_product, (1, 1)))
    for length in (9, 200, 130):
        check(complex_product, run, operands(complex_product, (length, 70), device=device), device)


@pytest.mark.parametrize("device", DEVICES)
def test_into_what_uses_it(device):
    """Ops on the last leaf that is used can be fused into the kernel."""
    xs = operands(segmented, (40, 3, 20), device=device)
    both = scan(segmented, xs)
    run = torch.compile(lambda *xs: both(*xs)[1] * 2 + 1, backend="gradfuse", fullgraph=True)
    with on(device):
        got, (code,) = run_and_get_code(run, *xs)
    assert relative_error(got, exactly(segmented, xs)[1] * 2 + 1) < 1e-6
    assert len(kernels_of(code)) == 1


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("used", [(0,), (3,), (1, 2), (0, 1, 2, 3)], ids=str)
def test_what_is_not_used_is_not_stored(used, device):
    xs = operands(matrix_product, (9, 20), device=device)
    run = compiled(matrix_product, xs, used)
    with on(device):
        _, (code,) = run_and_get_code(run, *xs)
    (kernel,) = (k for k in kernels_of(code) if "BLOCK_L" in k)
    assert kernel.count("tl.store(") == len(used)
    check(matrix_product, run, xs, device, used)


def test_a_graph_with_tensors_of_its_own_is_left():
    table = torch.rand(3)
    assert scan_forward.combination(lambda x1, x2: (x1 * x2 * table[0],), [torch.float32]) is None


def emitted(combine, dtype=torch.float32):
    """The source of the kernel of a scan of which every result is used."""
    xs = operands(combine, (9, 2, 20), dtype)
    with triton_on_cpu():
        _, (code,) = run_and_get_code(compiled(combine, xs), *xs)
    (kernel,) = (k for k in kernels_of(code) if "BLOCK_L" in k)
    return kernel


def test_channels_are_those_of_every_leaf():
    """A leaf that is expanded along a dim cannot merge this dim with others. With other channels it would be copied."""
    x, gate = torch.rand(4, 3, 20), torch.rand(20).expand(4, 3, 20)
    assert [channels.innermost(xs) for xs in ([x], [gate], [x, gate], [gate, x])] == [1, 2, 2, 2]
    assert channels.slices(gate, 2).data_ptr() == gate.data_ptr()


@INTERPRETED
def test_where_it_is_the_way():
    """The kernel needs many channels, next to each other in memory, and few leaves."""
    x = torch.rand(4, 2, 1024)
    cases = [[x] * 8, [x, x.expand(3, 4, 2, 1024)[0]], [x, x[:1].expand(4, 2, 1024).long()], [x.double()]]
    others = [[x] * 9, [x.movedim(2, 0)], [x[..., ::2]], [x[:, :1]], [x.short()], [x.reshape(4, -1, 2)], [x[:1]]]
    with triton_on_cpu():
        assert all(map(scan_forward.supported, cases)) and not any(map(scan_forward.supported, others))
    assert not scan_forward.supported([x])


@INTERPRETED
@pytest.mark.parametrize("combine", [matrix_product, either_and_sum], ids=lambda f: f.__name__)
def test_emitted_kernel(combine):
    snapshots.check(__file__, f"scan_forward_{combine.__name__}", body(emitted(combine)))


def test_shorter_spans_of_more_leaves():
    assert [lowering._tile(leaves)["SPAN"] for leaves in (1, 2, 3, 4, 5, 8)] == [16, 16, 8, 8, 4, 4]


@pytest.mark.breadth(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_what_follows_in_the_kernel_keeps_the_dtype(dtype, device):
    """Numbers that fp32 does not hold, and an op that Inductor puts into the kernel of the scan."""
    xs = [torch.arange(2**25, 2**25 + 40 * 600).reshape(40, 600).to("cuda" if device == "cuda" else "cpu", dtype)]
    run = scan(total, xs)
    torch._dynamo.reset()
    with on(device):
        (y,) = torch.compile(lambda *xs: [y * 3 + 1 for y in run(*xs)], backend="gradfuse", fullgraph=True)(*xs)
    assert torch.equal(y, xs[0].cumsum(0) * 3 + 1)


@pytest.mark.breadth(0)
@pytest.mark.parametrize("device", DEVICES)
def test_conditions_as_the_last_result(device):
    """Also with an op that Inductor puts into the kernel of the scan."""
    xs = operands(either_and_sum, (40, 600), device=device)
    run = scan(either_and_sum, xs, used=[0])
    torch._dynamo.reset()
    with on(device):
        (y,) = torch.compile(lambda *xs: [~y for y in run(*xs)], backend="gradfuse", fullgraph=True)(*xs)
    assert torch.equal(y, xs[0].cumsum(0) == 0)
