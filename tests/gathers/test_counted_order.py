"""The lowering of counted_order: emitted kernels compared with a stable sort, and the gradients that use it."""

import contextlib

import pytest
import torch

from inductor_ext.core.report import collect
from inductor_ext.gathers import counted_order as lowering
from inductor_ext.gathers import scatters
from inductor_ext.gathers.row_sums import counted_order
from tests.attention.case import relative_error
from tests.support import snapshots
from tests.support.emitted import body, counting_kernels
from tests.support.interpreter import DEVICES, INTERPRETED, triton_on_cpu


@pytest.fixture
def any_number(monkeypatch):
    """Count any number of keys, in blocks so small that there are more of them than the second kernel adds at a time."""
    monkeypatch.setattr(lowering, "FEWEST", 1)
    monkeypatch.setattr(lowering, "BLOCKS", (16,))
    monkeypatch.setattr(lowering, "BLOCK_OWN", 8)
    monkeypatch.setattr(lowering, "UNROLL", 4)


def scope(device):
    return contextlib.nullcontext() if device == "cuda" else triton_on_cpu()


def counted(rows):
    torch._dynamo.reset()
    return torch.compile(lambda keys: counted_order(keys, rows), backend="gradfuse", fullgraph=True, dynamic=False)


def keys_of(count, rows):
    """Keys of all rows, of one row, in descending order, and most of them left out or out of bounds."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, rows, (count,), generator=generator)
    yield drawn
    yield torch.full((count,), rows - 1)
    yield drawn.sort(descending=True).values
    yield torch.where(
        torch.rand(count, generator=generator) < 0.7, torch.randint(-2, 0, (count,), generator=generator), drawn
    )


@pytest.mark.breadth(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count, rows", [(1, 1), (16, 3), (97, 62), (97, 63), (1000, 1000), (1500, 129)])
def test_order(count, rows, device, any_number):
    run = counted(rows)
    for keys in keys_of(count, rows):
        with scope(device):
            order, ascending = run(keys.int().to("cuda" if device == "cuda" else "cpu"))
        want, want_order = keys.sort(stable=True)
        assert torch.equal(order.cpu(), want_order) and torch.equal(ascending.cpu(), want.int())


@pytest.mark.gpu
@pytest.mark.parametrize("count, rows", [(65536, 50257), (4097, 128256), (20000, 7), (2**16, 2000)])
def test_order_of_vocabularies(count, rows):
    assert lowering.suits(count, rows)
    run = counted(rows)
    for keys in keys_of(count, rows):
        order, ascending = run(keys.int().cuda())
        want, want_order = keys.sort(stable=True)
        assert torch.equal(order.cpu(), want_order) and torch.equal(ascending.cpu(), want.int())


def test_which_numbers_suit():
    assert lowering.suits(65536, 50257) and lowering.suits(4097, lowering.MOST_ROWS) and lowering.suits(2**16, 2000)
    assert not lowering.suits(4096, 64) and not lowering.suits(4097, lowering.MOST_ROWS + 1)
    assert not lowering.suits(2**16, 160000) and not lowering.suits(2**16 + 1, 2000)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["default", "deterministic"])
def test_a_gradient_is_that_of_the_sorted_index(options, device, any_number, monkeypatch):
    """With an index that has negative numbers, duplicates, and rows that no index names."""
    monkeypatch.setattr(scatters._Rewriter, "_worth_sorting", lambda *_: True)
    where = "cuda" if device == "cuda" else "cpu"
    table = torch.randn(300, 32, requires_grad=True, device=where)
    index = torch.randint(-300, 100, (40, 10), device=where)
    weight = torch.randn(40, 10, 32, device=where)
    grads, counts = {}, []
    monkeypatch.setattr(lowering, "_block", lambda count: counts.append(count) or 16)
    for disable in ([], ["counted_order"]):
        torch._dynamo.reset()
        run = torch.compile(
            lambda t: (t[index] * weight).sum(), backend="gradfuse", dynamic=False, options=options | {"disable": disable}
        )
        with scope(device), collect() as report:
            (grads[bool(disable)],) = torch.autograd.grad(run(table), table)
        assert "segments" in [d.path for d in report.decisions if d.pass_name == "scatters"]
        assert bool(counts) != bool(disable)
        counts.clear()
    assert torch.equal(grads[False], grads[True])
    exact = torch.zeros(300, 32, dtype=torch.float64).index_put_((index.cpu(),), weight.double().cpu(), accumulate=True)
    assert relative_error(grads[False].cpu(), exact) < 1e-5


@INTERPRETED
def test_emitted_kernels():
    for name, (source, _) in counting_kernels().items():
        snapshots.check(__file__, name, body(source))
