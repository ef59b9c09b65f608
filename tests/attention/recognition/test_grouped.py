"""Heads of keys and values that serve several heads of queries are not repeated where attention is recognised."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from inductor_ext.attention.recognition import grouped
from inductor_ext.core.fx import shape_of
from inductor_ext.core.report import collect
from inductor_ext.options import Options
from inductor_ext.passes import ORDER
from inductor_ext.torch_api.higher_order import flex_attention_hop
from tests.attention.case import relative_error
from tests.soundness.check import check_matches_eager
from tests.support.eager_graphs import eager_graphs
from tests.support.interpreter import DEVICES, triton_on_cpu

from .spellings import LOWEST, B, D, S

SHARED, GROUPS = 3, 2
HEADS = SHARED * GROUPS


@pytest.fixture(autouse=True)
def few_keys(monkeypatch):
    monkeypatch.setattr(grouped, "FEWEST_KEYS", 1)


def repeat_kv(x, times=SHARED):
    b, heads, s, d = x.shape
    return x[:, :, None, :, :].expand(b, heads, times, s, d).reshape(b, heads * times, s, d)


def interleaved(x):
    return torch.repeat_interleave(x, dim=1, repeats=SHARED)


def by_head_of_channels(x):
    """Positions before heads, which are repeated there."""
    return x.transpose(1, 2).repeat_interleave(SHARED, 2).transpose(1, 2)


def attention(q, k, v, bias):
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.25 + bias
    later = torch.arange(S)[:, None] < torch.arange(S)
    return F.softmax(scores.masked_fill(later, LOWEST), -1) @ v


def projected(x):
    """A new tensor, as a layer computes it."""
    return x @ torch.eye(D, dtype=x.dtype, device=x.device)


def decoder(repeat):
    return lambda q, k, v, bias: attention(q, repeat(projected(k)), repeat(projected(v)), bias)


def tensors(heads=GROUPS, length=S):
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, HEADS, length, D), *((B, heads, length, D),) * 2, (HEADS, length, length)]
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def heads_of_keys(function, inputs, **options):
    """Compare with eager code in float64, and return the heads of the keys and values that each flex_attention is given."""
    check_matches_eager(function, *inputs, exact=True, **options)
    found = []

    def inspect(gm, _):
        next(each for each in ORDER if each.name == "attention_pattern")(gm, Options())
        calls = gm.graph.find_nodes(op="call_function", target=flex_attention_hop)
        found.extend(tuple(shape_of(x)[1] for x in node.args[1:3]) for node in calls)
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=inspect, fullgraph=True, **options)(*inputs)
    return found


SPELT = {
    "repeat_kv": decoder(repeat_kv),
    "repeat_interleave": decoder(interleaved),
    "positions_before_heads": decoder(by_head_of_channels),
    "sdpa": lambda q, k, v, b: F.scaled_dot_product_attention(
        q, repeat_kv(projected(k)), repeat_kv(projected(v)), attn_mask=b
    ),
    "enable_gqa": lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, attn_mask=b, enable_gqa=True),
    "enable_gqa_and_scale": lambda q, k, v, b: F.scaled_dot_product_attention(
        q, k, v, attn_mask=b, scale=0.3, enable_gqa=True
    ),
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", SPELT)
def test_nothing_is_repeated(name):
    with collect() as report:
        assert heads_of_keys(SPELT[name], tensors()) == [(GROUPS, GROUPS)]
    assert any(f"{GROUPS} heads of keys serve {HEADS} heads of queries" in d.why for d in report.decisions)


def test_one_head_for_all_is_broadcast():
    assert heads_of_keys(SPELT["enable_gqa"], tensors(heads=1)) == [(HEADS, HEADS)]


def test_symbolic_lengths():
    function = lambda q, k, v, b: (q @ repeat_kv(projected(k)).mT + b).softmax(-1) @ repeat_kv(projected(v))  # noqa: E731
    inputs = tensors(length=40)
    for x, dims in zip(inputs, ((2,), (2,), (2,), (1, 2)), strict=True):
        torch._dynamo.mark_dynamic(x, dims)
    assert heads_of_keys(function, inputs) == [(GROUPS, GROUPS)]


def test_a_sink():
    def function(q, k, v, bias, sink):
        scores = q @ repeat_kv(projected(k)).mT + bias
        logits = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(B, -1, S, -1)], dim=-1)
        return F.softmax(logits - logits.max(-1, keepdim=True).values, -1)[..., :-1] @ repeat_kv(projected(v))

    assert heads_of_keys(function, [*tensors(), torch.randn(HEADS, requires_grad=True)]) == [(GROUPS, GROUPS)]


@pytest.mark.breadth(0)
@pytest.mark.parametrize("device", DEVICES)
def test_in_a_kernel(device):
    """A sliding window, a sink, and a bias for each head of queries."""
    where, length = ("cuda", 97) if device == "cuda" else ("cpu", 33)
    shapes = [(2, HEADS, length, D), *((2, GROUPS, length, D),) * 2, (HEADS, 2 * length - 1), (HEADS,)]
    inputs = [torch.randn(s, device=where, requires_grad=True) for s in shapes]

    def function(q, k, v, table, sink):
        i = torch.arange(length, device=q.device)
        distance = i[:, None] - i
        scores = q @ repeat_kv(projected(k)).mT * 0.25 + table[:, distance + length - 1]
        scores = scores.masked_fill((distance < 0) | (distance >= 8), LOWEST)
        logits = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(2, -1, length, -1)], dim=-1)
        return F.softmax(logits, -1)[..., :-1] @ repeat_kv(projected(v))

    torch._dynamo.reset()
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu(), collect() as report:
        out = torch.compile(function, backend="gradfuse", dynamic=False)(*inputs)
        got = torch.autograd.grad(out.square().sum(), inputs)
    assert any(f"{GROUPS} heads of keys" in d.why for d in report.decisions)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    want = function(*exact)
    for g, w in zip((out, *got), (want, *torch.autograd.grad(want.square().sum(), exact)), strict=True):
        assert relative_error(g, w) < 1e-5


def tiled(x):
    """Neighbouring heads of queries read different heads here."""
    return projected(x).repeat(1, SHARED, 1, 1)


def only_keys(q, k, v, bias):
    return attention(q, repeat_kv(projected(k)), tiled(v), bias)


def groups_of_other_sizes(q, k, v, bias):
    k, v = projected(k), projected(torch.cat([v, v[:, :1]], 1))
    return attention(q, repeat_kv(k), repeat_kv(v, HEADS // 3), bias)


@torch._dynamo.allow_in_graph
def repeat_interleave(x, repeats, dim):
    """The user's own function of that name."""
    return x.repeat_interleave(repeats, dim).flip(dim)


