"""Scans between convolutions, where Inductor would store 4-D tensors with dim 1 innermost, as in Mamba."""

import contextlib
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tests.attention.case import relative_error
from tests.support.interpreter import DEVICES, triton_on_cpu

from .test_compiled import pointwise_scan
from .test_scan import gated, loop

BATCH, CHANNELS, LENGTH, STATES = 2, 64, 20, 32


def between_convolutions(scan):
    def function(x, w, kernels):
        x = torch.nn.functional.conv1d(x, kernels[0], padding=1)
        gates, inputs = torch.sigmoid(x[..., None] * w), torch.tanh(x[..., None] - w)
        return torch.nn.functional.conv1d(scan(gates, inputs).sum(-1), kernels[1], padding=1)

    return function


@pytest.mark.breadth(0)
@pytest.mark.parametrize("device", DEVICES)
def test_operands_keep_their_memory_order(device, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    where = "cuda" if device == "cuda" else "cpu"
    shapes = (BATCH, CHANNELS, LENGTH), (CHANNELS, LENGTH, STATES), (2, CHANNELS, CHANNELS, 3)
    operands = [(torch.randn(shape) / 4).to(where).requires_grad_() for shape in shapes]
    torch._dynamo.reset()
    run = torch.compile(
        between_convolutions(lambda a, x: pointwise_scan(gated, (a, x), 2, False)[1]), backend="gradfuse", fullgraph=True
    )
    with triton_on_cpu() if device == "interpreter" else contextlib.nullcontext():
        y, codes = run_and_get_code(run, *operands)
        grads = torch.autograd.grad(y.square().sum(), operands)
    four = re.findall(rf"empty_strided_\w+\(\({BATCH}, {CHANNELS}, {LENGTH}, {STATES}\), (\(.*?\))", codes[0])
    assert four and set(four) == {str((CHANNELS * LENGTH * STATES, LENGTH * STATES, STATES, 1))}
    exact = [x.detach().cpu().double().requires_grad_() for x in operands]
    in_time = lambda a, x: loop(gated, [a.movedim(2, 0), x.movedim(2, 0)])[1].movedim(0, 2)  # noqa: E731
    want = between_convolutions(in_time)(*exact)
    wants = torch.autograd.grad(want.square().sum(), exact)
    for got, right in zip([y, *grads], [want, *wants], strict=True):
        assert relative_error(got.detach().cpu(), right.detach()) < 1e-5
