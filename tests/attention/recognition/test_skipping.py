"""Blocks of scores that masks hide are skipped, where they are hidden whatever the scores are."""

import contextlib

import pytest
import torch
from torch.fx import Graph
from torch.nn.attention.flex_attention import create_block_mask

from inductor_ext.attention.recognition import skipping
from inductor_ext.core.dynamo_graph import Inserter
from inductor_ext.core.fx import value_of
from inductor_ext.core.report import collect
from tests.attention.case import relative_error
from tests.soundness.check import check_matches_eager
from tests.support.interpreter import DEVICES, triton_on_cpu

from .spellings import LOWEST, SPELLINGS, S
from .test_masks import FAR_FROM_ZERO, HELD, INSIDE, LENGTHS, MASKS, TWO_KINDS, frozen
from .test_regressions import bias
from .test_traps import tensors

SKIPPED = "blocks that its masks hide are skipped"
QUERIES, KEYS = torch.arange(S)[:, None], torch.arange(S)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(skipping, "BLOCK", 8)
    monkeypatch.setattr(skipping, "FEWEST_BLOCKS", 1)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    check_matches_eager(SPELLINGS[name].function, *SPELLINGS[name].inputs(), exact=True)


@pytest.mark.breadth(4)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    function, mask = MASKS[name]
    check_matches_eager(function, *tensors(), bias(), mask)


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", FAR_FROM_ZERO)
def test_rows_far_from_zero(name):
    function = lambda q, k, v, b, m: FAR_FROM_ZERO[name](q @ k.mT + b, m).softmax(-1) @ v  # noqa: E731
    check_matches_eager(function, *tensors(), bias(), LENGTHS & (QUERIES >= KEYS))


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", INSIDE)
def test_a_mask_inside_an_expression(name):
    gate = torch.rand(1, 1, S, 1) + 0.5
    function = lambda q, k, v, b, m: INSIDE[name](q @ k.mT, b, m, gate).softmax(-1) @ v  # noqa: E731
    check_matches_eager(function, *tensors(), torch.nn.Parameter(bias().detach()), frozen(-1e9, LENGTHS & (QUERIES >= KEYS)))


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", HELD)
def test_a_learned_tensor_that_holds_a_mask(name):
    """Causal, so that the first rows see nothing but what the learned tensor hides."""
    hidden = frozen(-1e9, KEYS >= 12).expand(2, 1, 1, S)
    later = lambda s: s.masked_fill(QUERIES < KEYS, -1e9)  # noqa: E731
    function = lambda q, k, v, b, m: later(q @ k.mT + HELD[name](b, m)).softmax(-1) @ v  # noqa: E731
    check_matches_eager(function, *tensors(), torch.nn.Parameter(bias().detach()), hidden)


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", TWO_KINDS)
def test_infinite_and_finite_masks(name):
    function = lambda q, k, v, b: TWO_KINDS[name](q @ k.mT, b).softmax(-1) @ v  # noqa: E731
    check_matches_eager(function, *tensors(), torch.nn.Parameter(bias().detach()))


DOCUMENTS = torch.tensor([0] * 11 + [1] * 9 + [2] * 30)
#: Masks of queries and keys.
ALLOWED = {
    "causal": lambda q, k: q >= k,
    "window": lambda q, k: (q - k).abs() < 3,
    "documents": lambda q, k: DOCUMENTS[q] == DOCUMENTS[k],
    "nothing": lambda q, k: q < k + 100,
    "whole_rows": lambda q, k: (q < 8) & (q >= k),
}
WAYS = {
    "lowest": lambda s, exists: s.masked_fill(~exists, LOWEST),
    "minus_infinity": lambda s, exists: s.masked_fill(~exists, -torch.inf),
    "added": lambda s, exists: s + torch.where(exists, 0.0, -1e9),
    "chosen": lambda s, exists: torch.where(exists, s, -1e30),
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ALLOWED)
def test_hidden_blocks(name, way):
    def function(q, k, v, b):
        exists = ALLOWED[name](torch.arange(S)[:, None], torch.arange(S))
        return WAYS[way](q @ k.mT * 0.25 + b, exists).softmax(-1) @ v

    if (name, way) == ("whole_rows", "minus_infinity"):
        pytest.skip("such a row is nan in eager mode, and zero in flex_attention")
    with collect() as report:
        # In rows that are hidden as a whole, fp32 rounds the scores away, and float64 does not.
        check_matches_eager(function, *tensors(), torch.nn.Parameter(bias().detach()), exact=name != "whole_rows")
    assert any(SKIPPED in d.why for d in report.decisions)


