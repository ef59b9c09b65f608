"""Programs for which recognition was wrong once: writes, gradient modes, dtypes, shapes and lookups at the edges."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

from .spellings import B, D, H, S
from .test_traps import decisions, randn, tensors


def bias(*shape):
    return randn(*(shape or (1, H, S, S)))


def paths(function, *inputs):
    """Compare with eager code, and return what became of each attention that was found."""
    return [d.path for d in decisions(function, *inputs)]


def attend(q, k, v, b):
    return (q @ k.mT + b).softmax(-1) @ v


def the_mask_of_sdpa_is_scaled_in_place(q, k, v, b):
    mask = b * 1.0
    mask.mul_(3.0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def the_mask_of_sdpa_is_assigned(q, k, v, b):
    mask = b * 1.0
    mask[..., 5:] = -1e4
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def queries_change_after_the_product(q, k, v, b):
    q = q * 1.0
    k = k.detach()
    scores = q @ k.mT
    q += 1
    return (scores + b).softmax(-1) @ v + q


def in_place_by_position(q, k, v, b):
    x = b * 1.0
    F.leaky_relu(x, 0.2, True)
    return attend(q, k, v, x)


def scores_in_place_by_position(q, k, v, b):
    return (F.leaky_relu(q @ k.mT, 0.2, True) + b).softmax(-1) @ v


def a_list_in_place(q, k, v, b):
    x = b * 1.0
    torch._foreach_mul_([x], 3.0)
    return attend(q, k, v, x)


def softmax_without_gradient(q, k, v, b):
    scores = q @ k.mT + b
    with torch.no_grad():
        p = scores.softmax(-1)
    return p @ v


def probabilities_without_gradient(q, k, v, b):
    p = (q @ k.mT + b).softmax(-1)
    with torch.no_grad():
        p = p.clone()
    return p @ v


def a_residual_in_place(q, k, v, b):
    out = attend(q, k, v, b)
    out += q
    return out


def probabilities_as_integers(q, k, v, b):
    return attend(q, k, v, b) + (q @ k.mT + b).softmax(-1).to(torch.bool).to(v.dtype) @ v


def keyword_arguments(q, k, v, b):
    b = torch.unsqueeze(input=torch.permute(b[0], dims=(0, 1, 2)), dim=0)
    ends = torch.arange(start=0, end=S)[:, None] * torch.arange(end=S, start=0, step=1) * 0.0 + torch.arange(end=S) * 0.1
    b = b + ends
    return attend(q, k, v, torch.tril(input=b.swapaxes(axis0=-1, axis1=-2)))


def results_in_memory_of_others(q, k, v, b):
    """``tanh`` with ``out`` is not ``tan``, which is the name without its last letter."""
    distance = (torch.arange(S)[:, None] - torch.arange(S)) * 0.03
    other = torch.exp2(distance, out=torch.zeros(S, S)) + torch.erfc(distance, out=torch.zeros(S, S))
    return attend(q, k, v, b + torch.tanh(distance, out=torch.zeros(S, S)) + other)


def a_long_expression(q, k, v, b):
    scores = q @ k.mT + b
    for _ in range(400):
        scores = scores * 0.99 + 0.01
    return scores.softmax(-1) @ v


def a_long_bias(q, k, v, b):
    for _ in range(400):
        b = b * 0.99 + 0.01
    return attend(q, k, v, b)


def queries_change_afterwards(q, k, v, b):
    q = q * 1.0
    out = attend(q, k.detach(), v, b)
    q += 1
    return out + q


def dropout_of_inference(q, k, v, b):
    return torch.dropout((q @ k.mT + b).softmax(-1), 0.5, train=False) @ v


def a_diagonal_of_rows(q, k, v, b):
    """Each probability is of another row."""
    p = (q[0, 0] @ k[0, 0].mT)[:, None] + b[0, 0]
    return p.softmax(-1).reshape(S, -1)[:, :: S + 1] @ v[0, 0]


#: What becomes of each attention of a function, if it is found at all.
EFFECTS = {
    the_mask_of_sdpa_is_scaled_in_place: ["stock"],
    the_mask_of_sdpa_is_assigned: ["stock"],
    queries_change_after_the_product: ["stock"],
    in_place_by_position: [],
    scores_in_place_by_position: ["flex_attention"],
    a_list_in_place: [],
    softmax_without_gradient: ["stock"],
    probabilities_without_gradient: ["stock"],
    a_residual_in_place: ["flex_attention"],
    probabilities_as_integers: ["flex_attention", "stock"],
    keyword_arguments: ["flex_attention"],
    results_in_memory_of_others: ["flex_attention"],
    a_long_expression: [],
    a_long_bias: ["flex_attention"],
    queries_change_afterwards: ["stock"],
    dropout_of_inference: ["flex_attention"],
    a_diagonal_of_rows: ["stock"],
}


@pytest.mark.breadth(6)
@pytest.mark.parametrize("function", EFFECTS, ids=lambda f: f.__name__)
def test_effects(function):
    assert paths(function, *tensors(), bias()) == EFFECTS[function]


def test_a_mask_that_is_written_to_afterwards():
    """Eager code saves no mask for the backward, and flex_attention saves all that it captures."""

    def beside_the_bias(q, k, v, b, mask):
        out = attend(q, k, v, b + mask)
        mask.add_(1.0)
        return out

    def beside_the_scores(q, k, v, b, mask):
        out = (q @ k.mT + b + mask).softmax(-1) @ v
        mask.add_(1.0)
        return out

    assert paths(beside_the_bias, *tensors(), bias(), torch.zeros(S, S)) == ["flex_attention"]
    assert paths(beside_the_scores, *tensors(), bias(), torch.zeros(S, S)) == []


SEGMENTS = (torch.arange(S)[None] // 8 + 1000.0).expand(B, S).contiguous()
ROUNDED = {
    "positions": lambda s, x: s.masked_fill(_in_half(256)[:, None] < _in_half(256), -1e4),
    "segments": lambda s, x: s.masked_fill(x.bfloat16()[:, None, :, None] != x.bfloat16()[:, None, None, :], -1e4),
    "float16": lambda s, x: s.masked_fill(*_unequal(torch.float16, 3000)),
    "bfloat16": lambda s, x: s.masked_fill(*_unequal(torch.bfloat16, 300)),
    "infinities": lambda s, x: s.masked_fill((x * 1e3).half().isinf()[:, None, None], -1e4),
}


def _unequal(dtype, start):
    positions = torch.arange(start, start + S, dtype=dtype)
    return positions[:, None] != positions, -5.0


def _in_half(start):
    return (torch.arange(S) + start).to(torch.float32).to(torch.bfloat16)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", ROUNDED)
def test_a_comparison_of_rounded_numbers(name):
    """Integers above 256 are equal in bf16 to their neighbours."""
    function = lambda q, k, v, b, x: ROUNDED[name](q @ k.mT * 0.25 + b, x).softmax(-1) @ v  # noqa: E731
    assert paths(function, *tensors(), bias(), SEGMENTS) == ["flex_attention"]


@pytest.mark.parametrize(
    "positions",
    [lambda: (torch.arange(S) + 3000).to(torch.float16), lambda: torch.arange(3000, 3000 + S, dtype=torch.float16)],
    ids=["cast", "arange"],
)
def test_rounded_positions_are_added(positions):
    """Integers above 2048 are off by one in fp16, which a score may not be."""
    function = lambda q, k, v, b: (q @ k.mT * 0.25 + b + positions().float()).softmax(-1) @ v  # noqa: E731
    # Compared with fp32, because a score of 3000 has an error of 1e-4 in fp32.
    (found,) = decisions(function, *tensors(), bias(), exact=False)
    assert found.path == "flex_attention"


def test_a_distance_that_is_rounded_is_an_index():
    index = lambda: (_in_half(256)[:, None] - torch.arange(S)).to(torch.bfloat16).long() - 200  # noqa: E731
    function = lambda q, k, v, w: attend(q, k, v, w[:, index()])  # noqa: E731
    assert paths(function, *tensors(), randn(H, 100)) == ["flex_attention"]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vjp], ids=lambda f: f.__name__)
def test_transforms_of_functions(transform):
    def function(q, k, v, b):
        if transform is torch.func.grad:
            return transform(lambda q: attend(q, k, v, b).square().sum())(q)
        return transform(lambda q: attend(q, k, v, b), q)[0]

    assert paths(function, *(x.detach().double().requires_grad_() for x in (*tensors(), bias()))) == []


def test_tensors_that_wrap_others():
    inputs = [TwoTensor(x.detach(), x.detach() * 2).requires_grad_() for x in (*tensors(), bias())]
    out = torch.compile(attend, backend="gradfuse", fullgraph=True)(*inputs)
    expected = attend(*inputs)
    assert (out.a - expected.a).norm() <= 1e-5 * expected.a.norm() and (
        out.b - expected.b
    ).norm() <= 1e-5 * expected.b.norm()
    out.sum().backward()
    assert inputs[3].grad is not None


@pytest.mark.parametrize("widths", [(1, D), (D, 1)])
def test_one_channel(widths):
    qk, of_values = widths
    assert paths(attend, randn(B, H, S, qk), randn(B, H, S, qk), randn(B, H, S, of_values), bias()) == ["stock"]


def test_deterministic_on_a_cpu():
    """The kernels of a CPU would ask for torch.use_deterministic_algorithms, which a model that is spelt out need not know."""
    (found,) = decisions(attend, *tensors(), bias(), options={"deterministic": True})
    assert found.path == "stock"


def test_inference_mode():
    """Eager code refuses to multiply such probabilities by what needs a gradient; compiled code does not."""

    def function(q, k, v, b):
        scores = q @ k.mT + b
        with torch.inference_mode():
            p = scores.softmax(-1)
        return p @ v

    inputs = [*tensors(), bias()]
    out = torch.compile(function, backend="gradfuse", fullgraph=True)(*inputs)
    gradients = torch.autograd.grad(out.sum(), inputs, allow_unused=True)
    assert [g is None for g in gradients] == [True, True, False, True]


SHAPES = {
    "values_of_more_batches": (attend, ((1, H, S, D), (1, H, S, D), (B, H, S, D), (1, H, S, S))),
    "values_of_more_heads": (attend, ((B, 1, S, D), (B, 1, S, D), (B, H, S, D), (1, 1, S, S))),
    "a_part_of_the_keys": (
        lambda q, k, v, b: ((q @ k.mT)[..., :S] + b).softmax(-1) @ v,
        ((B, H, S, D), (B, H, S + 8, D), (B, H, S, D), (1, H, S, S)),
    ),
    "a_part_of_the_heads": (
        lambda q, k, v, b: ((q @ k.mT)[:, :H] + b).softmax(-1) @ v,
        ((B, H + 1, S, D), (B, H + 1, S, D), (B, H, S, D), (1, H, S, S)),
    ),
    "keys_of_one_channel": (
        lambda q, k, v, b: (torch.einsum("bhqd,bhkd->bhqk", q, k) + b).softmax(-1) @ v,
        ((B, H, S, D), (B, H, S, 1), (B, H, S, D), (1, H, S, S)),
    ),
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    function, shapes = SHAPES[name]
    found = paths(function, *(randn(*shape) for shape in shapes))
    assert found == ([] if name == "keys_of_one_channel" else ["flex_attention"])


BACKWARDS = torch.arange(-1, -S - 1, -1)
LOOKUPS = {
    "negative_after_a_slice": lambda w: w[:, 5:][:, torch.arange(-S, 0)][:, None],
    "negative_after_steps": lambda w: w[:, ::2][:, torch.arange(-S, 0)][:, None],
    "negative_after_a_view": lambda w: w.view(H, 2 * S)[:, torch.arange(-S, 0)][:, None],
    "end_by_name": lambda w: w[:, torch.arange(5, end=S + 5)][:, None],
    "large_numbers": lambda w: w[:, torch.arange(0, S * 715827883, 715827883) % 7][:, None],
    "embedding_with_padding": lambda w: F.embedding(
        (torch.arange(S)[:, None] - torch.arange(S)).clamp(0, 5), w.T, padding_idx=0
    ).permute(2, 0, 1),
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups(name):
    function = lambda q, k, v, w: attend(q, k, v, LOOKUPS[name](w))  # noqa: E731
    assert paths(function, *tensors(), randn(H, 2 * S)) == ["flex_attention"]


def scaled_dot_product_attention(q, k, v, attn_mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask) * 2 + q


def matmul(p, v):
    return torch.matmul(p, v) * 3


def dropout(p):
    return F.dropout(p, 0.0) * p


NAMESAKES = {
    "attention": lambda q, k, v, b: scaled_dot_product_attention(q, k, v, attn_mask=b),
    "product": lambda q, k, v, b: matmul((q @ k.mT + b).softmax(-1), v),
    "dropout": lambda q, k, v, b: dropout((q @ k.mT + b).softmax(-1)) @ v,
}


@pytest.mark.parametrize("name", NAMESAKES)
def test_users_functions_named_like_torch_s(name):
    """``allow_in_graph`` makes each of them one node, whose function has the name of one of torch's."""
    for function in (scaled_dot_product_attention, matmul, dropout):
        torch.compiler.allow_in_graph(function)
    assert paths(NAMESAKES[name], *tensors(), bias()) == []