def by_a_function_of_that_name(q, k, v, bias):
    k, v = (repeat_interleave(projected(x), SHARED, 1) for x in (k, v))
    return attention(q, k, v, bias)


def what_is_given(q, k, v, bias):
    """The caller may change it between forward and backward, where eager mode has saved a copy."""
    return attention(q, repeat_kv(k), repeat_kv(v), bias)


def what_is_given_behind_nothing(q, k, v, bias):
    """Inductor removes all of these copies."""
    k = torch.cat([k.clone() + torch.zeros(()), v[:, :0]], 1).repeat(1, 1, 1, 1)
    return attention(q, repeat_kv(k.clone()), repeat_kv(F.dropout(v, 0.0, training=True) * 1.0), bias)


def what_is_returned(q, k, v, bias):
    k, v = projected(k), projected(v)
    return attention(q, repeat_kv(k), repeat_kv(v), bias), k, v[:, :1]


def what_changes_later(q, k, v, bias):
    k, v = projected(k), projected(v)
    out = attention(q, repeat_kv(k), repeat_kv(v), bias)
    k.zero_()
    v[:, :1] = 1.0
    return out + k.sum() + v.sum()


def what_a_checkpoint_changes_later(q, k, v, bias):
    """No name and no schema tells that."""
    k, v = projected(k), projected(v)
    out = attention(q, repeat_kv(k), repeat_kv(v), bias)

    def body(x):
        with torch.no_grad():
            k.zero_()
            v.zero_()
        return x * 1.5

    return checkpoint(body, out, use_reentrant=False)


def what_changes_before(q, k, v, bias):
    k, v = projected(k), projected(v)
    repeated = repeat_kv(k), repeat_kv(v)
    k.zero_()
    v[:, :1] = 1.0
    return attention(q, *repeated, bias)


def copies_that_change(q, k, v, bias):
    k, v = repeat_kv(projected(k)), repeat_kv(projected(v))
    k[:, ::2] = 1.0
    v *= 2.0
    return attention(q, k, v, bias)


def without_a_gradient(q, k, v, bias):
    k, v = projected(k), projected(v)
    with torch.no_grad():
        k, v = repeat_kv(k), repeat_kv(v)
    return attention(q, k, v, bias)


COPIED = [
    only_keys,
    what_is_given,
    what_is_given_behind_nothing,
    what_is_returned,
    what_changes_later,
    what_a_checkpoint_changes_later,
]
COPIED += [
    groups_of_other_sizes,
    by_a_function_of_that_name,
    what_changes_before,
    copies_that_change,
    without_a_gradient,
    decoder(tiled),
]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("function", COPIED, ids=lambda f: f.__name__)
def test_copies_that_are_needed(function):
    assert heads_of_keys(function, tensors()) == [(HEADS, HEADS)]


def behind_views(q, k, v, bias):
    k, v = (x.clone().transpose(1, 2).transpose(1, 2) for x in (k, v))
    return attention(q, repeat_kv(k), repeat_kv(v), bias)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("function", [what_is_given, behind_views, SPELT["enable_gqa"]])
def test_what_is_given_may_change_before_the_backward(function):
    """Eager mode has saved copies of the keys and values."""
    given, expected = tensors(), [x.detach().double().requires_grad_() for x in tensors()]
    torch._dynamo.reset()
    with eager_graphs():
        compiled = torch.compile(function, backend="gradfuse", fullgraph=True)
        for run, inputs in ((compiled, given), (function, expected)):
            out = run(*inputs)
            with torch.no_grad():
                inputs[1].zero_()
                inputs[2].zero_()
            out.sum().backward()
    assert all(relative_error(g.grad, e.grad) < 1e-5 for g, e in zip(given, expected, strict=True))


def test_a_group_that_is_cut_off():
    """Five heads of queries, of which two, two and one share heads of keys."""
    function = lambda q, k, v, b: attention(q[:, :5], *(repeat_kv(projected(x), 2)[:, :5] for x in (k, v)), b[:5])  # noqa: E731
    assert heads_of_keys(function, tensors(heads=3)) == [(5, 5)]


def test_few_keys_are_repeated(monkeypatch):
    monkeypatch.setattr(grouped, "FEWEST_KEYS", B * GROUPS * S + 1)
    assert heads_of_keys(decoder(repeat_kv), tensors()) == [(HEADS, HEADS)]
    assert heads_of_keys(SPELT["enable_gqa"], tensors()) == [(GROUPS, GROUPS)]
