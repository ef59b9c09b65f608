"""Which reads of captured tensors become slices for a table, and that they and their gradients are right."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from inductor_ext.core.fx import name_of
from tests.support.eager_graphs import eager_graphs

from .case import relative_error

BATCH, HEADS = 2, 3

#: The shape of a captured tensor for Q queries and K keys, and a score_mod that reads slices of it.
SLICES = {
    "from query to key": (lambda Q, K: (HEADS, Q + K - 1), lambda t, Q, K: lambda s, b, h, q, k: s + t[h, k - q + Q - 1]),
    "from key to query": (lambda Q, K: (HEADS, Q + K), lambda t, Q, K: lambda s, b, h, q, k: s + t[h, q - k + K]),
    "heads last": (lambda Q, K: (Q + K + 3, HEADS), lambda t, Q, K: lambda s, b, h, q, k: s + t[q + K + 1 - k, h]),
    "the sum": (lambda Q, K: (HEADS, Q + K + 3), lambda t, Q, K: lambda s, b, h, q, k: s * t[h, k + q + 2]),
    "the sum in descending order": (lambda Q, K: (Q + K,), lambda t, Q, K: lambda s, b, h, q, k: s + t[Q + K - 2 - k - q]),
    "all axes": (
        lambda Q, K: (Q + K, HEADS, 2, BATCH),
        lambda t, Q, K: lambda s, b, h, q, k: s + t[(q - k) + K, h, -1, b],
    ),
    "heads in another term": (
        lambda Q, K: (2, Q + K),
        lambda t, Q, K: lambda s, b, h, q, k: s + t[0, q - k + K] * t[1, k - q + Q] * h,
    ),
    "two reads": (
        lambda Q, K: (HEADS, Q + K),
        lambda t, Q, K: lambda s, b, h, q, k: s + (t[h, q - k + K] * t[h, (k - q).abs()]).exp(),
    ),
    "written as a mask": (
        lambda Q, K: (HEADS, Q + K),
        lambda t, Q, K: lambda s, b, h, q, k: torch.where(q >= k, s + t[h, q - k + K], -torch.inf),
    ),
}
#: Others have an index that is not a slice, or may be out of bounds.
INDICES = {
    "twice the distance": (
        lambda Q, K: (HEADS, 2 * (Q + K)),
        lambda t, Q, K: lambda s, b, h, q, k: s + t[h, 2 * (q - k + K)],
    ),
    "some heads": (lambda Q, K: (HEADS + 1, Q + K), lambda t, Q, K: lambda s, b, h, q, k: s + t[h, q - k + K]),
    "heads in descending order": (
        lambda Q, K: (HEADS, Q + K),
        lambda t, Q, K: lambda s, b, h, q, k: s + t[HEADS - 1 - h, q - k + K],
    ),
    "twice the head": (
        lambda Q, K: (HEADS, HEADS, Q + K),
        lambda t, Q, K: lambda s, b, h, q, k: s + t[h, h, q - k + K],
    ),
    "from the end": (lambda Q, K: (HEADS, Q + K), lambda t, Q, K: lambda s, b, h, q, k: s + t[h, k - q]),
    "a clamp": (lambda Q, K: (HEADS, 9), lambda t, Q, K: lambda s, b, h, q, k: s + t[h, (q - k).clamp(-4, 4) + 4]),
    "an image": (
        lambda Q, K: (HEADS, 11, 3),
        lambda t, Q, K: lambda s, b, h, q, k: s + t[h, q // 2 - k // 2 + 5, q % 2 - k % 2 + 1],
    ),
    "a captured offset": (
        lambda Q, K: (HEADS, Q + K),
        lambda t, Q, K: lambda s, b, h, q, k: s + t[h, q - k + torch.full((), K)],
    ),
}


def attention(score_mod, t, q, k):
    return flex_attention(q, k, k, score_mod=score_mod(t, q.shape[2], k.shape[2]))


def results(name, cases, queries, keys):
    """The output and gradients of the rewritten graph, those of a formula, and the names of the graph's ops."""
    shape, score_mod = cases[name]
    t = torch.randn(shape(queries, keys), requires_grad=True)
    q, k = (torch.randn(BATCH, HEADS, n, 8, requires_grad=True) for n in (queries, keys))
    torch._dynamo.reset()
    with eager_graphs() as graphs:
        out = torch.compile(attention, backend="gradfuse", fullgraph=True, dynamic=False)(score_mod, t, q, k)
        got = out, *torch.autograd.grad(out.square().sum(), (t, q, k))
    exact = [x.detach().double().requires_grad_() for x in (t, q, k)]
    b, h, i, j = (torch.arange(n) for n in (BATCH, HEADS, queries, keys))
    scores = exact[1] @ exact[2].mT / 8**0.5
    place = b[:, None, None, None], h[:, None, None], i[:, None], j
    scores = score_mod(exact[0], queries, keys)(scores, *place)
    want = scores.softmax(-1) @ exact[2]
    want = want, *torch.autograd.grad(want.square().sum(), exact)
    return got, want, {name_of(n) for graph in graphs for n in graph.graph.nodes if n.op == "call_function"}


