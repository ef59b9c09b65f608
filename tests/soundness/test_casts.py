"""Casts of tensors that are written to: the tensor itself must not replace its cast."""

import pytest
import torch
import torch.nn.functional as F

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


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
#: A buffer b, or a result, that a product with x keeps for the backward, as a whole or in part; and the dtypes of x and b.
KEPT = {
    "whole": (lambda x, b: x * b.float().bfloat16()[:4], BF16, BF16),
    "whole in a matmul": (lambda x, b: x @ b.float().bfloat16().t(), BF16, BF16),
    "whole in a batched matmul": (lambda x, b: torch.matmul(x[None], b.double().float().bfloat16().mT[None])[0], BF16, BF16),
    "whole in a layer": (lambda x, b: F.linear(x, b.float().bfloat16()), BF16, BF16),
    "whole, recomputed": (lambda x, b: x * (b.float().bfloat16()[:4] * 2).tanh().float().bfloat16(), BF16, BF16),
    "part, recomputed": (lambda x, b: F.layer_norm(x, (8,), b.float().bfloat16()[0], None), BF16, BF16),
    "repeated once": (lambda x, b: x @ b.float().bfloat16().repeat(1, 1).t(), BF16, BF16),
    "padded with nothing": (lambda x, b: x @ F.pad(b.float().bfloat16(), (0, 0)).t(), BF16, BF16),
    "concatenated alone": (lambda x, b: x @ torch.cat([b.float()]).bfloat16().t(), BF16, BF16),
    "transposed between the casts": (lambda x, b: x @ b.float().t().bfloat16(), BF16, BF16),
    "reshaped": (lambda x, b: x @ b.double().reshape(3, 4, 8).flatten(0, 1).float().t(), FP32, FP32),
    "matmul": (lambda x, b: x[:, :4] @ b.float()[:4].bfloat16(), BF16, BF16),
    "transposed": (lambda x, b: x @ b.float()[:4].t().bfloat16(), BF16, BF16),
    "part of a cast": (lambda x, b: x * b.float()[:4].bfloat16(), BF16, BF16),
    "cast of a part": (lambda x, b: x * b[:4].float().bfloat16(), BF16, BF16),
    "selected": (lambda x, b: x * b.float()[3].bfloat16(), BF16, BF16),
    "split": (lambda x, b: x * b.float().split(4)[1].bfloat16(), BF16, BF16),
    "every second column": (lambda x, b: x[:, :4] * b[:4].to(FP64)[:, ::2].to(FP32), FP32, FP32),
}


def gradient_after(function, x, b, write):
    """The gradient of x, if the second argument, or the second result, is written to before the backward."""
    x, b = x.clone().requires_grad_(), b.clone()
    out = function(x, b)
    z, written = out if isinstance(out, tuple) else (out, b)
    if write == "outside":
        written.zero_()
    return torch.autograd.grad(z, x, torch.ones_like(z))[0]


@pytest.mark.breadth(10)
@pytest.mark.parametrize("write", ["outside", "inside", "result"])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_for_the_backward_is_a_copy(name, write):
    """In eager mode a cast is a copy, which does not change if its source is written to later."""
    kept, *dtypes = KEPT[name]
    x, b = (torch.randn(*shape).to(dtype) for shape, dtype in zip(((4, 8), (12, 8)), dtypes, strict=True))

    def function(x, b):
        if write == "result":
            y = b * 2
            return kept(x, y), y
        z = kept(x, b)
        if write == "inside":
            b.zero_()
        return z

    when = "inside" if write == "inside" else "outside"
    torch._dynamo.reset()
    with eager_graphs():
        got = gradient_after(torch.compile(function, backend="gradfuse", fullgraph=True), x, b, when)
    torch.testing.assert_close(got, gradient_after(function, x, b, when))


@pytest.mark.parametrize(
    "function, shape",
    [
        (lambda x: torch.as_strided(x[:, ::2].to(FP64).to(FP32), (2, 3), (3, 1)) * 2, (4, 8)),
        (lambda x: torch.as_strided(x[:, ::2].to(FP64), (2, 3), (3, 1)) * 2, (4, 8)),
        (lambda x: torch.as_strided(x.expand(4, 6).to(FP64), (2, 3), (6, 1)) * 2, (6,)),
        (lambda x: torch.view_as_complex(x[:, :, ::2].to(FP64).to(FP32)).real * 2, (4, 4, 4)),
        (lambda x: x[:, ::2].to(FP64).to(FP32).view(torch.int64) + 1, (4, 4)),
        (lambda x: torch.view_as_complex(x[:, None].expand(4, 2).to(FP64)).real * 2, (4,)),
    ],
)
def test_an_op_that_reads_strides_needs_the_dense_result_of_the_cast(function, shape):
    check_matches_eager(function, torch.randn(shape))


def test_a_write_through_strides():
    def function(x):
        y = x[:, ::2].to(FP64).to(FP32)
        y.as_strided((2, 2), (4, 1)).add_(1)
        return y * 2

    check_matches_eager(function, torch.randn(4, 8))
