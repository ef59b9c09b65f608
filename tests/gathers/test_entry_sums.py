"""entry_sums, the gradient of a lookup in a small table by an index that is the same for all heads."""

import contextlib

import pytest
import torch

from inductor_ext.core.report import collect
from inductor_ext.gathers import entry_sums as lowering
from inductor_ext.gathers import scatters
from inductor_ext.gathers.row_sums import entry_sums
from tests.attention.case import relative_error
from tests.support import snapshots
from tests.support.emitted import bin_sums_kernel, body, entry_sums_kernel
from tests.support.interpreter import DEVICES, INTERPRETED, triton_on_cpu


def run(values, index, entries, parts, device):
    torch._dynamo.reset()
    function = torch.compile(
        lambda v, i: entry_sums(v, i, entries, parts), backend="gradfuse", fullgraph=True, dynamic=False
    )
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu():
        return function(*(x.cuda() if device == "cuda" else x for x in (values, index))).cpu()


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts, most", [(2, 2e-5), (3, 1e-6)])
@pytest.mark.parametrize(
    "batch, heads, count, entries, shared",
    [(2, 3, 130, 7, False), (3, 40, 97, 300, True), (1, 32, 1, 1, False), (2, 16, 1000, 512, False)],
)
def test_sums(batch, heads, count, entries, shared, parts, most, device, monkeypatch):
    """Some values have no entry."""
    monkeypatch.setattr(lowering, "FEWEST", 256)
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(-1, entries, (1 if shared else batch, count), generator=generator, dtype=torch.int32)
    values = torch.randn(batch, heads, count, generator=generator)
    got, exact = run(values, index, entries, parts, device), entry_sums(values.double(), index, entries, parts)
    assert got.shape == (heads, entries) and relative_error(got, exact) < most


@pytest.mark.parametrize("device", DEVICES)
def test_infinite_and_very_large_values(device):
    """They are in the sums of their own entries, and in no others."""
    index = (torch.arange(100) // 3)[None]
    values = torch.randn(1, 16, 100)
    values[0, 0, 7], values[0, 1, 50], values[0, 2, 99], values[0, 3, 0] = torch.inf, torch.nan, -torch.inf, 3.395e38
    torch.testing.assert_close(run(values, index, 34, 3, device), entry_sums(values, index, 34, 3), equal_nan=True)


def looked_up(x, ids):
    return x[ids]


def in_two_dims(x, ids):
    return x.unflatten(0, (3, 4))[ids % 3, ids % 4 - 4]


def in_the_last_dim(x, ids):
    return x.T.contiguous()[:, ids].T * 2


def padded(x, ids):
    return torch.nn.functional.embedding(ids % 12, x, padding_idx=3)


def added(x, ids):
    return x.index_add(0, ids % 12, (x * 3)[ids])


@pytest.mark.breadth(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [looked_up, in_two_dims, in_the_last_dim, padded, added], ids=lambda f: f.__name__)
def test_few_rows(function, dtype, device, monkeypatch):
    """The gradient of a lookup in a small matrix needs neither atomics nor a sorted index."""
    monkeypatch.setattr(scatters, "_MANY_VALUES", 0)
    generator = torch.Generator().manual_seed(0)
    x, ids = torch.randn(12, 40, generator=generator).to(dtype), torch.randint(-12, 12, (500,), generator=generator)
    weight = torch.randn(function(x, ids).shape, generator=generator).to(dtype)

    def gradient(run, *tensors):
        x, ids, weight = tensors
        x = x.detach().requires_grad_()
        return torch.autograd.grad((run(x, ids) * weight).sum(), x)[0]

    torch._dynamo.reset()
    run = torch.compile(function, backend="gradfuse", fullgraph=True, dynamic=False)
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu(), collect() as report:
        got = gradient(run, *(t.cuda() if device == "cuda" else t for t in (x, ids, weight)))
    assert "entries" in [d.path for d in report.decisions]
    want, once = gradient(function, x.double(), ids, weight.double()), gradient(function, x.float(), ids, weight.float())
    assert relative_error(got, want) <= 1.2 * relative_error(once.to(dtype), want) + 1e-6


@INTERPRETED
@pytest.mark.parametrize(
    "rows, count, width, dtype, dynamic, expected",
    [
        (64, 2**13, 32, torch.float32, False, True),
        (65, 2**13, 32, torch.float32, False, False),
        (64, 2**13 - 1, 32, torch.float32, False, False),
        (2, 2**15, 15, torch.float32, False, False),
        (64, 2**13, 32, torch.float64, False, False),
        (64, 2**13, 32, torch.float32, True, False),
    ],
)
def test_when_rows_are_few(rows, count, width, dtype, dynamic, expected):
    x, ids = torch.zeros(rows, width, dtype=dtype, requires_grad=True), torch.zeros(count, dtype=torch.int64)
    torch._dynamo.reset()
    with triton_on_cpu(), collect() as report:
        torch.compile(looked_up, backend="gradfuse", dynamic=dynamic)(x, ids)
    assert ("entries" in [d.path for d in report.decisions]) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_entries_of_two_digits(device):
    """Each value has an entry of its own, also the first and the last, but for one that is left out."""
    entries = lowering.MOST_ENTRIES if device == "cuda" else 1000
    index = torch.randperm(entries, generator=torch.Generator().manual_seed(0))[None]
    index = torch.cat([index, torch.tensor([[-1]])], 1).int()
    values = torch.arange(2.0 * index.numel()).reshape(1, 2, -1) % 256
    assert torch.equal(run(values, index, entries, 2, device), entry_sums(values, index, entries, 2))


@INTERPRETED
def test_the_grid_has_one_axis():
    """The others end at 65535, and a row of a captured expert has millions of elements."""
    cdiv = lambda x, y: -(-x // y)  # noqa: E731
    assert lowering.grid.fn(3, 5_000_000, 600, {"BLOCK_H": 64, "BLOCK_E": 512}, cdiv=cdiv) == (3 * 78125 * 2, 1, 1)


@INTERPRETED
def test_wide_rows_are_not_summed_twice(monkeypatch):
    """Several tiles of heads and of entries, and several parts."""
    monkeypatch.setattr(lowering, "BLOCK_E", 64)
    monkeypatch.setattr(lowering, "FEWEST", 64)
    index = torch.randint(-1, 200, (2, 300), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    values = torch.randn(2, 150, 300)
    assert relative_error(run(values, index, 200, 3, "interpreter"), entry_sums(values.double(), index, 200, 3)) < 1e-6


def test_the_op():
    values, index = torch.arange(12.0).reshape(2, 2, 3), torch.tensor([[0, 1, -1], [1, 1, 0]])
    assert entry_sums(values, index, 2, 3).tolist() == [[0.0 + 8, 1 + 6 + 7.0], [3.0 + 11, 4 + 9 + 10.0]]
    torch.library.opcheck(entry_sums, (values, index, 2, 3))
    for outside in (2, -2):
        with pytest.raises(IndexError, match="out of bounds"):
            entry_sums(values, index.where(index >= 0, outside), 2, 3)


@INTERPRETED
def test_snapshot():
    snapshots.check(__file__, "entry_sums", body(entry_sums_kernel()))
    snapshots.check(__file__, "bin_sums", body(bin_sums_kernel()))
