"""Blocks of scores that masks hide are skipped, where they are hidden whatever the scores are."""

import pytest
import torch
from torch.fx import Graph
from torch.nn.attention.flex_attention import create_block_mask

from inductor_ext.attention.recognition import skipping
from inductor_ext.core.dynamo_graph import Inserter
from inductor_ext.core.fx import value_of
from inductor_ext.core.report import collect
from tests.soundness.check import check_matches_eager

from .spellings import LOWEST, SPELLINGS, S
from .test_masks import FAR_FROM_ZERO, INSIDE, LENGTHS, MASKS, frozen
from .test_regressions import bias
from .test_traps import tensors

SKIPPED = "blocks that its masks hide are skipped"
QUERIES, KEYS = torch.arange(S)[:, None], torch.arange(S)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(skipping, "BLOCK", 8)
    monkeypatch.setattr(skipping, "FEWEST_BLOCKS", 1)


@pytest.mark.breadth(8)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    check_matches_eager(SPELLINGS[name].function, *SPELLINGS[name].inputs(), exact=True)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    function, mask = MASKS[name]
    check_matches_eager(function, *tensors(), bias(), mask)


@pytest.mark.breadth(6)
@pytest.mark.parametrize("name", FAR_FROM_ZERO)
def test_rows_far_from_zero(name):
    function = lambda q, k, v, b, m: FAR_FROM_ZERO[name](q @ k.mT + b, m).softmax(-1) @ v  # noqa: E731
    check_matches_eager(function, *tensors(), bias(), LENGTHS & (QUERIES >= KEYS))


@pytest.mark.breadth(6)
@pytest.mark.parametrize("name", INSIDE)
def test_a_mask_inside_an_expression(name):
    gate = torch.rand(1, 1, S, 1) + 0.5
    function = lambda q, k, v, b, m: INSIDE[name](q @ k.mT, b, m, gate).softmax(-1) @ v  # noqa: E731
    check_matches_eager(function, *tensors(), torch.nn.Parameter(bias().detach()), frozen(-1e9, LENGTHS & (QUERIES >= KEYS)))


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


@pytest.mark.breadth(6)
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
}


@pytest.mark.parametrize("name", PADDING)
def test_what_hides_no_blocks_for_sure(name):
    """Masks of single keys and queries, and a tensor that may hold a mask for each head."""
    function = lambda q, k, v, b, m: PADDING[name](q @ k.mT, b, m, m.mT).softmax(-1) @ v  # noqa: E731
    with collect() as report:
        check_matches_eager(function, *tensors(), bias(), LENGTHS)
    assert [d.path for d in report.decisions if d.pass_name == "attention_pattern"] == ["flex_attention"]
    assert not any(SKIPPED in d.why for d in report.decisions)


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
