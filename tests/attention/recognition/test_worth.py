"""Attention that learns nothing of its mask is replaced where stock would store a number for each head and pair, and only there."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from inductor_ext.attention.recognition import worth
from inductor_ext.core.report import collect
from tests.attention.case import relative_error
from tests.soundness.check import check_matches_eager
from tests.support.eager_graphs import eager_graphs

from .spellings import LOWEST, SPELLINGS, B, D, H, S, padding, t5_bias


@pytest.fixture(autouse=True)
def few_pairs_in_fp32_on_a_cpu_are_enough(monkeypatch):
    monkeypatch.setattr(worth, "FEWEST_PAIRS", {("cpu", "hopper"): S * S})
    monkeypatch.setattr(worth, "LARGEST_ITEM", 4)


def randn(*shape, grad=False):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), requires_grad=grad)


def operands(grad=True):
    return [randn(B, H, S, D, grad=grad) for _ in range(3)]


def paths(function, *inputs, **options):
    """Compare with eager code in float64, and return what the pass decided."""
    with collect() as report:
        check_matches_eager(function, *inputs, exact=True, **options)
    return [d.path for d in report.decisions if d.pass_name == "attention_pattern"]


def fused(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def spelt(q, k, v, mask):
    return F.softmax(q @ k.mT * D**-0.5 + mask, -1) @ v


def distance():
    return torch.arange(S)[None, :] - torch.arange(S)[:, None]


def alibi(slopes):
    return slopes[:, None, None] * distance()


def t5_with_padding(table):
    return t5_bias(table) + torch.where(padding()[:, None, None, :], 0.0, LOWEST)


def t5_decoder(table):
    return t5_bias(table) + torch.full((S, S), LOWEST).triu(1)


SAVES = {"t5": (t5_bias, (8, H)), "t5_with_padding": (t5_with_padding, (8, H)), "t5_decoder": (t5_decoder, (8, H))}
SAVES |= {"alibi": (alibi, (H,))}


@pytest.mark.parametrize("attention", [fused, spelt], ids=["fused", "spelt"])
@pytest.mark.parametrize("name", SAVES)
def test_a_frozen_bias_of_positions(attention, name):
    bias, shape = SAVES[name]
    function = lambda q, k, v, table: attention(q, k, v, bias(table))  # noqa: E731
    assert paths(function, *operands(), randn(*shape)) == ["flex_attention"]


def a_dense_bias(q, k, v, x):
    return fused(q, k, v, x)


def a_large_table(q, k, v, x):
    """It has a third of a mask's numbers."""
    rows = torch.arange(S) // 3
    return fused(q, k, v, x[:, rows])


def an_index_of_each_pair(q, k, v, x):
    index = x[0].abs().long()
    return fused(q, k, v, x[:, 0][:, index])


def causal(q, k, v, x):
    return spelt(q, k, v, torch.full((S, S), LOWEST).triu(1))


def padded(q, k, v, x):
    return spelt(q, k, v, torch.where(padding()[:, None, None, :], 0.0, LOWEST))


def a_boolean_mask(q, k, v, x):
    return fused(q, k, v, (distance() + torch.arange(H)[:, None, None]) <= 0)


def a_scale_of_each_head(q, k, v, x):
    return F.softmax(q @ k.mT * x[:, :1, :1], -1) @ v


@pytest.mark.parametrize(
    "function",
    [a_dense_bias, causal, padded, a_boolean_mask, a_scale_of_each_head, a_large_table, an_index_of_each_pair],
    ids=lambda f: f.__name__,
)
def test_it_stays_with_stock(function):
    assert paths(function, *operands(), randn(H, S, S)) == []


@pytest.mark.parametrize("rounds_first", [True, False])
def test_numbers_of_keys_in_half_precision_stay_with_stock(rounds_first):
    """BLOOM's: a score_mod would not round them, and a model that was trained with rounded ones would change."""

    def bloom(q, k, v, slopes):
        keys = torch.arange(S)
        offsets = slopes.bfloat16()[:, None] * keys if rounds_first else (slopes[:, None] * keys).bfloat16()
        return fused(q, k, v, offsets[:, None, :] + torch.full((S, S), LOWEST).triu(1))

    assert paths(bloom, *operands(), randn(H)) == []


