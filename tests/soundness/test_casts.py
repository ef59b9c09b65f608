"""Casts of tensors that are written to: the tensor itself must not replace its cast."""

import torch

from tests.support.eager_graphs import eager_graphs

from .check import check_matches_eager


def test_a_cast_before_an_input_is_written():
    def function(buffer):
        z = buffer.float().to(torch.bfloat16)
        buffer.add_(1)
        return z

    check_matches_eager(function, torch.randn(5, 6).bfloat16())


def test_a_cast_of_a_view_before_an_input_is_written():
    def function(buffer):
        z = buffer[1:].t().float().to(torch.bfloat16)
        buffer.mul_(2)
        return z, z + 1

    check_matches_eager(function, torch.randn(5, 6).bfloat16())


def test_a_cast_back_after_an_input_was_written():
    def function(buffer):
        old = buffer.float()
        buffer.add_(1)
        return old.bfloat16()

    check_matches_eager(function, torch.randn(5, 6).bfloat16())


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


def storages(function, x):
    """Which of a function's outputs and its input share memory."""
    torch._dynamo.reset()
    with eager_graphs():
        tensors = [*torch.compile(function, backend="gradfuse", fullgraph=True)(x), x]
    owners = [t.untyped_storage().data_ptr() for t in tensors]
    return [owners.index(o) for o in owners]


def test_a_view_of_a_cast_that_is_returned_is_no_view_of_the_input():
    x = torch.randn(4, 5).bfloat16()
    assert storages(lambda x: (x.float().bfloat16()[None], x.float()), x) == [0, 1, 2]
    assert storages(lambda x: (x.float().bfloat16(), x.float().bfloat16()[1:], torch.tanh(x)), x) == [0, 1, 2, 3]
    assert storages(lambda x: (x[1:].float().bfloat16(), x + 1), x) == [0, 1, 2]


def test_a_part_of_a_cast_that_is_cast_again_is_no_view_of_the_input():
    def function(x):
        wide = x.double()
        return wide.bfloat16().split(2)[-1].float().t().bfloat16(), wide

    assert storages(function, torch.randn(4, 5).bfloat16()) == [0, 1, 2]


def test_a_cast_that_rounds_between_two_that_do_not():
    """If the two casts became one, the rounding would be where stock's passes of torch 2.11 drop it."""
    check_matches_eager(lambda x: x[0].float().half().to(torch.float32).double(), torch.randn(4, 4).double())


def test_two_outputs_of_equal_values_are_two_tensors():
    def function(x):
        narrow = x.bfloat16()
        return narrow.float().bfloat16(), narrow

    assert storages(function, torch.randn(4, 5)) == [0, 1, 2]
