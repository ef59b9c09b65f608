"""Programs for which recognition was wrong once: masks, writes, gradient modes, shapes and lookups at the edges."""

import operator

import pytest
import torch
import torch.nn.functional as F

from tests.soundness.check import check_matches_eager

from .spellings import LOWEST, B, D, H, S
from .test_traps import decisions, randn, tensors

LENGTHS = torch.ones(B, 1, 1, S, dtype=torch.bool)
LENGTHS[0, ..., 20:], LENGTHS[1] = False, False


def frozen(value, exists=LENGTHS):
    return torch.where(exists, 0.0, value)


def bias(*shape):
    return randn(*(shape or (1, H, S, S)))


def paths(function, *inputs):
    """Compare with eager code, and return what became of each attention that was found."""
    return [d.path for d in decisions(function, *inputs)]


def added(q, k, v, b, m):
    return (q @ k.mT * 0.25 + b + m).softmax(-1) @ v


def added_to_the_bias(q, k, v, b, m):
    return (q @ k.mT * 0.25 + (b + m)).softmax(-1) @ v


def longer(q, k, v, b, m):
    return (q @ k.mT + b + ((1.0 - m) * LOWEST)[..., :S]).softmax(-1) @ v


def of_another_sign(q, k, v, b, e):
    return (q @ k.mT + b - 1e30 * (~e).float()).softmax(-1) @ v


def of_a_tensor(q, k, v, b, e):
    return (torch.where(e, q @ k.mT, torch.tensor(LOWEST)) + b).softmax(-1) @ v


def of_integers(q, k, v, b, e):
    return (q @ k.mT + b).masked_fill(~e, -(10**9)).softmax(-1) @ v


def compared(q, k, v, b, m):
    return (q @ k.mT + b).masked_fill(m == LOWEST, -5.0).softmax(-1) @ v


def looked_up(q, k, v, b, table):
    block = torch.arange(S) // 8
    return (q @ k.mT + b + table[block[:, None], block]).softmax(-1) @ v


#: The lowest number, other low ones, and two that are added.
MASKS = {
    "lowest": (added, frozen(LOWEST)),
    "nearly_the_lowest": (added, frozen(-3e38)),
    "beside_the_bias": (added_to_the_bias, frozen(LOWEST).expand(B, 1, S, S) + 0.0),
    "longer_than_the_keys": (longer, torch.ones(B, 1, 1, S + 8).masked_fill(torch.arange(S + 8) > 5, 0.0)),
    "of_another_sign": (of_another_sign, LENGTHS),
    "of_a_tensor": (of_a_tensor, LENGTHS),
    "of_integers": (of_integers, LENGTHS),
    "compared": (compared, frozen(LOWEST)),
    "looked_up": (looked_up, torch.tensor([0.0, -1e9, LOWEST, LOWEST]).repeat(4, 1)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    function, mask = MASKS[name]
    assert paths(function, *tensors(), bias(), mask) == ["flex_attention"]


CHOSEN = {
    "by_scores": lambda q, k, v, b: torch.where(q @ k.mT > 0, q @ k.mT + b, -1e9).softmax(-1) @ v,
    "by_a_bias": lambda q, k, v, b: (q @ k.mT + b).masked_fill(b <= 0.1, -1e9).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", CHOSEN)
def test_masks_that_are_learned_stay_with_stock(name):
    assert "flex_attention" not in paths(CHOSEN[name], *tensors(), bias())


def test_double_precision_is_kept():
    inputs = [x.detach().double().requires_grad_() for x in (*tensors(), bias())]
    check_matches_eager(added, *inputs, frozen(-1e4).double(), tolerance=1e-12)


def test_the_lowest_number_of_double_precision():
    """It is infinite in fp32, in which nothing of a mask may be computed."""

    def function(q, k, v, b, exists):
        return (q @ k.mT + b).masked_fill(~exists, torch.finfo(q.dtype).min).softmax(-1) @ v

    inputs = [x.detach().double().requires_grad_() for x in (*tensors(), bias())]
    check_matches_eager(function, *inputs, LENGTHS, tolerance=1e-12)


def test_a_sink_far_below_the_scores():
    """The gradient of the sink is the small part of the probability that it gets."""

    def function(q, k, v, b, sink):
        logits = torch.cat([q @ k.mT + b + 12.0, sink.expand(B, H, S, 1)], -1)
        return logits.softmax(-1)[..., :-1] @ v

    assert paths(function, *tensors(), bias(), randn(H, 1, 1)) == ["flex_attention"]


def test_a_row_of_minus_infinity_is_zero_in_sdpa():
    mask = torch.zeros(B, 1, 1, S)
    mask[1] = -torch.inf
    check_matches_eager(
        lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, attn_mask=b + torch.where(mask < 0, -torch.inf, 0.0)),
        *tensors(),
        bias(),
        exact=True,
    )


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


def a_copy_of_the_result_in_place(q, k, v, b):
    """Eager mode copies here, and the kernel's output has the layout of the query, so that this would be a view."""
    out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), b).transpose(1, 2).reshape(B, S, H * D)
    out += 1.0
    return out


def a_view_of_the_result(q, k, v, b):
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), b).view(B * H, S, D)


def probabilities_as_integers(q, k, v, b):
    return attend(q, k, v, b) + (q @ k.mT + b).softmax(-1).to(torch.bool).to(v.dtype) @ v


def keyword_arguments(q, k, v, b):
    b = torch.unsqueeze(input=torch.permute(b[0], dims=(0, 1, 2)), dim=0)
    return attend(q, k, v, torch.tril(input=b.swapaxes(axis0=-1, axis1=-2)))


#: What becomes of each attention of a function, if it is found at all.
EFFECTS = {
    the_mask_of_sdpa_is_scaled_in_place: ["stock"],
    the_mask_of_sdpa_is_assigned: ["stock"],
    queries_change_after_the_product: ["stock"],
    in_place_by_position: [],
    scores_in_place_by_position: [],
    a_list_in_place: [],
    softmax_without_gradient: ["stock"],
    probabilities_without_gradient: ["stock"],
    a_residual_in_place: ["flex_attention"],
    probabilities_as_integers: ["flex_attention", "stock"],
    keyword_arguments: ["flex_attention"],
}


@pytest.mark.parametrize("function", EFFECTS, ids=lambda f: f.__name__)
def test_effects(function):
    assert paths(function, *tensors(), bias()) == EFFECTS[function]


def test_a_copy_of_the_result_in_place():
    assert paths(a_copy_of_the_result_in_place, *(randn(B, S, H, D) for _ in range(3)), bias()) == ["flex_attention"]


def test_a_copy_of_the_result_that_is_returned_may_be_changed():
    def function(q, k, v, b):
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), b).transpose(1, 2).reshape(B, S, H * D)

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


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups(name):
    function = lambda q, k, v, w: attend(q, k, v, LOOKUPS[name](w))  # noqa: E731
    assert paths(function, *tensors(), randn(H, 2 * S)) == ["flex_attention"]


def test_functions_that_only_have_the_name_of_torch_s():
    def softmax(x, dim):
        return operator.mul(torch.softmax(x, dim), 2.0)

    torch.compiler.allow_in_graph(softmax)
    assert "flex_attention" not in paths(lambda q, k, v, b: softmax(q @ k.mT + b, -1) @ v, *tensors(), bias())
