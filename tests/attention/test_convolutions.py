"""Attention beside convolutions, where Inductor stores 4-D tensors with their heads innermost (wav2vec2-conformer)."""

import copy
import re

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.attention.case import relative_error
from tests.support.emitted import triton_sources
from tests.support.interpreter import INTERPRETED, triton_on_cpu


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.project = torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.Linear(64, 192)

    def forward(self, x, attention=lambda q, k, v, t: flex_attention(q, k, v, lambda s, b, h, i, j: s + t[b, h, i, j])):
        q, k, v = self.project(self.conv(x).flatten(2).mT).view(2, 64, 3, 4, 16).permute(2, 0, 3, 1, 4)
        out = attention(q * 2, k * 2, v * 2, q @ q.mT * 0.1)
        return self.conv(out.transpose(1, 2).reshape(2, 64, 8, 8))


@pytest.mark.breadth(0)
@INTERPRETED
def test_kernels_load_rows():
    """They would be right without, and load single elements."""
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 64, 8, 8, requires_grad=True)
    compiled = torch.compile(block, backend="gradfuse", fullgraph=True)
    kernels = triton_sources(compiled, x, tma=True)
    assert len(kernels) == 2
    for kernel in kernels:
        strides = re.findall(r"stride_\w+d = .*", kernel)
        assert strides and all(line.endswith(", 1") for line in strides), strides
        assert "blocks_of_table_0.load" in kernel
    exact = copy.deepcopy(block).double(), x.detach().double().requires_grad_()
    with triton_on_cpu(tma=True):
        got = torch.autograd.grad(compiled(x).square().sum(), [x, block.project.weight])
    dense = lambda q, k, v, t: (q @ k.mT / 4 + t).softmax(-1) @ v  # noqa: E731
    want = torch.autograd.grad(exact[0](exact[1], dense).square().sum(), [exact[1], exact[0].project.weight])
    assert all(relative_error(g, w) < 1e-5 for g, w in zip(got, want, strict=True))
