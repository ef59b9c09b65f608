"""Gathers by ``permutation // k`` that become stores: the values stay the same, and only repeated reads are rewritten."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from inductor_ext.core.report import collect
from inductor_ext.gathers import gathers
from inductor_ext.torch_api.config import without_caches
from tests.attention.case import relative_error
from tests.support.emitted import kernels_of
from tests.support.interpreter import INTERPRETED, triton_on_cpu

TOKENS, TOPK, WIDTH = 40, 4, 24


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    """Pretend that no tensor fits into the cache."""
    monkeypatch.setattr(gathers, "cache_bytes", lambda device: 0)


def routing():
    return torch.randint(0, 6, (TOKENS * TOPK,), generator=torch.Generator().manual_seed(0))


def permute(x, y, weight, chosen):
    """``x[order]`` itself is stored, because a matmul uses it."""
    return x[chosen.argsort(stable=True) // TOPK] @ y[:WIDTH]


def combine(x, y, weight, chosen):
    """The backward stores the gradients of y and of the weights."""
    order = chosen.argsort(stable=True) // TOPK
    return torch.zeros_like(x).index_add(0, order, y * weight[:, None])


def weighted_in_float32(x, y, weight, chosen):
    order = chosen.argsort(stable=True) // TOPK
    rows = (y.float() * weight.float()[:, None]).to(x.dtype)
    return torch.zeros_like(x).scatter_add(0, order.reshape(-1, 1).expand(-1, WIDTH), rows)


def gated_rows(x, y, weight, chosen):
    """The backward uses intermediate values element by element, so the gather is not rewritten."""
    rows = torch.gather(x, 0, (chosen.argsort(stable=True) // TOPK).reshape(-1, 1).expand(-1, WIDTH))
    return torch.where(y > 0, rows.sigmoid() * weight[:, None] * 2, y) @ y[:WIDTH]


def masked_rows(x, y, weight, chosen):
    """An element-wise chain on the gather, with a mask, a scalar and rows of another tensor."""
    rows = x[chosen.argsort(stable=True) // TOPK]
    return torch.where(y.detach() > 0, (rows * 2).neg(), y.detach().exp()) @ y[:WIDTH]


def summed_over_rows(x, y, weight, chosen):
    """The gather would be fused into the sum over all rows, so it is not rewritten."""
    return x[chosen.argsort(stable=True) // TOPK].square().sum(0)


def by_permutation(x, y, weight, chosen):
    """Every row is read once, so there is nothing to gain."""
    return y[chosen.argsort(stable=True)] @ y[:WIDTH]


REORDERED = {
    permute: 1,
    combine: 1,
    weighted_in_float32: 1,
    gated_rows: 0,
    masked_rows: 1,
    summed_over_rows: 0,
    by_permutation: 0,
}


def operands(dtype):
    shapes = (TOKENS, WIDTH), (TOKENS * TOPK, WIDTH), (TOKENS * TOPK,)
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes]


def step(function, inputs, chosen, seed):
    out = function(*inputs, chosen)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype), allow_unused=True)]


@pytest.mark.breadth(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", REORDERED, ids=lambda f: f.__name__)
def test_same_values(function, dtype):
    inputs, chosen = operands(dtype), routing()
    compiled = torch.compile(function, backend="gradfuse", fullgraph=True)
    with without_caches(), collect() as report:
        got = step(compiled, inputs, chosen, 1)
    want = step(function, [x.detach().double().requires_grad_() for x in inputs], chosen, 1)
    eager = step(function, inputs, chosen, 1)
    assert len([d for d in report.decisions if d.pass_name == "gathers"]) == REORDERED[function], report
    for g, e, w in zip(got, eager, want, strict=True):
        if w is None:
            assert g is None
        else:
            assert relative_error(g, w) <= 1.2 * relative_error(e, w) + 1e-6


def test_a_tensor_that_fits_into_the_cache_is_left_alone(monkeypatch):
    monkeypatch.setattr(gathers, "cache_bytes", lambda device: TOKENS * WIDTH * 4)
    inputs, chosen = operands(torch.float32), routing()
    with without_caches(), collect() as report:
        step(torch.compile(permute, backend="gradfuse"), inputs, chosen, 1)
    assert not [d for d in report.decisions if d.pass_name == "gathers"]


@INTERPRETED
def test_only_kernels_that_place_and_sum_rows_are_tuned():
    """Other kernels sum rows, too."""

    def combine_and_sum(x, y, weight, chosen):
        return combine(x, y, weight, chosen) * x.exp().sum(1, keepdim=True)

    inputs, chosen = operands(torch.bfloat16), routing()
    compiled = torch.compile(combine_and_sum, backend="gradfuse", fullgraph=True)
    torch._dynamo.reset()
    with without_caches(), triton_on_cpu():
        _, codes = run_and_get_code(step, compiled, inputs, chosen, 1)
    kernels = [kernel for code in codes for kernel in kernels_of(code)]
    tuned = [kernel for kernel in kernels if "'max_autotune_pointwise': True" in kernel]
    assert (
        len(tuned) == 1 < sum("tl.sum" in kernel for kernel in kernels)
        and "tl.sum" in tuned[0]
        and "mutated_arg_names': ['" in tuned[0]
    )
