"""Dropout inside the kernels: the mask is a function of the seed and the positions, in every kernel and in the reference."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from inductor_ext.attention import backward, dropout, dropout_mask
from inductor_ext.attention.kernel_dropout import philox, scale
from inductor_ext.attention.recognition import rewrite
from inductor_ext.core.report import collect
from tests.support.eager_graphs import eager_graphs
from tests.support.emitted import triton_sources
from tests.support.interpreter import INTERPRETED, triton_on_cpu

B, H, D = 2, 2, 16
DEVICES = [
    pytest.param("cpu", marks=INTERPRETED),
    pytest.param("interpreter", marks=INTERPRETED),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def on(device):
    """The device of tensors, and the context in which to compile. On "cpu" the rewritten graphs run as they are."""
    contexts = {"cpu": eager_graphs, "interpreter": lambda: triton_on_cpu(tma=True)}
    return "cuda" if device == "cuda" else "cpu", contexts.get(device, contextlib.nullcontext)()


def drawn_seed(device):
    """The seed that the next attention draws, if Inductor takes random numbers from ATen."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def assert_matches_float64(device, p, queries, keys, *, bias=None, kv_heads=H, mask=None, deterministic=False, **tiles):
    """Output and gradients of one attention against float64 with the mask of the reference."""
    where, context = on(device)
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, queries, D), (B, kv_heads, keys, D), (B, kv_heads, keys, D), (B, H, queries, queries + keys - 1)]
    inputs = [torch.randn(s, generator=generator).to(where).requires_grad_() for s in shapes]
    grad = torch.randn(B, H, queries, D, generator=generator).to(where)
    bias = bias or (lambda t: lambda s, b, h, q, k: s + t[0, h, 0, q - k + keys - 1])
    block_mask = mask and create_block_mask(mask, None, None, queries, keys, device=where)

    def attend(q, k, v, t):
        options = dropout(p) | tiles
        gqa = kv_heads != H
        return flex_attention(q, k, v, score_mod=bias(t), block_mask=block_mask, enable_gqa=gqa, kernel_options=options)

    torch._dynamo.reset()
    with context, config.patch(fallback_random=True):
        torch.manual_seed(5)
        compiled = torch.compile(attend, backend="gradfuse", fullgraph=True, options={"deterministic": deterministic})
        out = compiled(*inputs)
        got = [out, *torch.autograd.grad(out, inputs, grad)]
    torch.manual_seed(5)
    keep = dropout_mask(drawn_seed(where), p, B, H, queries, keys)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    sizes = (B, H, queries, keys)
    b, h, i, j = (torch.arange(n, device=where).view([-1 if a == d else 1 for a in range(4)]) for d, n in enumerate(sizes))
    k, v = (x.repeat_interleave(H // kv_heads, 1) for x in exact[1:3])
    scores = bias(exact[3])(exact[0] @ k.mT / D**0.5, b, h, i, j)
    if mask is not None:
        scores = scores.masked_fill(~mask(b, h, i, j), -torch.inf)
    out = (scores.softmax(-1) * keep * scale(p)) @ v
    for x, y in zip(got, [out, *torch.autograd.grad(out, exact, grad.double())], strict=True):
        # With one key, the gradient of the scores is exactly 0.
        assert (x - y).norm() <= 1e-5 * max(y.norm(), grad.norm())


@pytest.mark.breadth(1)
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device, one_pass):
    assert_matches_float64(device, 0.3, 40, 53, kv_heads=1, bwd_ONE_PASS=one_pass)


@pytest.mark.breadth(0)
@INTERPRETED
def test_compiled_for_a_cpu():
    assert_matches_float64("C++", 0.3, 40, 53, kv_heads=1)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("queries", "keys"), [(1, 97), (97, 1), (150, 131)])
def test_lengths(device, queries, keys):
    assert_matches_float64(device, 0.1, queries, keys)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("device", DEVICES)
def test_masks_and_deterministic_gradients(device):
    causal = lambda b, h, q, k: q >= k  # noqa: E731
    assert_matches_float64(device, 0.5, 64, 64, mask=causal, deterministic=device != "cpu")