@pytest.mark.breadth(9)
@pytest.mark.parametrize("queries, keys", [(6, 6), (5, 9), (9, 5), (1, 4), (4, 1)])
@pytest.mark.parametrize("name", SLICES)
def test_slices(name, queries, keys):
    got, want, _ = results(name, SLICES, queries, keys)
    assert all(relative_error(x, y) < 1e-5 for x, y in zip(got, want, strict=True))


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", [name for name in SLICES if name != "two reads"])
def test_nothing_is_scattered(name):
    assert "index_put" not in results(name, SLICES, 6, 7)[2]


@pytest.mark.breadth(4)
@pytest.mark.parametrize("name", INDICES)
def test_others_are_indexed(name):
    got, want, ops = results(name, INDICES, 6, 7)
    assert "index_put" in ops
    assert all(relative_error(x, y) < 1e-5 for x, y in zip(got, want, strict=True))


def positions(q, k, t, u):
    """Transformer-XL's bias of positions alone, an inner product for each distance."""
    score_mod = lambda s, b, h, i, j: s + (u[h] * t[i - j + k.shape[2]]).sum(-1)  # noqa: E731
    return flex_attention(q, k, k, score_mod=score_mod)


def test_a_head_that_cancels_is_no_axis_of_the_table():
    q, k = (torch.randn(BATCH, HEADS, n, 8, requires_grad=True) for n in (6, 7))
    t, numbers = torch.randn(13, requires_grad=True), torch.ones(HEADS, 13, dtype=torch.int64)
    score_mod = lambda t, Q, K: lambda s, b, h, i, j: s + t[(numbers[h, i - j + K] * 0 + i - j).abs()]  # noqa: E731
    with eager_graphs():
        out = torch.compile(attention, backend="gradfuse", fullgraph=True, dynamic=False)(score_mod, t, q, k)
        (grad,) = torch.autograd.grad(out.sum(), t)
    bias = t[(torch.arange(6)[:, None] - torch.arange(7)).abs()]
    (want,) = torch.autograd.grad(((q @ k.mT / 8**0.5 + bias).softmax(-1) @ k).sum(), t)
    assert relative_error(grad, want) < 1e-5


def test_rows_are_not_slices():
    q, k = (torch.randn(BATCH, HEADS, n, 8, requires_grad=True) for n in (6, 7))
    t, u = torch.randn(13, 4, requires_grad=True), torch.randn(HEADS, 4, requires_grad=True)
    with eager_graphs():
        out = torch.compile(positions, backend="gradfuse", fullgraph=True)(q, k, t, u)
        got = torch.autograd.grad(out.sum(), (t, u))
    bias = t[torch.arange(6)[:, None] - torch.arange(7) + 7] @ u.mT
    want = torch.autograd.grad(((q @ k.mT / 8**0.5 + bias.permute(2, 0, 1)).softmax(-1) @ k).sum(), (t, u))
    assert all(relative_error(x, y) < 1e-5 for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("queries, keys", [(1, 0), (0, 1)])
def test_no_distances(queries, keys):
    q, k = (torch.randn(BATCH, HEADS, n, 8, requires_grad=True) for n in (queries, keys))
    t = torch.randn(HEADS, 1, requires_grad=True)
    score_mod = lambda t, Q, K: lambda s, b, h, i, j: s + t[h, i - j + K]  # noqa: E731
    with eager_graphs():
        out = torch.compile(attention, backend="gradfuse", fullgraph=True, dynamic=False)(score_mod, t, q, k)
        (grad,) = torch.autograd.grad(out.sum(), t)
    assert out.shape == q.shape and not out.any() and not grad.any()


def test_a_batch_of_any_size():
    """Only the sizes that the table has must be known."""
    shape, score_mod = SLICES["from key to query"]
    t = torch.randn(shape(6, 7), requires_grad=True)
    run = torch.compile(attention, backend="gradfuse", fullgraph=True)
    with eager_graphs() as graphs:
        for batch in (2, 5):
            q, k = (torch.randn(batch, HEADS, n, 8, requires_grad=True) for n in (6, 7))
            torch.autograd.grad(run(score_mod, t, q, k).sum(), t)
    assert len(graphs) == 4 and not any(name_of(n) == "index_put" for graph in graphs for n in graph.graph.nodes)
