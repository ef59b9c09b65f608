"""Gradients of lookups in rows by an index that is the same in many slices, by bin_sums, and in crowded tables, by entry_sums."""

import contextlib

import pytest
import torch

from inductor_ext.core.report import collect
from inductor_ext.gathers import scatters
from inductor_ext.gathers.row_sums import bin_sums
from inductor_ext.gathers.scatter_adds import unscaled
from tests.attention.case import relative_error
from tests.support.interpreter import DEVICES, INTERPRETED, triton_on_cpu


def scope(device):
    return contextlib.nullcontext() if device == "cuda" else triton_on_cpu()


def torch_device(device):
    return "cuda" if device == "cuda" else "cpu"


def draws():
    """Names, numbers of slices and of bins, and an index [R, N]. A value whose index is -1 is in no bin."""
    generator = torch.Generator().manual_seed(0)
    distance = torch.arange(9)[:, None] - torch.arange(97) + 96
    yield "distances", 20, 105, distance
    yield "clamped", 70, 40, distance.clamp(60, 99) - 60
    yield "random", 16, 200, torch.randint(0, 200, (3, 130), generator=generator)
    far = torch.arange(2)[:, None] * 500 - torch.arange(1100)
    yield "long_rows", 16, 300, far.clamp(-150, 149) + 150
    some = torch.randint(-1, 200, (3, 130), generator=generator)
    yield "left_out", 16, 200, torch.where(torch.tensor([[True], [False], [True]]), some, -1)
    yield "one_bin", 33, 70, torch.full((2, 100), 65)
    yield "one_row_of_one_value", 16, 1, torch.zeros(1, 1, dtype=torch.int64)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, slices, bins, index", draws(), ids=lambda x: x if isinstance(x, str) else None)
def test_sums(name, slices, bins, index, device, dtype):
    values = torch.randn(slices, *index.shape).to(dtype)
    exact = bin_sums(values.double(), index, bins, 3)
    torch._dynamo.reset()
    with scope(device):
        run = torch.compile(lambda v, i: bin_sums(v, i, bins, 3), backend="gradfuse", fullgraph=True, dynamic=False)
        got = run(values.to(torch_device(device)), index.to(torch_device(device))).cpu()
    # A bin of the long rows has up to 950 values, and a GPU's matmuls do not round each of their sums to the nearest number.
    assert got.dtype is torch.float32 and relative_error(got, exact) < (1e-5 if name == "long_rows" else 1e-6)


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
            run = torch.compile(lambda v: bin_sums(v * 1, index, 30, 3), backend="gradfuse", dynamic=False)
            got = run(values.to(torch_device(device))).cpu()
        assert relative_error(got, bin_sums(values.double(), index.cpu(), 30, 3)) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_infinite_and_very_large_values(dtype, device):
    """They are in the sums of their own bins, and in no others."""
    index = torch.arange(100).expand(2, 100) // 3
    values = torch.randn(16, 2, 100).to(dtype)
    values[0, 0, 7], values[1, 1, 50], values[2, 0, 99], values[3, 1, 0] = torch.inf, torch.nan, -torch.inf, 3.395e38
    torch._dynamo.reset()
    with scope(device):
        run = torch.compile(lambda v, i: bin_sums(v, i, 34, 3), backend="gradfuse", dynamic=False)
        got = run(values.to(torch_device(device)), index.to(torch_device(device))).cpu()
    torch.testing.assert_close(got, bin_sums(values, index, 34, 3), equal_nan=True)


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


def halved(x, index, factor):
    return looked_up(x, index) / 2


def scaled_by_a_constant(x, index, factor):
    """As DeBERTa does, from keys to queries."""
    return looked_up(x, index).transpose(-1, -2) / torch.sqrt(torch.tensor(3.0)).unsqueeze(0)


def scaled_by_a_constant_of_more_dims(x, index, factor):
    return looked_up(x, index).view(1, 4, 8, 7, 100) / torch.sqrt(torch.tensor(3.0)).view(1, 1, 1, 1, 1)


def scaled_by_an_input(x, index, factor):
    return looked_up(x, index) * factor


def scaled_by_zero(x, index, factor):
    return looked_up(x, index) * 0.0