@pytest.mark.breadth(0)
@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("one_pass", [False, True])
def test_keys_in_descending_order(device, one_pass):
    """TMA moves a relative shift with its keys in reverse."""
    bias = lambda t: lambda s, b, h, q, k: s + t[b, h, q, q - k + 127]  # noqa: E731
    assert_matches_float64(device, 0.2, 129, 128, bias=bias, bwd_ONE_PASS=one_pass)


def test_philox_is_the_published_one():
    """Known answers of Random123."""
    numbers = lambda *xs: [torch.tensor(x) for x in xs]  # noqa: E731
    ones = 0xFFFFFFFF
    zeros = numbers(0, 0), numbers(0, 0, 0, 0)
    assert philox(*zeros, rounds=7) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert philox(*zeros, rounds=10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox(numbers(ones, ones), numbers(ones, ones, ones, ones), rounds=10) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


def test_statistics():
    """Mean, variance along rows and columns, and correlations of neighbours, heads, batches and steps."""
    p = 0.1
    seeds = [torch.tensor([n]) for n in (0, 1, -5, 2**40)]
    dropped = [~dropout_mask(seed, p, 2, 3, 256, 256) for seed in seeds]
    sigma = (p * (1 - p)) ** 0.5
    for x in dropped:
        x = (x.double() - p) / sigma
        assert abs(x.mean()) < 5 / x.numel() ** 0.5
        for sums in (x.sum(-1), x.sum(-2)):
            assert abs(sums.var() / 256 - 1) < 5 * (2 / sums.numel()) ** 0.5
        pairs = [(x[..., n:], x[..., :-n]) for n in (1, 2, 3, 4)] + [(x[..., n:, :], x[..., :-n, :]) for n in (1, 4)]
        pairs += [(x[:, 0], x[:, 1]), (x[0], x[1])]
        for a, b in pairs:
            assert abs((a * b).mean()) < 5 / a.numel() ** 0.5
    for a, b in itertools.pairwise(dropped):
        assert abs(((a.double() - p) * (b.double() - p)).mean() / sigma**2) < 5 / a.numel() ** 0.5


def attention(p=0.4):
    return lambda q, t: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * t[h], kernel_options=dropout(p))


def inputs(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(device).requires_grad_() for s in ((B, H, 32, D), (H,))]


def test_seeds_are_reproducible_and_differ_from_step_to_step():
    compiled = torch.compile(attention(), backend="gradfuse", fullgraph=True)
    q, t = inputs()

    def steps():
        torch.manual_seed(1)
        return [compiled(q, t).detach() for _ in range(3)]

    first, again = steps(), steps()
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])


@pytest.mark.breadth(0)
def test_two_attentions_of_one_graph_draw_other_masks():
    one = attention()
    q, t = inputs()
    out = torch.compile(lambda q, t: (one(q, t), one(q, t)), backend="gradfuse", fullgraph=True)(q, t)
    assert not torch.equal(*out)


def test_dropout_without_gradients():
    """Monte Carlo dropout: stock's kernels of inference have none."""
    p = 0.4
    q, t = inputs()
    with torch.no_grad(), config.patch(fallback_random=True):
        torch.manual_seed(5)
        out = torch.compile(attention(p), backend="gradfuse", fullgraph=True)(q, t)
    torch.manual_seed(5)
    keep = dropout_mask(drawn_seed("cpu"), p, B, H, 32, 32)
    exact = q.detach().double()
    weights = (exact @ exact.mT / D**0.5 * t.detach().double().view(H, 1, 1)).softmax(-1)
    expected = (weights * keep * scale(p)) @ exact
    assert (out - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.breadth(1)
@pytest.mark.parametrize("fallback_random", [True, False])
def test_a_checkpoint_recomputes_the_same_mask(fallback_random):
    """With another mask in the backward, the gradient would not be the derivative of what the forward computes."""
    one = attention()
    inside = lambda q, t: checkpoint(lambda q, t: one(q * 2.0, t), q, t, use_reentrant=False)  # noqa: E731
    options = {"fallback_random": fallback_random}
    compiled = torch.compile(inside, backend="gradfuse", fullgraph=True, options=options)
    at = [x.detach().double().requires_grad_() for x in inputs()]
    along = [torch.randn_like(x) for x in at]

    def loss(step):
        torch.manual_seed(2)
        return compiled(*(x + step * d for x, d in zip(at, along, strict=True))).square().sum()

    # Inductor's own random numbers are those of its code only.
    with eager_graphs() if fallback_random else contextlib.nullcontext():
        gradients = torch.autograd.grad(loss(0.0), at)
        difference = (loss(1e-6) - loss(-1e-6)) / 2e-6
    derivative = sum((g * d).sum() for g, d in zip(gradients, along, strict=True))
    assert abs(difference - derivative) < 1e-6 * abs(derivative)


@pytest.mark.breadth(0)
def test_symbolic_lengths():
    q, t = inputs()
    compiled = torch.compile(attention(), backend="gradfuse", fullgraph=True, dynamic=True)
    out = [compiled(x, t) for x in (q, q[:, :, :20])]
    out[1].sum().backward()
    assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0])
