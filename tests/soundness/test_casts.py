"""Casts of tensors that are written to: the tensor itself may not take the place of its cast."""

import torch

from tests.eager_graphs import eager_graphs

from .check import matches_eager


def test_a_cast_before_an_input_is_written():
    def function(buffer):
        z = buffer.float().to(torch.bfloat16)
        buffer.add_(1)
        return z

    matches_eager(function, torch.randn(5, 6).bfloat16())


def test_a_cast_of_a_view_before_an_input_is_written():
    def function(buffer):
        z = buffer[1:].t().float().to(torch.bfloat16)
        buffer.mul_(2)
        return z, z + 1

    matches_eager(function, torch.randn(5, 6).bfloat16())


def test_a_cast_back_after_an_input_was_written():
    def function(buffer):
        old = buffer.float()
        buffer.add_(1)
        return old.bfloat16()

    matches_eager(function, torch.randn(5, 6).bfloat16())


class _Average(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("ema", torch.randn(4, 4).bfloat16())
        self.register_buffer("new", torch.randn(4, 4).bfloat16())

    def forward(self, x):
        old = self.ema.float()
        self.ema.mul_(0.5).add_(x)
        return old.bfloat16()


def test_a_buffer_that_is_read_then_updated_in_place():
    module, x = _Average(), torch.randn(4, 4).bfloat16()
    before = module.ema.clone()
    with eager_graphs():
        out = torch.compile(module, backend="gradfuse", fullgraph=True)(x)
    assert torch.equal(out, before)
    assert torch.equal(module.ema, before.mul(0.5).add(x))
