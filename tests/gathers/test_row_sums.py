"""The lowerings of gather_sum and segment_sum: emitted kernels compared with the ops' eager references and float64."""

import contextlib

import pytest
import torch

from inductor_ext.gathers import segment_sum as segments
from inductor_ext.gathers.row_sums import gather_sum, place_rows, segment_sum
from tests.attention.case import relative_error
from tests.support import snapshots
from tests.support.emitted import body, kernels_of, segment_kernels
from tests.support.interpreter import DEVICES, INTERPRETED, triton_on_cpu


def compiled(function, device):
    """The function compiled for a GPU or for Triton's interpreter, and the scope in which to run it."""
    torch._dynamo.reset()
    run = torch.compile(function, backend="gradfuse", fullgraph=True, dynamic=False)
    return run, contextlib.nullcontext() if device == "cuda" else triton_on_cpu()


def torch_device(device):
    return "cuda" if device == "cuda" else "cpu"


def sorted_rows(ids, dtype=torch.int64):
    keys, order = ids.to(dtype).sort(stable=True)
    return order, keys


def draws():
    """Names, numbers of rows, and indices: uniform, one hot row, every row once, long runs, rows left out, one element."""
    chunk, generator = segments.CHUNK, torch.Generator().manual_seed(0)

    def uniform(rows, count):
        return torch.randint(0, rows, (count,), generator=generator)

    yield "uniform", 40, uniform(40, 300)
    yield "sparse", 1000, uniform(1000, 150)
    yield "one_row", 1, torch.zeros(5 * chunk + 7, dtype=torch.int64)
    yield "one_row_of_whole_chunks", 3, torch.ones(4 * chunk, dtype=torch.int64)
    yield "each_once", 130, torch.randperm(130, generator=generator)
    for run in (chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 3 * chunk + 5):
        for start in (0, 1, chunk - 1, chunk):
            ids = torch.cat([torch.zeros(start, dtype=torch.int64), torch.ones(run, dtype=torch.int64), torch.full((9,), 2)])
            yield f"run_{run}_from_{start}", 4, ids
    yield "rows_left_out", 30, torch.where(torch.rand(200, generator=generator) < 0.6, -1, uniform(30, 200))
    yield "all_left_out", 5, torch.full((2 * chunk + 3,), -1)
    yield "one", 3, torch.tensor([2])


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, offset", [(torch.int64, 0), (torch.int16, 32766)], ids=["", "offset"])
@pytest.mark.parametrize("name, rows, ids", draws(), ids=lambda x: x if isinstance(x, str) else None)
def test_segment_sum(name, rows, ids, dtype, offset, device):
    values = torch.randn(len(ids), 40)
    order, keys = sorted_rows(ids - offset, dtype)
    exact = torch.zeros(rows, 40, dtype=torch.float64).index_add_(
        0, ids.clamp(min=0), torch.where((ids >= 0)[:, None], values, 0).double()
    )
    run, scope = compiled(lambda v, o, k: segment_sum(v, o, k, offset, rows, torch.float32), device)
    where = torch_device(device)
    with scope:
        got = run(values.to(where), order.to(where), keys.to(where)).cpu()
    assert relative_error(got, exact) < 1e-5


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("width", [1, 40, 1500])
def test_segment_sum_dtypes_and_widths(dtype, width, device):
    ids = torch.randint(0, 17, (90,))
    values = torch.randn(90, width).to(dtype)
    order, keys = sorted_rows(ids, torch.int8)
    run, scope = compiled(lambda v, o, k: segment_sum(v, o, k, 0, 17, dtype), device)
    with scope:
        got = run(values.to(torch_device(device)), order.to(torch_device(device)), keys.to(torch_device(device))).cpu()
    assert got.dtype == dtype
    exact = torch.zeros(17, width, dtype=torch.float64).index_add_(0, ids, values.double())
    once = torch.zeros(17, width, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    once = once.index_add_(0, ids, values.to(once.dtype)).to(dtype)
    assert relative_error(got, exact) <= 1.05 * relative_error(once, exact) + 1e-12


@pytest.mark.parametrize("device", DEVICES)
def test_segment_sum_of_strided_values(device):
    """Transposed, expanded and strided tensors, as gradients often are."""
    ids = torch.randint(0, 6, (70,))
    order, keys = (x.to(torch_device(device)) for x in sorted_rows(ids))
    for values in (torch.randn(24, 70).T, torch.randn(1, 24).expand(70, 24), torch.randn(70, 48)[:, ::2]):
        run, scope = compiled(lambda v: segment_sum(v * 1, order, keys, 0, 6, torch.float32), device)
        with scope:
            got = run(values.to(torch_device(device))).cpu()
        exact = torch.zeros(6, 24, dtype=torch.float64).index_add_(0, ids, values.double())
        assert relative_error(got, exact) < 1e-5


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", ["cpu", *DEVICES])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("times", [1, 3, 8, 40])
def test_gather_sum(times, strided, device):
    count = 11 * times
    values, indices = torch.randn(count, 5, 4), torch.randperm(count)
    for chosen in (indices, None):
        want = gather_sum(values.double(), chosen, 11, times, strided)
        operands = [values] if chosen is None else [values, chosen]
        run, scope = compiled(lambda v, p=None: gather_sum(v * 2, p, 11, times, strided) / 2, device)
        with contextlib.nullcontext() if device == "cpu" else scope:
            got = run(*(x.to(torch_device(device)) for x in operands)).cpu()
        assert relative_error(got, want) < 1e-6


def test_gather_sum_is_one_kernel():
    """One kernel multiplies the weights, adds eight rows and rounds the sum, without a buffer in between."""
    from torch._inductor.utils import run_and_get_code

    values, weight, indices = torch.randn(64, 32).bfloat16(), torch.randn(64).bfloat16(), torch.randperm(64)
    torch._dynamo.reset()
    run = torch.compile(lambda v, w, p: gather_sum(v * w[:, None], p, 8, 8, False).bfloat16(), backend="gradfuse")
    with triton_on_cpu():
        got, (code,) = run_and_get_code(run, values, weight, indices)
    assert len(kernels_of(code)) == 1
    assert relative_error(got, gather_sum((values * weight[:, None]).double(), indices, 8, 8, False)) < 4e-3


@INTERPRETED
def test_emitted_kernels():
    for name, (source, _) in zip(("segment_sum", "segment_totals"), segment_kernels(96), strict=True):
        snapshots.check(__file__, name, body(source))


@pytest.mark.parametrize("device", ["cpu", *DEVICES])
def test_a_mask_is_written_over_placed_rows(device):
    """Inductor computes the masked tensor in another buffer. The rows are stored in their own all the same."""
    values, to = torch.randn(32, 16, device=torch_device(device)), torch.randperm(32).to(torch_device(device))
    hidden = torch.rand(32, 16, device=values.device) < 0.4

    def masked(values, to, hidden):
        out = place_rows(values * 2, to)
        out[hidden] = 0.0
        return out + 1

    run, scope = compiled(masked, device)
    with scope if device != "cpu" else contextlib.nullcontext():
        got = run(values, to, hidden)
    assert torch.equal(got, masked(values, to, hidden))
