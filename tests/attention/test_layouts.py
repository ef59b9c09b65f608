"""The layouts of captured tensors that a score_mod looks up: which are changed, and that the values stay the same."""

from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from inductor_ext import passes
from inductor_ext.attention import hoisting
from tests.support.dynamo_graphs import after
from tests.support.eager_graphs import eager_graphs

BATCH, HEADS, LENGTH, ENTRIES = 2, 4, 16, 9


@pytest.fixture(autouse=True)
def lookups_stay_in_the_kernel():
    """As in a model whose pairs are too many for a table."""
    with mock.patch.object(hoisting, "LARGEST_PAIR_TABLE", 0):
        yield


def laid_out(score_mod):
    """The last two lines of the score_mod after the pass, and the decisions."""
    query = torch.randn(BATCH, HEADS, LENGTH, 16, requires_grad=True)
    seen = after(passes.layouts, lambda q: flex_attention(q, q, q, score_mod=score_mod), query)
    return seen, [d.why for d in seen["decisions"]]


def integers(dtype=torch.int64, shape=(BATCH, LENGTH, LENGTH)):
    return torch.randint(-ENTRIES, ENTRIES, shape, dtype=dtype)


def learned(*shape):
    return torch.randn(*shape, requires_grad=True)


def operands(seen):
    return [n.value for n in seen["captured"]]


def test_a_table_has_its_entries_last_and_an_index_has_32_bits():
    t, index = learned(ENTRIES, HEADS), integers()
    seen, why = laid_out(lambda s, b, h, q, k: s + t[index[b, q, k], h])
    assert {(tuple(x.shape), x.dtype) for x in operands(seen)} == {
        ((HEADS, ENTRIES), torch.float32),
        ((BATCH, LENGTH, LENGTH), torch.int32),
    }
    assert all(x.is_contiguous() for x in operands(seen))
    assert len(why) == 2 and "has 32-bit integers" in " ".join(why) and "has the dims [1, 0]" in " ".join(why)


def test_an_index_is_read_with_its_positions_last():
    t, index = learned(HEADS, ENTRIES), integers(torch.int32, (LENGTH, LENGTH, BATCH))
    seen, why = laid_out(lambda s, b, h, q, k: s + t[h, index[q, k, b]])
    assert (BATCH, LENGTH, LENGTH) in {tuple(x.shape) for x in operands(seen)}
    assert len(why) == 1


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda t, i: lambda s, b, h, q, k: s + t[h, i[b, q, k] - i[b, k, q]], id="difference of time stamps"),
        pytest.param(lambda t, i: lambda s, b, h, q, k: s + t[h, i[b, q, k]] * (i[b, q, k] > 3), id="also compared"),
    ],
)
def test_integers_that_are_not_only_indices_keep_64_bits(make):
    seen, why = laid_out(make(learned(HEADS, ENTRIES), integers()))
    assert not why and torch.int64 in {x.dtype for x in operands(seen)}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda t: lambda s, b, h, q, k: s + t[q, k, b, h], id="read once for each score"),
        pytest.param(lambda t: lambda s, b, h, q, k: s + t[b, h, q, k], id="already in order"),
        pytest.param(lambda t: lambda s, b, h, q, k: s + t[q, k, b, h] * t[h, b, q, k], id="two orders"),
    ],
)
def test_what_stays(make):
    size = max(BATCH, HEADS, LENGTH)
    why = laid_out(make(learned(size, size, size, size)))[1]
    assert not why


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_values_and_gradients_are_the_same(dtype):
    t, index = learned(ENTRIES, HEADS), integers(torch.int64).remainder(ENTRIES).to(dtype)
    query = torch.randn(BATCH, HEADS, LENGTH, 16, requires_grad=True)
    grad = torch.randn_like(query)

    def attention(query, t, index):
        return flex_attention(query, query, query, score_mod=lambda s, b, h, q, k: s + t[index[b, q, k], h])

    def dense(query, t, index):
        scores = query @ query.mT / query.shape[-1] ** 0.5 + t[index.long()].permute(0, 3, 1, 2)
        return scores.softmax(-1) @ query

    with eager_graphs():
        out = torch.compile(attention, backend="gradfuse", fullgraph=True)(query, t, index)
        got = [out, *torch.autograd.grad(out, [query, t], grad)]
    exact = [x.detach().double().requires_grad_() for x in (query, t)]
    out = dense(*exact, index)
    want = [out, *torch.autograd.grad(out, exact, grad.double())]
    for x, y in zip(got, want, strict=True):
        assert (x - y).norm() < 1e-5 * y.norm()


def test_an_index_beyond_32_bits_does_not_become_a_valid_one():
    t, index = learned(ENTRIES, HEADS), integers()
    index[0, 0, 0] = 2**32 + 3
    seen, _ = laid_out(lambda s, b, h, q, k: s + t[index[b, q, k], h])
    (cast,) = [n for n in seen["captured"] if n.value.dtype is torch.int32]
    clamp = cast.args[0]
    narrow = getattr(index, clamp.target)(*clamp.args[1:]).to(cast.args[1])
    assert narrow[0, 0, 0] == 2**31 - 1 and torch.equal(narrow[1:], index[1:].int())