def rounded_after_a_scale(x, index, factor):
    return (looked_up(x, index).to(torch.bfloat16) * 3).float()


def expanded_before_a_scale(x, index, factor):
    """The gradient that is scaled has strides of 0."""
    return (looked_up(x.view(32, 7, 50), index).view(4, 8, 7, 100) / 2).sum(1)


def part_of_a_result(x, index, factor):
    """The gradient that is scaled is a slice of a larger tensor."""
    return torch.cat([looked_up(x.view(32, 7, 50), index).view(4, 8, 7, 100) / 2, torch.ones(4, 8, 7, 100)], 1)


def scaled_by_a_size(x, index, factor):
    return looked_up(x, index) / x.shape[0]


@pytest.mark.breadth(6)
@INTERPRETED
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function, follows",
    [
        (halved, True),
        (scaled_by_a_constant, True),
        (scaled_by_a_constant_of_more_dims, True),
        (scaled_by_an_input, False),
        (scaled_by_zero, False),
        (rounded_after_a_scale, False),
        (expanded_before_a_scale, False),
        (part_of_a_result, False),
        (scaled_by_a_size, None),
    ],
)
def test_a_constant_scale_follows_the_sums(function, follows, dynamic, monkeypatch):
    """A size is a constant unless it is dynamic. follows: None if the scale does so only without dynamic shapes."""
    found = []
    monkeypatch.setattr(scatters, "unscaled", lambda *operands: found.append(unscaled(*operands)) or found[-1])
    index = (torch.arange(7)[:, None] - torch.arange(100)).clamp(-25, 24) + 25
    x, factor = torch.randn(4, 8, 7, 50).requires_grad_(), torch.tensor(1.7)
    torch._dynamo.reset()
    with triton_on_cpu():
        y = torch.compile(function, backend="gradfuse", dynamic=dynamic)(x, index, factor)
        weight = torch.randn_like(y)
        (got,) = torch.autograd.grad(y, x, weight)
    want = torch.autograd.grad(function(x.double(), index, factor.double()), x, weight.double())[0]
    assert [scale is not None for _, scale in found] == [not dynamic if follows is None else follows]
    assert relative_error(got, want) < (1e-2 if function is rounded_after_a_scale else 1e-6)


@INTERPRETED
@pytest.mark.parametrize(
    "shape, bins, dtype",
    [
        ((6, 70), 30, torch.int64),
        ((1, 1, 600), 1, torch.int64),
        ((4, 6, 0), 5, torch.int64),
        ((4, 0, 9), 5, torch.int64),
        ((2, 6, 70), 30, torch.int16),
    ],
    ids=["no slices", "one sum", "no values", "no rows", "a short index"],
)
def test_what_has_no_kernel(shape, bins, dtype):
    values, index = torch.randn(shape), torch.randint(0, bins, shape[-2:], dtype=dtype)
    torch._dynamo.reset()
    with triton_on_cpu(), collect() as report:
        got = torch.compile(lambda v, i: bin_sums(v * 1, i, bins, 3), backend="gradfuse", dynamic=False)(values, index)
    assert [d.path for d in report.decisions if d.pass_name == "bin_sums"] == ["the op's own code"]
    torch.testing.assert_close(got, bin_sums(values, index, bins, 3))


