"""Masks beside a learned bias, of every size and sign: rows that are masked as a whole, and rows that are not."""

import pytest
import torch
import torch.nn.functional as F

from tests.attention.case import relative_error
from tests.soundness.check import check_matches_eager, run
from tests.support.eager_graphs import eager_graphs

from .spellings import LOWEST, B, H, S
from .test_regressions import attend, bias, paths
from .test_traps import decisions, randn, tensors

LENGTHS = torch.ones(B, 1, 1, S, dtype=torch.bool)
LENGTHS[0, ..., 20:], LENGTHS[1] = False, False
KEYS = torch.arange(S)


def frozen(value, exists=LENGTHS):
    return torch.where(exists, 0.0, value)


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
    "of_a_method": (lambda q, k, v, b, m: (q @ k.mT + b + m.where(m < 0, 0.0)).softmax(-1) @ v, frozen(LOWEST)),
}


@pytest.mark.breadth(3)
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


def test_a_choice_by_the_scores_of_what_is_small():
    function = lambda q, k, v, b: torch.where(q @ k.mT > 0, q @ k.mT * 0.25, 0.1).add(b).softmax(-1) @ v  # noqa: E731
    assert paths(function, *tensors(), torch.nn.Parameter(bias().detach())) == ["flex_attention"]


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