def test_a_negative_number_to_the_power_of_a_position():
    """FX prints an operator as Python's, and ``-1 ** k`` is -(1 ** k)."""
    function = lambda q, k, v, b: (q @ k.mT + b + (-1) ** torch.arange(S) * 0.5).softmax(-1) @ v  # noqa: E731
    assert paths(function, *tensors(), bias()) == ["flex_attention"]


def test_a_mask_in_brackets():
    kept = torch.zeros(4, S, dtype=torch.bool)
    kept[0] = True
    function = lambda q, k, v, t, kept: (q @ k.mT + t[kept][:S]).softmax(-1) @ v  # noqa: E731
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert paths(function, *tensors(), bias(4, S), kept) == ["flex_attention"]


def test_functions_that_only_have_the_name_of_torch_s():
    def softmax(x, dim):
        return operator.mul(torch.softmax(x, dim), 2.0)

    torch.compiler.allow_in_graph(softmax)
    assert "flex_attention" not in paths(lambda q, k, v, b: softmax(q @ k.mT + b, -1) @ v, *tensors(), bias())


def test_channels_attend():
    """The width of the heads is the number of tokens, as in XCiT, for which no tile fits."""
    x, temperature = randn(1, 2, 16, 300), randn(2, 1, 1)

    def function(x, temperature):
        return (F.normalize(x, dim=-1) @ F.normalize(x, dim=-1).mT * temperature).softmax(-1) @ x

    (decision,) = decisions(function, x, temperature)
    assert decision.path == "stock" and "more than 256 channels" in decision.why
