"""flex_attention on CPU tensors: every case against float64, by the rewritten graphs; some of them as Inductor's C++ too."""

import contextlib
import dataclasses

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from inductor_ext.core import cpu_loops as dense_loops
from tests.support.eager_graphs import eager_graphs

from .cases import BIASES, FEATURES, REFUSED

CASES = {case.name: case for case in FEATURES + BIASES + REFUSED}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", CASES)
def test_graphs_match_float64(name):
    with eager_graphs():
        CASES[name].check("cpu")


#: These cases also run as C++, because its code generation had a fault here or may have one. The others use the same ops.
COMPILED = ["one_query_one_key", "odd_length", "gqa", "bfloat16", "pair_batch"]


@pytest.mark.breadth(0)
@pytest.mark.parametrize("name", COMPILED + [pytest.param(n, marks=pytest.mark.slow) for n in CASES if n not in COMPILED])
def test_matches_float64(name):
    CASES[name].check("cpu")


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(dense_loops, "QUERY_BLOCK", 32)
    monkeypatch.setattr(dense_loops, "KEY_SEGMENT", 32)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("scope", [eager_graphs, contextlib.nullcontext], ids=["graphs", "compiled"])
@pytest.mark.parametrize(
    "name", ["pair_batch", *(pytest.param(n, marks=pytest.mark.slow) for n in ("causal_small_blocks", "empty_row"))]
)
def test_several_segments_of_keys_match_float64(name, scope, small_blocks):
    with scope():
        dataclasses.replace(CASES[name], block_size=16).check("cpu")


def test_segments_that_read_out_of_range_match_float64(small_blocks):
    with eager_graphs():
        dataclasses.replace(CASES["window_reads_out_of_range"], block_size=16).check("cpu")


def test_masked_blocks_are_not_computed(small_blocks):
    """Keys and values of blocks that no query sees are NaN, which any arithmetic with them would spread."""
    length, seen = 128, 64
    mask = create_block_mask(lambda b, h, q, k: k < seen, None, None, length, length, device="cpu", BLOCK_SIZE=32)
    query, key, value = (torch.randn(1, 2, length, 16) for _ in range(3))
    key[:, :, seen:] = value[:, :, seen:] = torch.nan
    inputs = [x.requires_grad_() for x in (query, key, value)]
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), backend="gradfuse", fullgraph=True)
    with eager_graphs():
        out = compiled(*inputs)
        grads = torch.autograd.grad(out, inputs, torch.randn_like(out))
    assert all(x.isfinite().all() for x in (out, *grads))
    assert all(g[:, :, :seen].abs().sum() > 0 and g[:, :, seen:].abs().sum() == 0 for g in grads[1:])


@pytest.mark.breadth(0)
@pytest.mark.parametrize("lengths", [(48, 80), (300, 256, 248, 300)], ids=["in one block", "whole blocks"])
def test_queries_and_keys_whose_lengths_become_symbolic(lengths):
    """The number of blocks comes from the number of queries, which is in no shape of the loop itself."""
    t = torch.randn(2, 8, 8, requires_grad=True)

    def attend(q, k, v, segment):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + t[h, segment[b, i], segment[b, j]])

    compiled = torch.compile(attend, backend="gradfuse", fullgraph=True)
    for batch, length in enumerate(lengths, 2):
        q, k, v = (torch.randn(batch, 2, length, 16, requires_grad=True) for _ in range(3))
        segment = torch.randint(0, 8, (batch, length))
        got = torch.autograd.grad(compiled(q, k, v, segment).square().sum(), (t, q))
        exact = [x.detach().double().requires_grad_() for x in (t, q)]
        bias = exact[0][:, segment[:, :, None], segment[:, None, :]].movedim(0, 1)
        out = (exact[1] @ k.double().mT / 4 + bias).softmax(-1) @ v.double()
        for x, y in zip(got, torch.autograd.grad(out.square().sum(), exact), strict=True):
            assert (x - y).norm() < 1e-5 * y.norm()


@pytest.mark.breadth(0)
def test_operands_that_inductor_lays_out_otherwise():
    """The gradient of a convolution has other strides in Inductor than AOTAutograd traced (SAM's neck)."""
    q, k, v = (torch.randn(2, 4, 64, 16, requires_grad=True) for _ in range(3))
    table, weight = torch.randn(4, 64, 64, requires_grad=True), torch.randn(16, 64, 3, 3, requires_grad=True)

    def model(q, k, v, table, weight):
        out = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i, j])
        image = out.transpose(1, 2).reshape(2, 8, 8, 64).permute(0, 3, 1, 2)
        return torch.nn.functional.conv2d(image, weight, padding=1)

    inputs = (q, k, v, table, weight)
    out = torch.compile(model, backend="gradfuse", fullgraph=True)(*inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    image = ((exact[0] @ exact[1].mT / 4 + exact[3]).softmax(-1) @ exact[2]).transpose(1, 2).reshape(2, 8, 8, 64)
    want = torch.nn.functional.conv2d(image.permute(0, 3, 1, 2), exact[4], padding=1)
    grads = torch.autograd.grad(out.square().sum(), inputs), torch.autograd.grad(want.square().sum(), exact)
    for x, y in [(out, want), *zip(*grads, strict=True)]:
        assert (x - y).norm() < 1e-5 * y.norm()


@pytest.mark.parametrize("shape", [(0, 2, 16, 16), (1, 0, 16, 16), (1, 2, 0, 16), (1, 2, 16, 0)], ids=str)
def test_no_scores(shape):
    batch, heads, queries, keys = shape
    sizes = (batch, heads, queries, 16), (batch, heads, keys, 16), (batch, heads, keys, 16), (2,)
    inputs = [torch.randn(size, requires_grad=True) for size in sizes]

    def attend(q, k, v, t):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + t[h] * j)

    torch._dynamo.reset()
    with eager_graphs():
        out = torch.compile(attend, backend="gradfuse")(*inputs)
        gradients = torch.autograd.grad(out.sum(), inputs)
    assert out.shape == (batch, heads, queries, 16) and not out.any()
    for x, gradient in zip(inputs, gradients, strict=True):
        assert gradient.shape == x.shape and not gradient.any()


@pytest.mark.parametrize("term", [lambda i, n: i - n, lambda i, n: i / n], ids=["difference", "quotient"])
def test_a_symbolic_size_in_a_score_mod(term):
    query = torch.randn(1, 2, 32, 16, requires_grad=True)

    def attend(q):
        n = q.shape[2]
        return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + term(j, n))

    torch._dynamo.reset()
    with eager_graphs():
        out = torch.compile(attend, backend="gradfuse", dynamic=True)(query)
        (got,) = torch.autograd.grad(out.square().sum(), query)
    exact = query.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(
        (((exact @ exact.mT) / 4 + term(torch.arange(32.0), 32)).softmax(-1) @ exact).square().sum(), exact
    )
    assert (got - want).norm() < 1e-5 * want.norm()