OTHERS = {
    "few_slices": (torch.randn(3, 5, 7, 50), torch.zeros(7, 20, dtype=torch.int64)),
    "an_index_for_each_head": (torch.randn(4, 8, 7, 50), torch.zeros(8, 7, 20, dtype=torch.int64)),
    "one_row_of_indices": (torch.randn(4, 8, 7, 50), torch.zeros(1, 20, dtype=torch.int64)),
    "double_precision": (torch.randn(4, 8, 7, 50, dtype=torch.float64), torch.zeros(7, 20, dtype=torch.int64)),
    "no_rows": (torch.randn(4, 8, 0, 50), torch.zeros(0, 20, dtype=torch.int64)),
    "one_row": (torch.randn(4, 8, 1, 50), torch.zeros(1, 20, dtype=torch.int64)),
    "long_rows": (torch.randn(4, 4, 2, 2**16), torch.zeros(2, 64, dtype=torch.int64)),
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
def test_lengths_that_change():
    torch._dynamo.reset()
    run = torch.compile(looked_up, backend="gradfuse", dynamic=True)
    for rows, count, bins in ((5, 30, 20), (7, 100, 41), (3, 64, 200)):
        x, index = torch.randn(4, 8, rows, bins, requires_grad=True), torch.randint(0, bins, (rows, count))
        with triton_on_cpu():
            (got,) = torch.autograd.grad(run(x, index).square().sum(), x)
        (want,) = torch.autograd.grad(looked_up(x, index).square().sum(), x)
        assert relative_error(got, want) < 1e-6


@INTERPRETED
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"disable": ["bin_sums"]}])
def test_sums_onto_a_base(options):
    """A scatter-add of the user's, without a gradient. If bin_sums is disabled, the op's own code runs."""
    base, values = torch.randn(16, 5, 40), torch.randn(16, 5, 70)
    index = torch.randint(0, 40, (5, 70)).expand(16, 5, 70)
    torch._dynamo.reset()
    add = lambda b, v, i: b.scatter_add(2, i, v)  # noqa: E731
    with triton_on_cpu(), collect() as report:
        run = torch.compile(
            lambda b, v, i: add(b, v, i.expand(16, 5, 70)), backend="gradfuse", options=options, dynamic=False
        )
        got = run(base, values, index[0])
    assert "bins" in [d.path for d in report.decisions]
    assert relative_error(got, add(base.double(), values.double(), index)) < 1e-6


def matrix(by, negative=False):
    """A lookup of 8191 distances and 16 heads in a matrix of 32 buckets, ``t[bucket, h]`` or ``t[h, bucket]``."""

    def function(t):
        # Inside of the function, so that a cache does not take one case for another.
        distance = torch.arange(8191, device=t.device) - 4095
        b = distance.abs().clamp(max=31)[None, :] - (32 if negative else 0)
        h = torch.arange(16, device=t.device)[:, None]
        return t[b, h] if by == 0 else t[h, b]

    return function, torch.randn((32, 16) if by == 0 else (16, 32))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("by", [0, 1])
def test_few_elements_of_a_matrix_with_many_values_each(by, negative, device):
    function, t = matrix(by, negative)
    t = t.to(torch_device(device)).requires_grad_()
    torch._dynamo.reset()
    with scope(device), collect() as report:
        y = torch.compile(function, backend="gradfuse", dynamic=False)(t)
        weight = torch.randn_like(y)
        (got,) = torch.autograd.grad(y, t, weight)
    exact = t.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(function(exact), exact, weight.double())
    assert [d.path for d in report.decisions if d.pass_name == "scatters"] == ["bins"]
    assert relative_error(got, want) < 1e-5


@pytest.mark.breadth(2)
@INTERPRETED
@pytest.mark.parametrize(
    "function, shape",
    [
        pytest.param(
            lambda t: t[torch.arange(8000)[None, :] % 8, (torch.arange(16) + 1)[:, None]], (8, 17), id="other heads"
        ),
        pytest.param(lambda t: t[torch.arange(8000)[None, :] % 8, torch.arange(16)[:, None]], (8, 20), id="fewer heads"),
        pytest.param(lambda t: t[torch.arange(80)[None, :] % 8, torch.arange(16)[:, None]], (8, 16), id="few values"),
        pytest.param(
            lambda t: t[torch.arange(8000)[None, :] % 800, torch.arange(16)[:, None]], (800, 16), id="many elements"
        ),
    ],
)
def test_other_lookups_in_a_matrix(function, shape):
    t = torch.randn(shape, requires_grad=True)
    torch._dynamo.reset()
    with triton_on_cpu(), collect() as report:
        y = torch.compile(function, backend="gradfuse", dynamic=False)(t)
        weight = torch.randn_like(y)
        (got,) = torch.autograd.grad(y, t, weight)
    exact = t.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(function(exact), exact, weight.double())
    assert "bins" not in [d.path for d in report.decisions if d.pass_name == "scatters"]
    assert relative_error(got, want) < 1e-5
