"""The op compiled for a GPU: the emitted kernels run in Triton's interpreter and on a GPU."""

import contextlib

import pytest
import torch
from torch.utils._pytree import tree_leaves

from inductor_ext.mlstm.api import mlstm
from inductor_ext.mlstm.reference import mlstm_reference
from tests.attention.case import relative_error
from tests.support import snapshots
from tests.support.emitted import body, triton_sources
from tests.support.interpreter import DEVICES, INTERPRETED, triton_on_cpu

from .case import Case


def compiled(case, **options):
    return torch.compile(lambda *operands: case.call(mlstm, *operands), backend="gradfuse", fullgraph=True, **options)


def check(case, device, **options):
    scope = contextlib.nullcontext() if device == "cuda" else triton_on_cpu()
    with scope:
        case.check(compiled(case, **options), **({"device": "cuda"} if device == "cuda" else {"draws": 4}))


CASES = {
    "plain": Case(affine=False),
    "affine": Case(batch=2),
    "no_norm": Case(norm=False),
    "large_eps": Case(eps=1e-2),
    "no_eps": Case(eps=0.0, norm_eps=0.0),
    "one": Case(length=1, norm=False),
    "eight": Case(length=8),
    "aligned": Case(length=128, value_width=16),
    "high_gates": Case(shift=5.0),
    "steep_gates": Case(spread=20.0),
    "transposed": Case(layout="transposed", batch=2),
    "expanded": Case(layout="expanded"),
    "strided": Case(layout="strided"),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float16": Case(dtype=torch.float16),
    "head_40_80": Case(length=40, width=40, value_width=80, batch=1),
    "split": Case(length=40, width=128, value_width=128, batch=1, heads=1),
}


#: These are slow in the interpreter. test_cpu.py runs all cases.
SLOW = {"strided", "expanded", "high_gates", "float16", "aligned"}
marked = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", marked)
def test_kernels(name, device):
    check(CASES[name], device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "width, dtype",
    [
        (w, dtype)
        for w in (16, 64, 80, 128, 256, 512)
        for dtype in (torch.float32, torch.bfloat16)
        if w * dtype.itemsize <= 1024
    ],
)
def test_widths_and_lengths(width, dtype):
    """The widths that the templates support."""
    # A single row in half precision is left out: the gradient of its gates is one rounding error of h, without an average.
    lengths = (97, 1000) if width < 256 else (97, 300)
    for length in lengths if dtype.itemsize == 2 else (1, *lengths):
        batch = 40 if length == 1 else 1
        case = Case(length=length, width=width, value_width=width, batch=batch, dtype=dtype, norm=length > 1)
        check(case, "cuda")


@pytest.mark.breadth(0)
@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_lengths(device):
    case = Case(heads=1)
    run = compiled(case, dynamic=True)
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu():
        for case.length in (97, 130, 64):
            case.check(run, "cuda" if device == "cuda" else "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_float64_and_wide_heads_run_in_blocks(device):
    check(Case(dtype=torch.float64, length=20), device)
    check(Case(width=600, value_width=8, length=20, batch=1, heads=1), device)


@pytest.mark.gpu
def test_cuda_graphs():
    """A replayed graph reads the operands of its own call.

    The option ``deterministic`` is on, because Inductor chooses the tile of the reduction that gives the gradient of the norm's
    weight by a measurement, and each of the two compilations measures for itself.
    """
    case = Case(length=130, width=64, value_width=64)
    run = compiled(case, options={"deterministic": True})
    replayed = compiled(case, options={"deterministic": True, "triton.cudagraphs": True})
    for case.seed in range(4):
        operands = case.operands("cuda")
        grad = torch.randn_like(operands[2])
        want = [y := run(*operands), *torch.autograd.grad(y, operands, grad)]
        torch.compiler.cudagraph_mark_step_begin()
        got = [y := replayed(*operands), *torch.autograd.grad(y, operands, grad)]
        assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * len(want)


@pytest.mark.gpu
def test_ten_runs_are_bitwise_equal():
    case = Case(length=1000, width=64, value_width=64, dtype=torch.bfloat16)
    operands = case.operands("cuda")
    run = compiled(case)
    grad = torch.randn_like(run(*operands))

    def step():
        y = run(*operands)
        return [y, *torch.autograd.grad(y, operands, grad)]

    first = step()
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))


@pytest.mark.breadth(0)
@pytest.mark.parametrize("device", DEVICES)
def test_maxima_far_back(device):
    """The first input is the maximum of every later row. With a large eps it gets a gradient from all of them."""
    case = Case(length=150, eps=1e-1, spread=0.0, norm=False)

    def run(query, key, value, input_gate, forget_gate, *affine):
        first = torch.zeros_like(input_gate)
        first[..., 0] = 6.0
        return case.call(mlstm, query, key, value, input_gate + first, forget_gate + 8.0, *affine)

    def reference(query, key, value, input_gate, forget_gate, *affine):
        first = torch.zeros_like(input_gate)
        first[..., 0] = 6.0
        return case.call(mlstm_reference, query, key, value, input_gate + first, forget_gate + 8.0, *affine)

    operands = case.operands("cuda" if device == "cuda" else "cpu")
    exact = [x.detach().double().requires_grad_() for x in operands]
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu():
        y = torch.compile(run, backend="gradfuse", fullgraph=True)(*operands)
        grads = torch.autograd.grad(y.sum(), operands)
    want = torch.autograd.grad(reference(*exact).sum(), exact)
    formula = [x.detach().requires_grad_() for x in operands]
    rounded = torch.autograd.grad(reference(*formula).sum(), formula)
    for got, exactly, fp32 in zip(grads, want, rounded, strict=True):
        assert relative_error(got, exactly) < max(1e-5, 1.2 * relative_error(fp32, exactly))


def emitted(width=64, value_width=64, dtype=torch.bfloat16, length=256, affine=True, **states):
    """The source of the kernel of the forward, and of the kernel of the backward.

    In the chunkwise form the kernels of the states come before them: that of the keys, and then that of the queries.
    """
    torch._dynamo.reset()
    case = Case(length=length, width=width, value_width=value_width, dtype=dtype, affine=affine, batch=1, heads=1, **states)
    # The interpreter would take minutes for the scan over chunks.
    run = compiled(case, options={"disable": ["linear_scan"]})
    return triton_sources(lambda *operands: sum(x.sum() for x in tree_leaves(run(*operands))), *case.operands())


@INTERPRETED
def test_emitted_kernels():
    for name, source in zip(("mlstm_forward", "mlstm_backward"), emitted(length=100), strict=True):
        snapshots.check(__file__, name, body(source))
