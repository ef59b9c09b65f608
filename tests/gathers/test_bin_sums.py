"""bin_sums, the gradient of a lookup in rows by an index that is the same in many slices, and where it is used."""

import contextlib

import pytest
import torch

from inductor_ext.core.report import collect
from inductor_ext.gathers.row_sums import bin_sums
from tests.attention.case import relative_error
from tests.support import snapshots
from tests.support.emitted import bin_sums_kernel, body
from tests.support.interpreter import DEVICES, INTERPRETED, triton_on_cpu


def scope(device):
    return contextlib.nullcontext() if device == "cuda" else triton_on_cpu()


def torch_device(device):
    return "cuda" if device == "cuda" else "cpu"


def draws():
    """Names, numbers of slices and of bins, and an index [R, N]: distances, clamped, random, all in one bin, and in none."""
    generator = torch.Generator().manual_seed(0)
    distance = torch.arange(9)[:, None] - torch.arange(97) + 96
    yield "distances", 20, 105, distance
    yield "clamped", 70, 40, distance.clamp(60, 99) - 60
    yield "random", 16, 200, torch.randint(0, 200, (3, 130), generator=generator)
    yield "one_bin", 33, 70, torch.full((2, 100), 65)
    yield "a_bin_that_does_not_exist", 16, 40, torch.randint(-3, 45, (4, 64), generator=generator)
    yield "one_row_of_one_value", 16, 1, torch.zeros(1, 1, dtype=torch.int64)


@pytest.mark.breadth(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, slices, bins, index", draws(), ids=lambda x: x if isinstance(x, str) else None)
def test_sums(name, slices, bins, index, device, dtype):
    values = torch.randn(slices, *index.shape).to(dtype)
    exact = torch.zeros(slices, index.shape[0], bins + 9, dtype=torch.float64)
    exact = exact.scatter_add_(2, (index + 3).expand(values.shape), values.double())[..., 3 : 3 + bins]
    torch._dynamo.reset()
    with scope(device):
        run = torch.compile(lambda v, i: bin_sums(v, i, bins), backend="gradfuse", fullgraph=True, dynamic=False)
        got = run(values.to(torch_device(device)), index.to(torch_device(device))).cpu()
    assert got.dtype is torch.float32 and relative_error(got, exact) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_strided_values(device):
    index = torch.randint(0, 30, (6, 70), dtype=torch.int32, device=torch_device(device))
    for values in (
        torch.randn(70, 6, 20).permute(2, 1, 0),
        torch.randn(20, 1, 70).expand(20, 6, 70),
        torch.randn(20, 6, 140)[..., ::2],
    ):
        torch._dynamo.reset()
        with scope(device):
            run = torch.compile(lambda v: bin_sums(v * 1, index, 30), backend="gradfuse", dynamic=False)
            got = run(values.to(torch_device(device))).cpu()
        assert relative_error(got, bin_sums(values.double(), index.cpu(), 30)) < 1e-6


def looked_up(x, index):
    return torch.gather(x, -1, index.expand(*x.shape[:-1], index.shape[-1]))


def gradient(x, index, device):
    """The gradient of a lookup, that in float64, and the paths that scatter-adds took."""
    x = x.to(torch_device(device)).requires_grad_()
    index = index.to(x.device)
    torch._dynamo.reset()
    with scope(device), collect() as report:
        y = torch.compile(looked_up, backend="gradfuse", dynamic=False)(x, index)
        weight = torch.randn_like(y)
        (got,) = torch.autograd.grad(y, x, weight)
    exact = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    exact.scatter_add_(-1, index.expand(y.shape), weight.double())
    return got, exact, [d.path for d in report.decisions if d.pass_name == "scatters"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_a_lookup(dtype, device):
    index = (torch.arange(7)[:, None] - torch.arange(100)).clamp(-25, 24) + 25
    got, exact, paths = gradient(torch.randn(4, 8, 7, 50).to(dtype), index, device)
    assert paths == ["bins"] and got.dtype is dtype
    assert relative_error(got, exact) <= 1.01 * relative_error(exact.to(dtype), exact) + 1e-6


OTHERS = {
    "few_slices": (torch.randn(3, 5, 7, 50), torch.zeros(7, 20, dtype=torch.int64)),
    "an_index_for_each_head": (torch.randn(4, 8, 7, 50), torch.zeros(8, 7, 20, dtype=torch.int64)),
    "one_row_of_indices": (torch.randn(4, 8, 7, 50), torch.zeros(1, 20, dtype=torch.int64)),
    "double_precision": (torch.randn(4, 8, 7, 50, dtype=torch.float64), torch.zeros(7, 20, dtype=torch.int64)),
    "no_rows": (torch.randn(4, 8, 0, 50), torch.zeros(0, 20, dtype=torch.int64)),
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OTHERS)
def test_other_lookups(name, device):
    x, index = OTHERS[name]
    got, exact, paths = gradient(x.clone(), index, device)
    assert "bins" not in paths
    assert not x.numel() or relative_error(got, exact) < 1e-5


@INTERPRETED
def test_emitted_kernel():
    snapshots.check(__file__, "bin_sums", body(bin_sums_kernel()))
