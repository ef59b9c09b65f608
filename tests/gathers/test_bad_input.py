"""MoE layers with what routers do at their worst: experts without tokens, one choice, no tokens, NaN logits, ids out of range."""

import contextlib
from functools import partial

import pytest
import torch

from tests.attention.case import relative_error
from tests.support.eager_graphs import eager_graphs

from .layers import LAYERS, chosen_by_experts, permuted_and_restored, with_capacity, with_weights_of_tokens

TOKENS, WIDTH, EXPERTS, HIDDEN = 24, 16, 4, 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def operands(device, tokens=TOKENS):
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, WIDTH), (EXPERTS, WIDTH), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN))
    return [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]


def all_to_one_expert(device):
    """The tokens are positive, and so the sum of a row of the router decides."""
    tokens, router, up, down = operands(device)
    router = router.detach().abs() * torch.tensor([[9.0], [1.0], [-1.0], [-9.0]], device=device)
    return [tokens.detach().abs().requires_grad_(), router.requires_grad_(), up, down]


def some_logits_are_nan(device):
    tokens, *others = operands(device)
    tokens = tokens.detach().clone()
    tokens[3] = torch.nan
    return [tokens.requires_grad_(), *others]


#: Layers that divide the number of tokens among experts, or view nothing as [0, topk, -1].
NEED_TOKENS = with_capacity, chosen_by_experts, permuted_and_restored, with_weights_of_tokens
CASES = {
    "all to one expert": (all_to_one_expert, 1),
    "to two of the experts": (all_to_one_expert, 2),
    "one choice": (operands, 1),
    "NaN logits": (some_logits_are_nan, 2),
    "no tokens": (partial(operands, tokens=0), 2),
}


def step(layer, inputs, topk):
    out = layer(*inputs, topk=topk)
    return [out, *torch.autograd.grad(out.sin().sum(), inputs)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.breadth(5)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
def test_as_in_eager_mode(layer, case, device):
    make, topk = CASES[case]
    if case == "no tokens" and layer in NEED_TOKENS:
        pytest.skip("the layer itself raises an error in eager mode")
    inputs = make(device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="gradfuse")
    with eager_graphs() if device == "cpu" else contextlib.nullcontext():
        got = step(compiled, inputs, topk)
    exact = step(layer, [x.detach().double().requires_grad_() for x in inputs], topk)
    for x, eager, want in zip(got, step(layer, inputs, topk), exact, strict=True):
        assert torch.equal(x.isnan(), eager.isnan()) and torch.equal(want.isnan(), eager.isnan())
        # With one choice its weight is 1, and the gradient of the router is 0 but for rounding.
        own, theirs = (relative_error(y.nan_to_num(), want.nan_to_num()) for y in (x, eager))
        assert own < max(1e-5, 1.2 * theirs)


@pytest.mark.parametrize("backend", ["inductor", "gradfuse"])
def test_ids_out_of_range_are_an_error(backend):
    """On a CPU; on a GPU it is an assertion of the device, after which the process cannot go on."""
    torch._dynamo.reset()
    run = torch.compile(lambda x, ids: x[ids // 2] * 2, backend=backend)
    x, ids = torch.randn(8, 16, requires_grad=True), torch.tensor([0, 3, 40])
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        run(x, ids)
