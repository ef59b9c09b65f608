"""The memory and the layout of an attention's result, which may be viewed, copied and written to."""

import pytest
import torch

from .spellings import B, D, H, S
from .test_regressions import attend, bias, paths
from .test_traps import randn, tensors


def a_copy_of_the_result_in_place(q, k, v, b):
    """Eager mode copies here, and the kernel's output has the layout of the query, so that this would be a view."""
    out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), b).transpose(1, 2).reshape(B, S, H * D)
    out += 1.0
    return out


def a_view_of_the_result(q, k, v, b):
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), b).view(B * H, S, D)


def test_the_memory_and_the_layout_of_the_result():
    """A product whose result is not contiguous: it may be viewed, and written to after the graph."""

    def function(q, k, v, b):
        p = (torch.einsum("bqhd,bkhd->bhqk", q, k) + b).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", p, v)
        return out, out.transpose(1, 2).view(B * H, S, D)

    results = []
    for run in (torch.compile(function, backend="gradfuse", fullgraph=True), function):
        inputs = [*(randn(B, S, H, D) for _ in range(3)), bias()]
        out, viewed = run(*inputs)
        assert out.stride() == (S * H * D, D, S * D, 1) and viewed.is_contiguous()
        out += 1.0
        results.append(torch.autograd.grad(out.square().sum() + viewed.sum(), inputs))
    assert all((x - y).norm() <= 1e-5 * y.norm() for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("moved", [lambda x: x.view(B * H, S, D) + 1, lambda x: x + 1])
def test_the_layout_of_a_reshaped_result(moved):
    def function(q, k, v, b):
        return moved(attend(*(x.transpose(1, 2) for x in (q, k, v)), b).reshape(B, H, S, D))

    inputs = [*(randn(B, S, H, D) for _ in range(3)), bias()]
    assert paths(function, *inputs) == ["flex_attention"]
    assert torch.compile(function, backend="gradfuse", fullgraph=True)(*inputs).is_contiguous()


def test_a_result_that_is_used_and_then_written_to():
    """The second attention would read the first after the write."""

    def function(q, k, v, b, k2):
        first = attend(q, k, v, b)
        scores = first @ k2.mT + b
        first.add_(1.0)
        return scores.softmax(-1) @ v, first

    found = paths(function, *tensors(), bias(), randn(B, H, S, D, grad=False))
    assert found == ["flex_attention", "stock"]


def test_a_copy_of_the_result_in_place():
    assert paths(a_copy_of_the_result_in_place, *(randn(B, S, H, D) for _ in range(3)), bias()) == ["flex_attention"]


COPIES = {
    "reshaped": lambda x: x.transpose(1, 2).reshape(B, S, H * D),
    "moved_twice": lambda x: x.permute(2, 0, 1, 3).transpose(0, 1).contiguous(),
    "flattened_and_moved": lambda x: x.flatten(0, 1).transpose(0, 1).contiguous(),
}


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_the_result_that_is_returned_may_be_changed(name):
    def function(q, k, v, b):
        return COPIES[name](attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), b))

    compiled = torch.compile(function, backend="gradfuse", fullgraph=True)
    gradients = []
    for run in (compiled, function):
        inputs = [*(randn(B, S, H, D) for _ in range(3)), bias()]
        out = run(*inputs)
        out += 1.0
        gradients.append(torch.autograd.grad(out.square().sum(), inputs))
    assert all((x - y).norm() <= 1e-5 * y.norm() for x, y in zip(*gradients, strict=True))


def test_a_view_of_the_result():
    assert paths(a_view_of_the_result, *(randn(B, S, H, D) for _ in range(3)), bias()) == ["flex_attention"]
