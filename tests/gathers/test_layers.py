"""Whole MoE layers under gradfuse: compared with float64 and with eager's error, and no more graph breaks than stock."""

import pytest
import torch

from inductor_ext.core.report import collect
from tests.attention.case import relative_error
from tests.support.eager_graphs import eager_graphs

from .layers import LAYERS, looped_over_experts

TOKENS, WIDTH, EXPERTS, HIDDEN = 24, 16, 4, 8


def operands(dtype, seed=0):
    torch.manual_seed(seed)
    shapes = ((TOKENS, WIDTH), (EXPERTS, WIDTH), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def step(layer, inputs, grad):
    out = layer(*inputs)
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def check_float64(layer):
    inputs = operands(torch.float32)
    grad = torch.randn(TOKENS, WIDTH)
    torch._dynamo.reset()
    got = step(torch.compile(layer, backend="gradfuse"), inputs, grad)
    want = step(layer, [x.detach().double().requires_grad_() for x in inputs], grad.double())
    assert max(map(relative_error, got, want)) < 1e-5


@pytest.mark.breadth(2)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
def test_graphs_match_float64(layer):
    with eager_graphs():
        check_float64(layer)


@pytest.mark.parametrize(
    "layer", [pytest.param(f, id=f.__name__, marks=[] if f is LAYERS[0] else [pytest.mark.slow]) for f in LAYERS]
)
@pytest.mark.breadth(0)
def test_matches_float64(layer):
    check_float64(layer)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
def test_half_precision_is_no_worse_than_eager(layer):
    """Root mean squares over draws: the error of one draw is that of its few largest numbers. No routing is near a tie."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="gradfuse")
    errors = []
    for seed in range(8):
        inputs = operands(torch.bfloat16, seed)
        grad = torch.randn(TOKENS, WIDTH).bfloat16()
        want = step(layer, [x.detach().double().requires_grad_() for x in inputs], grad.double())
        with eager_graphs():
            runs = step(compiled, inputs, grad), step(layer, inputs, grad)
        errors.append([[relative_error(g, w) for g, w in zip(run, want, strict=True)] for run in runs])
    ours, eager = torch.tensor(errors, dtype=torch.float64).square().mean(0).sqrt()
    assert (ours <= 1.2 * eager).all(), (ours, eager)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
def test_breaks_no_more_graphs_than_stock(layer):
    """Dynamo breaks graphs before any backend sees them, so every backend has as many breaks as stock."""
    counts = {}
    for backend in ("eager", "gradfuse"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with eager_graphs():
            torch.compile(layer, backend=backend)(*operands(torch.float32))
        counts[backend] = sum(torch._dynamo.utils.counters["graph_break"].values())
    assert counts["gradfuse"] <= counts["eager"]
    assert layer is looped_over_experts or counts["gradfuse"] == 0


def test_the_sorted_layer_needs_no_atomics():
    inputs = operands(torch.bfloat16)
    torch._dynamo.reset()
    with eager_graphs(), collect() as report:
        step(torch.compile(LAYERS[0], backend="gradfuse"), inputs, torch.ones(TOKENS, WIDTH).bfloat16())
    paths = [d.path for d in report.decisions if d.pass_name == "scatters"]
    assert paths and set(paths) == {"gather"}
