"""Deterministic gradients at an index that is computed a second time, outside of the kernel (interpreted)."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from inductor_ext.attention import hoisting
from tests.support.interpreter import triton_on_cpu

INDICES = {
    # score_mods:1330021 of the fuzzer.
    "bytes that wrap": lambda q, k: ((k * 37).to(torch.int8) - (q * 11).to(torch.int8)).long() % 3,
    "no narrow integers": lambda q, k: (k * 37 - q * 11) % 3,
}


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", INDICES)
def test_gradient(name, monkeypatch):
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 33, 16, generator=generator) for _ in range(3))
    t = torch.randn(2, 3, generator=generator, requires_grad=True)

    def attend(q, k, v, t):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + t[h, INDICES[name](i, j)])

    with triton_on_cpu():
        out = torch.compile(attend, backend="gradfuse", options={"deterministic": True}, fullgraph=True)(q, k, v, t)
        (got,) = torch.autograd.grad(out.square().sum(), t)
    exact = t.detach().double().requires_grad_()
    position = torch.arange(33, dtype=torch.int32)
    bias = exact[:, INDICES[name](position[:, None], position)]
    out = (q.double() @ k.double().mT / 4 + bias).softmax(-1) @ v.double()
    (want,) = torch.autograd.grad(out.square().sum(), exact)
    assert (got - want).norm() < 1e-5 * want.norm()