@pytest.mark.parametrize("learned", [False, True], ids=["frozen", "beside_a_learned_one"])
@pytest.mark.parametrize("attention", [fused, spelt], ids=["fused", "spelt"])
@pytest.mark.parametrize("view", [True, False], ids=["a_view", "itself"])
def test_a_table_that_changes_before_the_backward(attention, view, learned):
    """Eager mode keeps the mask that was made of it. Autograd sees no change of what a view was made of."""

    def function(q, k, v, tables, other):
        return attention(q, k, v, t5_bias(tables[0] if view else tables) + t5_bias(other))

    gradients = []
    for run in (function, torch.compile(function, backend="gradfuse", fullgraph=True)):
        inputs, tables = [*operands(), randn(8, H, grad=learned)], randn(2, 8, H) if view else randn(8, H)
        torch._dynamo.reset()
        with eager_graphs(), collect() as report:
            out = run(*inputs[:3], tables, inputs[3])
            tables.sub_(3)
            gradients.append(torch.autograd.grad(out.square().sum(), inputs if learned else inputs[:3]))
    assert [d.path for d in report.decisions if d.pass_name == "attention_pattern"] == ["flex_attention"]
    assert all(relative_error(mine, eager) < 1e-5 for eager, mine in zip(*gradients, strict=True))


def test_few_pairs_stay_with_stock(monkeypatch):
    monkeypatch.setattr(worth, "FEWEST_PAIRS", {("cpu", "hopper"): S * S + 1})
    assert paths(lambda q, k, v, t: fused(q, k, v, t5_bias(t)), *operands(), randn(8, H)) == []


def test_full_precision_stays_with_stock(monkeypatch):
    monkeypatch.setattr(worth, "LARGEST_ITEM", 2)
    assert paths(lambda q, k, v, t: fused(q, k, v, t5_bias(t)), *operands(), randn(8, H)) == []


def test_other_devices_stay_with_stock(monkeypatch):
    monkeypatch.setattr(worth, "FEWEST_PAIRS", {("cuda", "hopper"): 0, ("cpu", "ampere"): 0})
    assert paths(lambda q, k, v, t: fused(q, k, v, t5_bias(t)), *operands(), randn(8, H)) == []


def test_without_a_gradient_it_stays_as_it_is():
    assert paths(lambda q, k, v, t: fused(q, k, v, t5_bias(t)), *operands(grad=False), randn(8, H)) == []


def test_an_adapter_of_the_queries():
    """Only a small matrix is learned, as with LoRA."""

    def function(q, k, v, table, down, up):
        return fused(q + q @ down @ up, k, v, t5_bias(table))

    inputs = (*operands(grad=False), randn(8, H), randn(D, 2, grad=True), randn(2, D, grad=True))
    assert paths(function, *inputs) == ["flex_attention"]


#: Whose frozen biases are computed from much less than a number for each pair.
FEW = {"t5_eager", "t5_eager_with_an_empty_sequence", "t5_sdpa", "t5_sdpa_with_an_empty_sequence", "t5_decoder", "mpnet"}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", SPELLINGS)
def test_models_with_frozen_biases(name):
    """Everything but the first three tensors is frozen. What is computed is right, whether the attention is replaced or not."""
    first, rest = SPELLINGS[name].inputs()[:3], SPELLINGS[name].inputs()[3:]
    # For a row that finfo.min hides from every key, torch's fused kernels on a CPU take probabilities of 1 in the backward.
    with sdpa_kernel(SDPBackend.MATH):
        found = paths(SPELLINGS[name].function, *first, *(x.detach() for x in rest))
    if name in FEW:
        assert set(found) == {"flex_attention"}