FAR_FROM_ZERO = {
    "integers": lambda s, m: s + (m.long() - 1) * 10**9,
    "small_integers": lambda s, m: s + (m.long() - 1) * 10000,
    "as_gpt_2": lambda s, m: s * m.long() - 10**10 * (1 - m.long()),
    "divided": lambda s, m: s - (~m).float() / 1e-9,
    "a_reciprocal": lambda s, m: s - 1 / (m.float() + 1e-9),
    "a_product": lambda s, m: s + (~m).float() * -100 * 100,
    "upwards": lambda s, m: s + m.float() * 1e9,
    "upwards_on_ordinary_rows": lambda s, m: s + m.float() * 1e6,
    "a_table": lambda s, m: s + torch.tensor([-1e9, 0.0])[m.long()],
    "two_low_numbers": lambda s, m: s.masked_fill(~m, -2e38).masked_fill(torch.arange(S)[:, None] < torch.arange(S), LOWEST),
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("learned", [torch.nn.Parameter, lambda x: x], ids=["parameter", "tensor"])
@pytest.mark.parametrize("name", FAR_FROM_ZERO)
def test_rows_far_from_zero(name, learned):
    """Compared with fp32, because these numbers round the scores away in fp32 only."""
    function = lambda q, k, v, b, m: FAR_FROM_ZERO[name](q @ k.mT + b, m).softmax(-1) @ v  # noqa: E731
    (found,) = decisions(function, *tensors(), learned(bias().detach()).requires_grad_(), LENGTHS, exact=False)
    assert found.path == "flex_attention"


#: A learned gate, a mask that is added before or after, and numbers that scale both.
INSIDE = {
    "gated": lambda s, b, m, t: s + t * (b + m),
    "scaled_gate": lambda s, b, m, t: (s + b) * t + m * t,
    "scaled_later": lambda s, b, m, t: 0.5 * (s + b + m),
    "temperature": lambda s, b, m, t: (s + b + m.long()) * t,
    "alpha": lambda s, b, m, t: torch.add(s + b, m, alpha=2),
    "of_queries": lambda s, b, m, t: (s + b + m.mT.expand(B, 1, S, S)) * t,
    "minimum": lambda s, b, m, t: s + torch.minimum(b, m),
    "chosen_by_what_is_learned": lambda s, b, m, t: s + torch.where(b > 100.0, b, m),
    "moved": lambda s, b, m, t: s + (b + m).roll(1, -1).flip(2),
    "looked_up": lambda s, b, m, t: s + torch.gather(b + m, -1, torch.arange(S).flip(0).expand(B, H, S, S)),
    "a_chunk": lambda s, b, m, t: s + torch.cat([(b + m).chunk(2, 0)[1], (b + m).unbind(0)[0][None]]),
    "in_place": lambda s, b, m, t: s + (b * 1.5).masked_fill(m < 0, -1e9).roll(1, -1),
    "time_stamps": lambda s, b, m, t: s - t * (torch.arange(S) * 10**3 - m.long()).abs() * 1e-3,
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("learned", [torch.nn.Parameter, lambda x: x], ids=["parameter", "tensor"])
@pytest.mark.parametrize("name", INSIDE)
def test_a_mask_inside_an_expression(name, learned):
    """Each is right, as flex_attention or left to stock."""
    # The gradient of the gate is not compared. It is a sum of large numbers that cancel.
    gate = learned(torch.rand(1, H, S, 1) + 0.5).requires_grad_()
    function = lambda q, k, v, b, m: INSIDE[name](q @ k.mT, b, m, gate).softmax(-1) @ v  # noqa: E731
    found = decisions(function, *tensors(), learned(bias().detach()).requires_grad_(), frozen(-1e9), exact=False)
    assert len(found) == 1 or name in ("alpha",)


def test_a_scaled_tensor_of_another_graph():
    masked = bias().detach().expand(B, -1, -1, -1).clone()
    masked[1] = -1e9
    function = lambda q, k, v, b: (0.5 * ((q @ k.mT) - (-b))).softmax(-1) @ v  # noqa: E731
    (found,) = decisions(function, *tensors(), masked.requires_grad_(), exact=False)
    assert found.path == "flex_attention"


def test_an_unsigned_number_below_zero():
    wrapped = lambda: (torch.zeros(S, S, dtype=torch.uint8) - 1).float() * -990.0  # noqa: E731
    function = lambda q, k, v, b: (q @ k.mT + b + wrapped()).softmax(-1) @ v  # noqa: E731
    (found,) = decisions(function, *tensors(), torch.nn.Parameter(bias().detach()), exact=False)
    assert found.path == "flex_attention"


def test_a_mask_of_integers_that_is_passed():
    penalty = torch.where(LENGTHS, 0, -(10**6))
    function = lambda q, k, v, b, m: (q @ k.mT + b + m).softmax(-1) @ v  # noqa: E731
    (found,) = decisions(function, *tensors(), torch.nn.Parameter(bias().detach()), penalty, exact=False)
    assert found.path == "flex_attention"


def written_in_place(b, m):
    b = b.expand(B, -1, S, S).clone()
    b.masked_fill_(m < 0, -1e9)
    return b.contiguous()


def assigned(b, m):
    b = b.expand(B, -1, S, S) * 1.0
    b[(m < 0).expand(B, H, S, S)] = -1e9
    return b + 0.5


@torch.library.custom_op("gradfuse_tests::hide", mutates_args={"x"})
def hide(x: torch.Tensor) -> None:
    """Hide the sixth query from all keys."""
    x[:, :, 5] = -1e9


def by_a_custom_op(b, m):
    b = b * 1.0
    with torch.no_grad():
        torch.ops.gradfuse_tests.hide(b)
    return b.roll(1, -1)


def fourth_power(x):
    return (x * x) * (x * x)


def added_in_place(b, m):
    b = b.expand(B, -1, S, S) * 1.0
    b += m
    return b.roll(0, -1)


def in_a_layer(b, m):
    return torch.baddbmm(
        m.expand(B, H, S, S).flatten(0, 1), b.expand(B, -1, S, S).flatten(0, 1), torch.eye(S).expand(B * H, S, S)
    )


#: A mask becomes a part of a learned tensor, which is not followed into this op.
HELD = {
    "written_in_place": written_in_place,
    "assigned": assigned,
    "in_a_list": lambda b, m: (b + torch.tensor([0.0, -1e9])[(m < 0).long()]).roll(1, -1),
    "a_product_of_numbers": lambda b, m: (b - (KEYS > 5) * 1000.0 * 1000.0 * 1000.0).roll(1, -1),
    "an_exponential": lambda b, m: (b - torch.exp((KEYS[:, None] == 5) * 30.0)).roll(1, -1),
    "a_power": lambda b, m: (b - ((KEYS[:, None] == 5) * 31.0) ** 6).roll(1, -1),
    "a_product_of_positions": lambda b, m: (b - fourth_power(torch.arange(S)[:, None])).roll(1, -1),
    "an_exponential_of_an_exponential": lambda b, m: (b - torch.exp(torch.exp((KEYS[:, None] == 5) * 3.0))).roll(1, -1),
    "a_small_divisor": lambda b, m: (b - (KEYS[:, None] == 5) / (torch.arange(1, S + 1)[:, None] * 1e-9)).roll(1, -1),
    "by_a_custom_op": by_a_custom_op,
    "an_outer_product": lambda b, m: (b + torch.einsum("bq,bk->bqk", torch.ones(B, S), m[:, 0, 0])[:, None]).roll(1, -1),
    "by_keyword": lambda b, m: torch.reshape(input=b + m, shape=(B, H, S, S)).contiguous(),
    "added_in_place": added_in_place,
    "in_a_layer": lambda b, m: in_a_layer(b, m).view(B, H, S, S),
    "the_bias_of_a_layer": lambda b, m: F.linear(b, torch.eye(S), m[1, 0, 0]),
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", HELD)
def test_a_learned_tensor_that_holds_a_mask(name):
    function = lambda q, k, v, b, m: (q @ k.mT + HELD[name](b, m)).softmax(-1) @ v  # noqa: E731
    (found,) = decisions(function, *tensors(), torch.nn.Parameter(bias().detach()), frozen(-1e9), exact=False)
    assert found.path == "flex_attention"


def two_parameters(b, t):
    b = b * 1.0
    b += t
    return b.roll(1, -1)


#: What is learned, and holds no mask.
ORDINARY = {
    "in_place": two_parameters,
    "chosen_by_position": lambda b, t: torch.where(torch.arange(2000)[:S] > 1500, b, t).roll(1, -1),
    "an_exponential": lambda b, t: (b.exp() + t).roll(1, -1),
    "resized": lambda b, t: torch.cat([F.interpolate(b[..., :16], size=(S, 16), mode="bilinear"), t[..., 16:]], dim=-1),
    "of_a_layer": lambda b, t: F.linear(b, t[0, 0]).roll(1, -1) / 4,
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", ORDINARY)
def test_a_learned_tensor_without_a_mask_costs_no_maximum(name):
    function = lambda q, k, v, b, t: (q @ k.mT + ORDINARY[name](b, t)).softmax(-1) @ v  # noqa: E731
    parameters = [torch.nn.Parameter(bias().detach()) for _ in range(2)]
    with eager_graphs() as graphs:
        torch.compile(function, backend="gradfuse", fullgraph=True)(*tensors(), *parameters)
    assert graphs and not any("amax" in graph.code for graph in graphs)


def test_a_learned_exponential_that_holds_a_mask():
    # Its own gradient is not compared. It is the exponential times what rounding leaves.
    gate = torch.nn.Parameter(torch.rand(1, H, S, 1))
    grown = lambda: torch.exp(gate + (KEYS[:, None] == 5) * 25.0)  # noqa: E731
    function = lambda q, k, v, b: (q @ k.mT + (b - grown()).roll(1, -1)).softmax(-1) @ v  # noqa: E731
    (found,) = decisions(function, *tensors(), torch.nn.Parameter(bias().detach()), exact=False)
    assert found.path == "flex_attention"


EARLIER = KEYS < 12
LATER = KEYS[:, None] < KEYS
#: Some keys are hidden by -inf and others by a finite number, so that softmax is over these in the first rows.
TWO_KINDS = {
    "filled": lambda s, b: (s + b.masked_fill(EARLIER, -torch.inf)).masked_fill(LATER, -1e9),
    "added": lambda s, b: s + b + torch.where(EARLIER, -torch.inf, 0.0) + torch.where(LATER, LOWEST, 0.0),
    "filled_twice": lambda s, b: (s + b + torch.where(LATER, -1e9, 0.0)).masked_fill(EARLIER, -torch.inf),
    "in_a_learned_tensor": lambda s, b: (s + b.masked_fill(EARLIER, -torch.inf).roll(0, -1)).masked_fill(LATER, -1e9),
    "a_logarithm": lambda s, b: s + (b + torch.log((KEYS >= 12).float())).roll(0, -1) + torch.where(LATER, -1e9, 0.0),
    "padded": lambda s, b: s + F.pad(b[..., 12:], (12, 0), value=-torch.inf) + torch.where(LATER, -1e9, 0.0),
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", TWO_KINDS)
def test_infinite_and_finite_masks(name):
    function = lambda q, k, v, b: TWO_KINDS[name](q @ k.mT, b).softmax(-1) @ v  # noqa: E731
    (found,) = decisions(function, *tensors(), torch.nn.Parameter(bias().detach()), exact=False)
    assert found.path == "flex_attention"


FILLS = {
    "fill": torch.Tensor.masked_fill,
    "where": lambda s, m, low: torch.where(m, low, s),
    "integer": lambda s, m, low: s.masked_fill(m, int(max(low, -1e12))),
    "where_of_a_method": lambda s, m, low: s.where(~m, low),
    "full": lambda s, m, low: torch.where(m, torch.full_like(s, low), s),
    "added": lambda s, m, low: s + torch.where(m, low, 0.0).to(s.dtype),
    "multiplied": lambda s, m, low: s + m.to(s.dtype) * low,
    "multiplied_twice": lambda s, m, low: s + m.to(s.dtype) * -0.3 * -low / 0.3,
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("low", [-1e9, -1e12, -1e30])
@pytest.mark.parametrize("name", FILLS)
def test_numbers_that_half_precision_rounds(name, low):
    """The number of a row that is masked as a whole is that of its scores, to the last digit."""
    inputs = [x.detach().bfloat16().requires_grad_() for x in (*tensors(), bias())]
    function = lambda q, k, v, b, m: FILLS[name](q @ k.mT * 0.25 + b, ~m, low).softmax(-1) @ v  # noqa: E731
    (found,) = decisions(function, *inputs, LENGTHS, exact=False, tolerance=2e-2)
    assert found.path == "flex_attention"


def test_a_mask_in_half_precision_that_is_scaled():
    inputs = [x.detach().bfloat16().requires_grad_() for x in (*tensors(), bias())]
    function = lambda q, k, v, b, m: (q @ k.mT * 0.25 + b + m * -1e12).softmax(-1) @ v  # noqa: E731
    (found,) = decisions(function, *inputs, (~LENGTHS).bfloat16(), exact=False, tolerance=2e-2)
    assert found.path == "flex_attention"


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", ["added", "multiplied", "multiplied_twice"])
def test_a_moderate_number_leaves_the_scores(name):
    """In half precision eager code rounds the scores beside -1e4 away. A kernel computes in fp32."""
    function = lambda q, k, v, b, m: FILLS[name](q @ k.mT * 0.25 + b, ~m, -1e4).softmax(-1) @ v  # noqa: E731
    given = [x.detach().bfloat16().requires_grad_() for x in (*tensors(), bias())]
    compiled = torch.compile(function, backend="gradfuse", fullgraph=True)
    with eager_graphs():
        got = run(compiled, (*given, LENGTHS))
    want = run(function, (*(x.detach().float().requires_grad_() for x in given), LENGTHS))
    for x, y in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert relative_error(x, y) < 2e-2


def padded(q, k, v, b):
    return (q @ k.mT + F.pad(b[..., :-8, :-8], (0, 8, 0, 8), value=-1e9)).softmax(-1) @ v


@pytest.mark.parametrize("learned", [torch.nn.Parameter, lambda x: x], ids=["parameter", "tensor"])
def test_a_mask_inside_a_learned_tensor(learned):
    assert [d.path for d in decisions(padded, *tensors(), learned(bias().detach()).requires_grad_(), exact=False)] == [
        "flex_attention"
    ]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("value", [-1e4, -1e9, LOWEST])
def test_a_learned_tensor_of_another_graph_may_hold_a_mask(value):
    """A layer that is compiled by itself is passed the sum of bias and mask."""
    masked = bias().detach().expand(B, -1, -1, -1).clone()
    masked[1] = value
    (found,) = decisions(attend, *tensors(), masked.requires_grad_(), exact=False)
    assert found.path == "flex_attention"


def test_a_sink_as_far_below_as_the_mask():
    def function(q, k, v, b, m, sink):
        logits = torch.cat([(q @ k.mT + b).masked_fill(~m, -1e9), sink.expand(B, H, S, 1)], -1)
        return logits.softmax(-1)[..., :-1] @ v

    (found,) = decisions(function, *tensors(), bias(), LENGTHS, torch.full((H, 1, 1), -1e9), exact=False)
    assert found.path == "flex_attention"
