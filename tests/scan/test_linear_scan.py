"""The lowering of linear_scan: the emitted kernel is compared with the op's eager loop in float64."""

import contextlib

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from inductor_ext.core.linear_scan import linear_scan
from inductor_ext.scan import lower_linear as linear_scan_lowering
from tests.attention.case import relative_error
from tests.support import snapshots
from tests.support.emitted import body, kernels_of
from tests.support.interpreter import DEVICES, INTERPRETED, triton_on_cpu


def scan(c, x, reverse, dtype):
    """linear_scan of tensors [P, T, L], into the same dims."""
    return linear_scan(c, x, list(x.shape), 1, reverse, dtype)


@pytest.mark.parametrize("reverse", [False, True])
def test_opcheck(reverse):
    c, x = operands(5, 6, 4, torch.bfloat16, "cpu")
    for coefficients in (c, None):
        arguments = (coefficients, x, [2, 3, 5, 4], 2, reverse, torch.float32)
        torch.library.opcheck(torch.ops.gradfuse.linear_scan.default, arguments)


def compiled(reverse, dtype, **options):
    return torch.compile(lambda c, x: scan(c, x * 1, reverse, dtype), backend="gradfuse", fullgraph=True, **options)


def operands(length, slices, channels, dtype, device):
    where = "cuda" if device == "cuda" else "cpu"
    c, x = torch.rand(slices, max(length - 1, 0), channels), torch.randn(slices, length, channels)
    return [t.to(where, dtype) for t in (c, x)]


@pytest.mark.breadth(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "length, slices, channels", [(1, 2, 20), (2, 1, 16), (256, 1, 16), (257, 2, 33), (600, 1, 5), (1, 3, 1), (600, 3, 1)]
)
def test_against_a_loop(length, slices, channels, reverse, device):
    c, x = operands(length, slices, channels, torch.float32, device)
    want = scan(c.double(), x.double(), reverse, torch.float64)
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu():
        got = compiled(reverse, torch.float32)(c, x)
    assert relative_error(got, want) < 1e-6
    assert got.stride() == x.stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length, channels", [(2, 20), (33, 140)])
def test_one_coefficient_for_all_channels(length, channels, reverse, device):
    c, x = operands(length, 3, channels, torch.float32, device)
    c = c[..., :1].contiguous().expand(-1, -1, channels)
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu():
        got, (code,) = run_and_get_code(compiled(reverse, torch.float32), c, x)
    assert "BLOCK_T : tl.constexpr = 1\n" in code
    assert relative_error(got, scan(c.double(), x.double(), reverse, torch.float64)) < 1e-6


@INTERPRETED
def test_the_kernel_of_one_coefficient(monkeypatch):
    c, x = operands(33, 3, 140, torch.float32, "cpu")
    c = c[..., :1].contiguous().expand(-1, -1, 140)
    with triton_on_cpu():
        _, (code,) = run_and_get_code(compiled(True, torch.float32), c, x)
        (source,) = [k for k in kernels_of(code) if "GATED" in k]
        snapshots.check(__file__, "linear_scan_one_coefficient", body(source))
        monkeypatch.setattr(linear_scan_lowering, "FEW_TIMES", 32)
        _, (code,) = run_and_get_code(compiled(True, torch.float32), c, x)
    assert "BLOCK_T : tl.constexpr = 64\n" in code


@pytest.mark.breadth(4)
@pytest.mark.parametrize("device", ["cpu", *DEVICES])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("channels", [1, 20])
def test_running_sums(channels, reverse, device):
    """A scan without coefficients is a running sum."""
    _, x = operands(300, 2, channels, torch.float32, device)
    run = torch.compile(lambda x: scan(None, x, reverse, torch.float32), backend="gradfuse", fullgraph=True)
    with triton_on_cpu() if device == "interpreter" else contextlib.nullcontext():
        got = run(x)
    exact = x.double()
    want = exact.flip(1).cumsum(1).flip(1) if reverse else exact.cumsum(1)
    assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("many_rows", [1, 1000])
def test_rows(many_rows, device, monkeypatch):
    """Time is innermost, and each row is scanned by one warp or by four."""
    monkeypatch.setattr(linear_scan_lowering, "MANY_ROWS", many_rows)
    c, x = operands(1100, 3, 1, torch.float32, device)
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu():
        got = compiled(False, torch.float32)(c, x)
    assert relative_error(got, scan(c.double(), x.double(), False, torch.float64)) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_are_rounded_once(dtype, device):
    c, x = operands(300, 1, 20, dtype, device)
    want = scan(c.double(), x.double(), True, torch.float64)
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu():
        got = compiled(True, dtype)(c, x)
    assert got.dtype == dtype
    assert relative_error(got, want) <= 1.05 * relative_error(want.to(dtype), want) + 1e-12


@pytest.mark.parametrize("device", ["cpu", *DEVICES])
def test_dynamic_lengths(device):
    run = compiled(False, torch.float32, dynamic=True)
    with contextlib.nullcontext() if device in ("cuda", "cpu") else triton_on_cpu():
        for length in (30, 300, 7):
            c, x = operands(length, 2, 20, torch.float32, device)
            assert relative_error(run(c, x), scan(c.double(), x.double(), False, torch.float64)) < 1e-6


@pytest.mark.breadth(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (1, 2, 0)], ids=str)
def test_any_memory_order(order, device):
    """The operands are strided."""
    c, x = (
        t.permute(order).contiguous().permute([order.index(d) for d in range(3)])
        for t in operands(70, 3, 17, torch.float32, device)
    )
    c = torch.cat([c, c], 1)[:, ::2][:, :69]
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu():
        got = compiled(True, torch.float32)(c, x)
    assert relative_error(got, scan(c.double(), x.double(), True, torch.float64)) < 1e-6


@pytest.mark.breadth(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shape, dim", [((2, 3, 70, 4, 5), 2), ((6, 70, 20), 1), ((3, 2, 70, 20), 2), ((6, 70, 5, 2, 2), 1)], ids=str
)
def test_into_more_dims(shape, dim, device):
    c, x = operands(70, 6, 20, torch.float32, device)
    into = lambda c, x: linear_scan(c, x, list(shape), dim, False, torch.float32)  # noqa: E731
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu():
        got = torch.compile(into, backend="gradfuse", fullgraph=True)(c, x)
    assert got.shape == shape and got.is_contiguous()
    assert relative_error(got, scan(c.double(), x.double(), False, torch.float64).reshape(shape)) < 1e-6


def emitted(channels, dtype=torch.float32):
    """The source of the kernel that scans backwards."""
    run = torch.compile(lambda c, x: scan(c, x, True, torch.float32), backend="gradfuse", fullgraph=True)
    with triton_on_cpu():
        _, (code,) = run_and_get_code(run, *operands(300, 2, channels, dtype, "cpu"))
    (kernel,) = (k for k in kernels_of(code) if "BLOCK_L" in k)
    return kernel


@INTERPRETED
@pytest.mark.parametrize("channels", [20, 1])
def test_emitted_kernel(channels):
    snapshots.check(__file__, "linear_scan" if channels > 1 else "linear_scan_rows", body(emitted(channels)))