PADDING = {
    "of_keys": lambda s, b, keys, queries: (s + b).masked_fill(~keys, LOWEST),
    "of_both": lambda s, b, keys, queries: (s + b).masked_fill(~(keys & queries), LOWEST),
    "of_each_head": lambda s, b, keys, queries: s + b,
    "not_low_enough": lambda s, b, keys, queries: s + b - 1e4 * (torch.arange(S)[:, None] < torch.arange(S)),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", PADDING)
def test_what_hides_no_blocks_for_sure(name):
    """Masks of single keys and queries, and a tensor that may hold a mask for each head."""
    function = lambda q, k, v, b, m: PADDING[name](q @ k.mT, b, m, m.mT).softmax(-1) @ v  # noqa: E731
    with collect() as report:
        check_matches_eager(function, *tensors(), bias(), LENGTHS)
    assert [d.path for d in report.decisions if d.pass_name == "attention_pattern"] == ["flex_attention"]
    assert not any(SKIPPED in d.why for d in report.decisions)


CAUSAL = lambda: torch.where(torch.arange(S)[:, None] >= torch.arange(S), 0.0, -1e7)  # noqa: E731
#: Scores that are multiplied, and whether they may be larger than the masks are low.
GAINS = {
    "cold": (lambda s, t: s / 1e-7 + CAUSAL(), True),
    "cold_by_a_tensor": (lambda s, t: s * t + CAUSAL(), True),
    "a_wide_cap": (lambda s, t: 1e8 * torch.tanh(s / 30) + CAUSAL(), True),
    "a_divisor": (lambda s, t: 1.0 / (s + 100.0) + CAUSAL(), True),
    "a_cap": (lambda s, t: 50.0 * torch.tanh(s / 50.0) + CAUSAL(), False),
    "halved": (lambda s, t: -(s / -2.0) * 3 + CAUSAL(), False),
    "masked_first": (lambda s, t: (s + CAUSAL()) * 4.0, False),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", GAINS)
def test_scores_that_may_exceed_the_masks(name):
    change, exceeds = GAINS[name]
    function = lambda q, k, v, b, t: change(q @ k.mT * 0.25 + b, t).softmax(-1) @ v  # noqa: E731
    with collect() as report:
        # Rounded differently, such scores are other scores: only moderate ones are compared.
        inputs = (*tensors(), torch.nn.Parameter(bias().detach()), torch.tensor(1.5))
        if name in ("cold", "a_wide_cap"):
            torch.compile(function, backend="gradfuse")(*inputs)
        else:
            check_matches_eager(function, *inputs, exact=True)
    paths = [d for d in report.decisions if d.pass_name == "attention_pattern"]
    assert paths and any(SKIPPED in d.why for d in paths) != exceeds


def many_penalties(q, k, v, b):
    s = q @ k.mT * 0.25 + b
    for i in range(40):
        s = torch.where(torch.arange(S) == i, s - 0.5, s)
    return (s + CAUSAL()).softmax(-1) @ v


def test_an_element_that_is_used_twice_is_looked_at_once():
    """Each penalty uses the score before it twice, so that there are 2**40 ways through all of them."""
    with collect() as report:
        check_matches_eager(many_penalties, *tensors(), torch.nn.Parameter(bias().detach()))
    assert any(SKIPPED in d.why for d in report.decisions)


def test_short_sequences(monkeypatch):
    monkeypatch.setattr(skipping, "FEWEST_BLOCKS", 5)
    with collect() as report:
        check_matches_eager(
            lambda q, k, v, b: WAYS["added"](q @ k.mT + b, QUERIES >= KEYS).softmax(-1) @ v, *tensors(), bias(), exact=True
        )
    assert not any(SKIPPED in d.why for d in report.decisions)


@pytest.mark.parametrize("low", [LOWEST, -torch.inf, -1e7, -1e5, torch.nan])
@pytest.mark.parametrize("lengths", [(32, 32), (29, 44), (1, 9)])
@pytest.mark.parametrize("name", ALLOWED)
def test_the_blocks_that_are_left(name, lengths, low):
    """They are those of create_block_mask, but rows that are hidden as a whole keep all, unless by -inf."""
    queries, keys = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    masks = torch.where(ALLOWED[name](queries, keys), 0.0, low).expand(2, 1, -1, -1)
    graph = Graph()
    node = graph.placeholder("masks")
    node.meta["example_value"] = masks
    graph.output(node)
    with graph.inserting_before(graph.output_node()):
        found = skipping.visible_blocks(Inserter(graph, node), node)
    visible = torch.ones_like(masks, dtype=torch.bool)
    if low < -1e6:
        whole = (masks == low).all(-1, keepdim=True)
        visible = (masks == 0) | (whole if low > -torch.inf else False)
    want = create_block_mask(
        lambda b, h, q, k: visible[b, 0, q, k], 2, None, *lengths, device="cpu", BLOCK_SIZE=8, _compile=False
    ).to_dense()
    for (number, places), blocks in zip(found, (want, want.mT), strict=True):
        number, places = value_of(number), value_of(places)
        assert (number.dtype, places.dtype) == (torch.int32, torch.int32)
        assert torch.equal(number, blocks.sum(-1, dtype=torch.int32))
        lists = [[p[:n].tolist() for n, p in zip(*x, strict=True)] for x in zip(number[:, 0], places[:, 0], strict=True)]
        assert lists == [[row.nonzero().flatten().tolist() for row in x[0]] for x in blocks]


@pytest.mark.breadth(0)
@pytest.mark.parametrize("device", DEVICES)
def test_in_a_kernel(device, monkeypatch):
    """Blocks have the length that tiles divide."""
    monkeypatch.setattr(skipping, "BLOCK", 128)
    monkeypatch.setattr(skipping, "FEWEST_BLOCKS", 2)
    # The interpreter takes minutes for what a GPU does at once.
    where, length = ("cuda", 400) if device == "cuda" else ("cpu", 140)
    q, k, v = (torch.randn(1, 2, length, 16, device=where, requires_grad=True) for _ in range(3))
    table = torch.nn.Parameter(torch.randn(2, 2 * length - 1, device=where))

    def function(q, k, v, table):
        i = torch.arange(length, device=q.device)
        b = table[:, i[None, :] - i[:, None] + length - 1]
        return (q @ k.mT * 0.25 + b + torch.where(i[:, None] >= i, 0.0, LOWEST)).softmax(-1) @ v

    torch._dynamo.reset()
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu(), collect() as report:
        out = torch.compile(function, backend="gradfuse", dynamic=False)(q, k, v, table)
        got = torch.autograd.grad(out.square().sum(), (q, k, v, table))
    assert any(SKIPPED in d.why for d in report.decisions)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v, table)]
    want = function(*exact)
    for g, w in zip((out, *got), (want, *torch.autograd.grad(want.square().sum(), exact)), strict=True):
        assert relative_error(g, w) < 1e-5