def test_other_probabilities_are_refused(p):
    with pytest.raises(ValueError, match="must be in"):
        dropout(p)


def test_nothing_is_drawn_without_dropout():
    assert dropout(0.0) == {}
    q, t = inputs()
    forward, backward = triton_sources(torch.compile(attention(0.0), backend="gradfuse", fullgraph=True), q, t)
    assert "philox" not in forward + backward


NEEDED = [("cpu", "attention_dropout"), ("cpu", "dense_attention")]
NEEDED += [("interpreter", name) for name in ("attention_dropout", "flex_attention", "flex_attention_backward")]


@pytest.mark.breadth(2)
@pytest.mark.parametrize(("device", "name"), NEEDED)
def test_dropout_is_not_lost_where_what_computes_it_is_disabled(device, name):
    _, context = on(device)
    q, t = inputs()
    with context, pytest.raises(Exception, match=rf"cannot compile the dropout.*test_dropout.py.*{name}.*is disabled"):
        torch.compile(attention(), backend="gradfuse", fullgraph=True, options={"disable": [name]})(q, t)


@pytest.mark.breadth(3)
@pytest.mark.parametrize(("device", "name"), NEEDED)
def test_spelt_out_dropout_is_not_lost_either(device, name, monkeypatch):
    """The forward would drop other probabilities than the backward, or none."""
    monkeypatch.setattr(rewrite, "FEWEST_ON_CPU", 0)
    _, context = on(device)
    q, bias = torch.randn(1, 2, 32, 16, requires_grad=True), torch.randn(32, 32, requires_grad=True)

    def attend(q, bias):
        return F.dropout((q @ q.mT + bias).softmax(-1), 0.5) @ q

    with context, collect() as report:
        torch.compile(attend, backend="gradfuse", fullgraph=True, options={"disable": [name]})(q, bias).sum().backward()
    assert [d.why for d in report.decisions if d.pass_name == "attention_pattern"] == [
        f"{name!r}, which would compute it, is disabled"
    ]


def test_dropout_is_not_verified():
    q, t = inputs()
    with pytest.raises(Exception, match="eager mode, with which verify compares, drops nothing"):
        torch.compile(attention(), backend="gradfuse", fullgraph=True, options={"verify": True})(q, t)


def test_dropout_is_not_lost_where_the_forward_is_left_to_stock():
    q, t = inputs()
    decode = lambda q, t: flex_attention(q, q, q, kernel_options=dropout(0.3) | {"BACKEND": "TRITON_DECODE"}) * t[0]  # noqa: E731
    with on("interpreter")[1], pytest.raises(Exception, match=r"cannot compute the dropout.*test_dropout.py.*BACKEND="):
        torch.compile(decode, backend="gradfuse", fullgraph=True)(q, t)


def test_dropout_is_not_lost_where_the_backward_is_left_to_stock(monkeypatch):
    def refuse(joint):
        raise backward.NotUnderstood(joint.graph.output_node(), "this test does not")

    monkeypatch.setattr(backward, "take_apart", refuse)
    q, t = inputs()
    with on("interpreter")[1], pytest.raises(Exception, match=r"cannot compute the dropout.*this test does not"):
        torch.compile(attention(), backend="gradfuse", fullgraph=True)(q, t).sum().backward()


