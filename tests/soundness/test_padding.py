"""A masked read of a value that the same kernel has computed: stock's Triton forgets the mask before torch 2.15."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from inductor_ext.torch_api.config import without_caches
from inductor_ext.torch_api.lowering import masks_in_registers
from tests.attention.case import relative_error
from tests.support.interpreter import INTERPRETED, triton_on_cpu

DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]


def padded_softmax(x):
    y = x.softmax(0)
    return y, F.pad(y[:-1], (0, 1)).sum()


def padded_with_a_value(x):
    y = x.exp() / x.exp().sum()
    return y, F.pad(y[:-1], (0, 1), value=2.0).sum()


def rows_of_probabilities(x):
    y = x.view(8, 8).softmax(-1)
    return y, F.pad(y[:, :-2], (0, 2)).sum(-1)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [padded_softmax, padded_with_a_value, rows_of_probabilities])
def test_matches_float64(function, device):
    x = torch.randn(64, device=device)
    torch._dynamo.reset()
    with triton_on_cpu() if device == "cpu" else contextlib.nullcontext(), without_caches():
        got = torch.compile(function, backend="gradfuse")(x)
    for mine, exact in zip(got, function(x.double()), strict=True):
        assert relative_error(mine, exact) < 1e-6


def test_stock_is_left_as_it_was():
    from torch._inductor.codegen.triton import TritonKernelOverrides

    before = TritonKernelOverrides.masked
    with masks_in_registers():
        pass
    assert TritonKernelOverrides.masked is before
