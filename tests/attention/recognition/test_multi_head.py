"""``F.multi_head_attention_forward`` and ``nn.MultiheadAttention``, whose mask may be a learned bias."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inductor_ext.core.report import collect
from tests.soundness.check import check_matches_eager
from tests.support.eager_graphs import eager_graphs

from .test_traps import decisions

B, S, H, WIDTH = 2, 32, 4, 64
PADDED = torch.arange(S)[None, :] >= torch.tensor([20, S])[:, None]


def learned(*shape, seed=0):
    return (0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))).requires_grad_()


def bias_of(table):
    i = torch.arange(S)
    return table[:, i[:, None] - i + S - 1]


def for_each_head(table):
    return bias_of(table).unsqueeze(0).repeat(B, 1, 1, 1).view(B * H, S, S)


def weights():
    return learned(3 * WIDTH, WIDTH), learned(3 * WIDTH), learned(WIDTH, WIDTH), learned(WIDTH), learned(H, 2 * S - 1)


def forward(x, y, weights, bias=for_each_head, **options):
    inside, inside_bias, outside, outside_bias, table = weights
    more = {"dropout_p": 0.0, "training": True, "bias_k": None, "bias_v": None, "add_zero_attn": False} | options
    return F.multi_head_attention_forward(
        *(x, y, y, WIDTH, H, inside, inside_bias),
        **{"out_proj_weight": outside, "out_proj_bias": outside_bias, "attn_mask": bias(table), **more},
    )


def found(function, *inputs):
    return [d.path for d in decisions(function, *inputs)]


X = (S, B, WIDTH)
TAKEN = {
    "one_matrix_of_pairs": lambda x, y, *w: forward(x, x, w, lambda t: bias_of(t)[0])[0],
    "for_each_head": lambda x, y, *w: forward(x, x, w)[0],
    "without_probabilities": lambda x, y, *w: forward(x, x, w, need_weights=False)[0],
    "of_another_sequence": lambda x, y, *w: forward(x, y, w)[0],
    "padded": lambda x, y, *w: forward(x, x, w, key_padding_mask=PADDED, need_weights=False)[0],
    "padded_by_numbers": lambda x, y, *w: forward(x, x, w, key_padding_mask=PADDED * -3.0)[0],
    "without_a_batch": lambda x, y, *w: forward(x[:, 0], x[:, 0], w, bias_of)[0],
    "separate_weights": lambda x, y, *w: forward(
        *(x, y, w),
        use_separate_proj_weight=True,
        **dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), w[0].chunk(3), strict=True)),
    )[0],
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", TAKEN)
def test_it_is_written_out(name):
    assert found(TAKEN[name], learned(*X), learned(*X, seed=1), *weights()) == ["flex_attention"]


def test_the_module():
    """As WavLM and many others do, the caller drops the probabilities that it gets."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, H, batch_first=True)

    def function(x, table):
        out, _ = module(x, x, x, attn_mask=for_each_head(table))
        return out

    (decision,) = decisions(function, learned(B, S, WIDTH), learned(H, 2 * S - 1), exact=False)
    assert decision.path == "flex_attention"


def of_the_probabilities(x, y, *w):
    out, probabilities = forward(x, x, w)
    return out, probabilities * 2.0


def a_frozen_mask(x, y, *w):
    return forward(x, x, w, lambda t: for_each_head(t.detach()))[0]


def the_mask_is_only_a_hint(x, y, *w):
    return forward(x, x, w, lambda t: bias_of(t)[0], need_weights=False, is_causal=True)[0]


LEFT = {
    of_the_probabilities: [],
    a_frozen_mask: [],
    the_mask_is_only_a_hint: [],
}


@pytest.mark.breadth(1)
@pytest.mark.parametrize("function", LEFT, ids=lambda f: f.__name__)
def test_it_is_left_alone(function):
    assert found(function, learned(*X), learned(*X), *weights()) == LEFT[function]


MORE_KEYS = {
    "zeros": {"add_zero_attn": True},
    "a_learned_key": {"bias_k": torch.full((1, 1, WIDTH), 0.3), "bias_v": torch.full((1, 1, WIDTH), 0.2)},
}


@pytest.mark.parametrize("name", MORE_KEYS)
def test_one_more_key(name):
    """The bias is padded with zeros for it."""
    check_matches_eager(lambda x, *w: forward(x, x, w, **MORE_KEYS[name])[0], learned(*X), *weights(), tolerance=2e-5)


def test_symbolic_lengths_are_left_alone():
    """The function's own code asks about them."""
    function = lambda x, b, *w: forward(x, x, w, lambda t: b + t[0, 0])[0]  # noqa: E731
    with eager_graphs(), collect() as report:
        torch._dynamo.reset()
        torch.compile(function, backend="gradfuse", dynamic=True)(learned(*X), learned(S, S), *weights())
    assert not [d for d in report.decisions if d.pass_name == "attention_pattern"]


def test_dropout_is_drawn_again_in_the_backward():
    """The output is linear in the values, and so in their weights, with the same mask."""
    torch._dynamo.reset()
    x, w = learned(*X), weights()
    with collect() as report:
        out = torch.compile(lambda x, *w: forward(x, x, w, dropout_p=0.3)[0], backend="gradfuse", fullgraph=True)(x, *w)
        tangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(out, w[:2], tangent)
    assert [d.path for d in report.decisions if d.pass_name == "attention_pattern"] == ["flex_attention"]
    of_values = sum((g[2 * WIDTH :] * x[2 * WIDTH :]).sum() for g, x in zip(gradients, w[:2], strict=True))
    torch.testing.assert_close(of_values, (tangent * (out - w[3])).sum(), rtol=1e-4, atol=1e-4)