@pytest.mark.breadth(1)
@pytest.mark.parametrize("fused", [False, True])
def test_dropout_of_attention_that_is_spelt_out(fused, monkeypatch):
    """T5 trains with dropout. The kept probabilities are those of one seed, in the forward and in the backward."""
    monkeypatch.setattr(rewrite, "FEWEST_ON_CPU", 0)
    # The seed is drawn by ATen here, so that this test can draw it too.
    monkeypatch.setattr(rewrite, "uses_eager_random_numbers", lambda: False)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, 48, D, generator=generator, requires_grad=True) for _ in range(3))
    table = torch.randn(H, 95, generator=generator, requires_grad=True)
    index = torch.arange(48)[:, None] - torch.arange(48)[None, :] + 47

    def spelt_out(q, k, v, table):
        if fused:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=table[None, :, index], dropout_p=0.25, scale=1.0)
        return F.dropout((q @ k.mT + table[:, index]).softmax(-1), p=0.25, training=True) @ v

    with collect() as report, config.patch(fallback_random=True), eager_graphs():
        torch.manual_seed(4)
        out = torch.compile(spelt_out, backend="gradfuse", fullgraph=True)(q, k, v, table)
        got = [out, *torch.autograd.grad(out.square().sum(), [q, k, v, table])]
    assert {"attention_pattern", "attention_dropout"} <= {d.pass_name for d in report.decisions}
    torch.manual_seed(4)
    keep = dropout_mask(drawn_seed("cpu"), 0.25, B, H, 48, 48)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, table)]
    out = ((exact[0] @ exact[1].mT + exact[3][:, index]).softmax(-1) * keep / 0.75) @ exact[2]
    for x, y in zip(got, [out, *torch.autograd.grad(out.square().sum(), exact)], strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()


@pytest.mark.parametrize("options", [{"fallback_random": True}, {"verify": True}])
def test_the_random_numbers_of_eager_mode(options, monkeypatch):
    monkeypatch.setattr(rewrite, "FEWEST_ON_CPU", 0)
    q, bias = torch.randn(1, 2, 32, 16, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    attend = lambda q, bias: F.dropout((q @ q.mT + bias).softmax(-1), 0.5) @ q  # noqa: E731
    outs = []
    for function in (torch.compile(attend, backend="gradfuse", fullgraph=True, options=options), attend):
        torch.manual_seed(3)
        outs.append(function(q, bias))
    assert (outs[0] - outs[1]).norm() <= 1e-5 * outs[1].norm()


@pytest.mark.gpu
def test_cuda_graphs():
    """Each replay draws another mask, and its backward has the same one: the output is linear in the values."""
    q, t = inputs("cuda")
    v = torch.randn_like(q).requires_grad_()
    options = dropout(0.4)
    attend = lambda q, v, t: flex_attention(q, q, v, lambda s, b, h, i, j: s * t[h], kernel_options=options)  # noqa: E731
    compiled = torch.compile(attend, backend="gradfuse", fullgraph=True, mode="reduce-overhead")
    outs = []
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(q, v, t)
        tangent = torch.randn_like(out)
        # Gradients that accumulate in q.grad would be memory that the next replay overwrites.
        grad = torch.autograd.grad(out, [q, v, t], tangent)[1]
        outs.append(out.detach().clone())
        torch.testing.assert_close((grad * v).sum(), (tangent * outs[-1]).sum(), rtol=1e-4, atol=1e-3)
    assert not torch.equal(outs[-1], outs[-2])


@pytest.mark.gpu
def test_a_seed_and_deterministic_give_the_same_bits():
    torch._dynamo.reset()
    (q, t), grad = inputs("cuda"), torch.randn(B, H, 32, D, device="cuda")
    compiled = torch.compile(attention(), backend="gradfuse", fullgraph=True, options={"deterministic": True})

    def step():
        out = compiled(q, t)
        return [out.detach(), *torch.autograd.grad(out, (q, t), grad)]

    torch.manual_seed(1)
    first, second = step(), step()
    torch.manual_seed(1)
    assert all(map(torch.equal, first, step())) and not torch.equal(first[0], second[0])
