"""Positions that restart in packed documents: lookups at ``position[k] - position[q]`` (interpreted)."""

import contextlib

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from inductor_ext.attention import hoisting, restarts
from tests.support.emitted import triton_sources

from . import comparison
from .comparison import BATCH, HEADS, draw, heads

LENGTH, REACH = 150, 40


@pytest.fixture(autouse=True)
def no_table_of_pairs(monkeypatch):
    """As for long sequences, of lengths that are not symbols."""
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)
    torch._dynamo.reset()


#: Documents of 40 positions, whose positions restart; a number; and positions that do not follow each other at all.
DOCUMENT = torch.arange(LENGTH) // REACH
PACKED = torch.arange(LENGTH) % REACH
SCALE = torch.tensor(3)
SCATTERED = torch.randint(0, REACH, (LENGTH,), generator=torch.Generator().manual_seed(0))


def same_document(b, h, q, k):
    return DOCUMENT[q] == DOCUMENT[k]


def assert_matches_float64(score_mod, table, *, mask=same_document, length=LENGTH, **options):
    comparison.assert_matches_float64(score_mod, table, (length, length), mask=mask, **options)


def bucket(distance):
    return distance.abs().clamp(1).log().long()


def buckets_of(position):
    return lambda t: lambda s, b, h, q, k: s + t[h, bucket(position[k] - position[q])]


@pytest.mark.breadth(0)
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize(
    "position",
    [
        pytest.param(PACKED, id="packed"),
        pytest.param(PACKED.int(), id="int32"),
        pytest.param(SCATTERED, id="scattered"),
        pytest.param((torch.arange(LENGTH) - 20).clamp(0), id="left padding"),
        pytest.param(torch.arange(LENGTH) * 2, id="every second"),
        pytest.param(torch.where(torch.arange(LENGTH) < 128, torch.arange(LENGTH), SCATTERED), id="plain in one block"),
    ],
)
def test_buckets(position, one_pass):
    mask = same_document if position is PACKED else None
    assert_matches_float64(buckets_of(position), draw(HEADS, 8), mask=mask, bwd_ONE_PASS=one_pass)


@pytest.mark.breadth(0)
def test_a_position_for_each_batch_element():
    position = torch.stack([PACKED, torch.arange(LENGTH)])
    assert_matches_float64(
        lambda t: lambda s, b, h, q, k: s * (1 + t[bucket(position[b, k] - position[b, q]), h]), draw(8, HEADS), mask=None
    )


@pytest.mark.breadth(0)
def test_distances_that_no_document_has_are_out_of_range():
    """The table has the distances of one document only, and nothing hides the others from the diagonals."""

    def inside(b, h, q, k):
        return DOCUMENT[q] == DOCUMENT[k]

    def score_mod(t):
        return lambda s, b, h, q, k: torch.where(inside(b, h, q, k), s + t[h, PACKED[k] - PACKED[q] + REACH - 1], -torch.inf)

    assert_matches_float64(score_mod, draw(HEADS, 2 * REACH - 1), mask=None)


@pytest.mark.breadth(0)
def test_a_shift_that_does_not_cancel():
    """``position[k] - q`` is not ``k - q`` where the two positions have the same shift."""

    def score_mod(t):
        return lambda s, b, h, q, k: s + t[h, bucket(PACKED[k] - PACKED[q])] * t[h, bucket(PACKED[k] - q)]

    assert_matches_float64(score_mod, draw(HEADS, 8), mask=None)


@pytest.mark.breadth(0)
def test_other_positions_of_keys_than_of_queries():
    ahead = PACKED + 3
    assert_matches_float64(lambda t: lambda s, b, h, q, k: s + t[h, bucket(ahead[k] - PACKED[q])], draw(HEADS, 8))


@pytest.mark.breadth(0)
def test_grouped_heads_and_a_causal_mask():
    assert_matches_float64(
        buckets_of(PACKED), draw(HEADS, 8), mask=lambda b, h, q, k: (q >= k) & same_document(b, h, q, k), kv_heads=1
    )


@pytest.mark.breadth(0)
def test_a_block_mask_that_shows_what_its_mask_mod_hides():
    number, index = torch.full((1, 1, 2), 2, dtype=torch.int32), torch.arange(2, dtype=torch.int32).repeat(1, 1, 2, 1)
    lists = number * 0, index * 0, number, index
    block_mask = BlockMask.from_kv_blocks(*lists, mask_mod=same_document, seq_lengths=(LENGTH, LENGTH))
    assert_matches_float64(buckets_of(PACKED), draw(HEADS, 8), mask=None, block_mask=block_mask)


#: Documents of 130 positions, so that a tile of 256 has blocks of both kinds.
LONG = torch.arange(300) % 130


@pytest.mark.breadth(0)
@pytest.mark.parametrize(
    "tiles",
    [
        pytest.param(("BLOCK_M", "BLOCK_N"), id="forward"),
        pytest.param(("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"), id="backward"),
    ],
)
def test_tiles_that_are_longer_than_a_block(tiles):
    assert_matches_float64(buckets_of(LONG), draw(HEADS, 8), mask=None, length=300, **dict.fromkeys(tiles, 256))


@pytest.mark.breadth(0)
@pytest.mark.parametrize("tile", [64, 256])
def test_a_condition_of_blocks_of_the_user(tile):
    of_blocks = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0]]).bool()

    def score_mod(t):
        return lambda s, b, h, q, k: s + torch.where(of_blocks[q // 128, k // 128], t[h, q, k], 0.0)

    assert_matches_float64(score_mod, draw(HEADS, 300, 300), mask=None, length=300, BLOCK_M=tile, BLOCK_N=tile)


@pytest.mark.breadth(0)
@pytest.mark.parametrize(
    "factor", [lambda d: (REACH - d.abs()).float().sqrt(), lambda d: 1 / (REACH - d)], ids=["root", "quotient"]
)
def test_arithmetic_that_has_no_number_at_distances_of_no_document(factor):
    """The diagonals have these distances too, and 0 times nan is no gradient."""

    def score_mod(t):
        return lambda s, b, h, q, k: s + t[h, bucket(PACKED[k] - PACKED[q])] * factor(PACKED[k] - PACKED[q])

    assert_matches_float64(score_mod, draw(HEADS, 8))


@pytest.mark.breadth(0)
def test_a_mask_with_a_number_in_a_tensor():
    """One int8 times a number in an int64 tensor is int64, a grid of int8 times the number is int8."""
    narrow, hundred = DOCUMENT.to(torch.int8), torch.tensor(100)
    block_mask = create_block_mask(
        lambda b, h, q, k: (narrow[q] * hundred >= 127) | (q == k), None, None, LENGTH, LENGTH, device="cpu"
    )
    wide = lambda b, h, q, k: (DOCUMENT[q] * 100 >= 127) | (q == k)  # noqa: E731
    assert torch.equal(block_mask.mask_mod(0, 0, torch.tensor(140), torch.tensor(0)), torch.tensor(True))
    assert_matches_float64(buckets_of(PACKED), draw(HEADS, 8), mask=wide, block_mask=block_mask)


@pytest.mark.breadth(0)
def test_deterministic():
    assert_matches_float64(buckets_of(PACKED), draw(HEADS, 8), compiler={"deterministic": True})


@pytest.mark.breadth(0)
def test_symbolic_sizes():
    # Torch marks the tensors of such a graph, so that their lengths are symbols in later graphs too.
    documents = DOCUMENT.clone()
    mask = lambda b, h, q, k: documents[q] == documents[k]  # noqa: E731
    assert_matches_float64(buckets_of(PACKED.clone()), draw(HEADS, 8), mask=mask, dynamic=True)


@pytest.mark.breadth(0)
@pytest.mark.parametrize(
    ("mask", "separated"),
    [
        pytest.param(None, True, id="none"),
        pytest.param(same_document, True, id="documents"),
        pytest.param(lambda b, h, q, k: (q >= k) & same_document(b, h, q, k) & (q - k < 30), True, id="several conditions"),
        pytest.param(lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) | (h == 0), False, id="another for each head"),
        pytest.param(lambda b, h, q, k: DOCUMENT[q] * SCALE == DOCUMENT[k] * SCALE, False, id="a number in a tensor"),
        pytest.param(lambda b, h, q, k: DOCUMENT[q] / 3 == DOCUMENT[k] / 3, False, id="floats"),
    ],
)
def test_under_which_masks_distances_are_separated(mask, separated):
    table, block_mask = draw(HEADS, 16).requires_grad_(), None
    if mask is not None:
        block_mask = create_block_mask(mask, None, HEADS, LENGTH, LENGTH, device="cpu")
    inputs = heads(LENGTH)

    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod=buckets_of(PACKED)(table), block_mask=block_mask)

    sources = triton_sources(torch.compile(attend, backend="gradfuse"), *inputs)
    assert all(("if tl.min(spared" in source) == separated for source in sources)


def test_a_mask_that_reads_rows_is_left(monkeypatch):
    """No kernel can compute it, and stock decides about the call. There is no kernel of stock's here."""
    documents = torch.stack([DOCUMENT, DOCUMENT])
    mask = create_block_mask(
        lambda b, h, q, k: documents[b][q] == documents[b][k], BATCH, None, LENGTH, LENGTH, device="cpu"
    )
    asked = []
    monkeypatch.setattr(restarts, "plain_blocks", lambda *arguments: asked.append(arguments))
    table = draw(HEADS, 8).requires_grad_()

    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod=buckets_of(PACKED)(table), block_mask=mask)

    with contextlib.suppress(Exception):
        triton_sources(torch.compile(attend, backend="gradfuse"), *heads(LENGTH))
    assert not asked


@pytest.mark.breadth(0)
@pytest.mark.parametrize(
    ("index", "separated"),
    [
        pytest.param(lambda p, o, q, k: bucket(p[k] - p[q]), True, id="distance"),
        pytest.param(lambda p, o, q, k: bucket(2 * p[k] - 2 * p[q]), True, id="twice the distance"),
        pytest.param(lambda p, o, q, k: bucket(p[k] + p[q]), False, id="sum"),
        pytest.param(lambda p, o, q, k: bucket(p[k] - q), False, id="one of them is a plain position"),
        pytest.param(lambda p, o, q, k: bucket(p[k] - 2 * p[q]), False, id="other factors"),
        pytest.param(lambda p, o, q, k: bucket(p[k] - p[q] + o[k]), False, id="a third tensor"),
        pytest.param(lambda p, o, q, k: bucket(p[k] // 2 - p[q] // 2), False, id="quotients"),
        pytest.param(lambda p, o, q, k: p[q] * 0 + p[k] * 0, False, id="no distance"),
    ],
)
def test_what_is_separated(index, separated):
    table, other = draw(HEADS, 16).requires_grad_(), torch.arange(LENGTH) % 3
    inputs = heads(LENGTH)
    score_mod = lambda s, b, h, q, k: s + table[h, index(PACKED, other, q, k).clamp(0, 15)]  # noqa: E731
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod), backend="gradfuse")
    forward, backward = triton_sources(compiled, *inputs)
    assert ("if tl.min(spared" in forward) == ("if tl.min(spared" in backward) == separated
    assert ("if tl.min(condition" in backward) == separated


@pytest.mark.breadth(0)
def test_small_tables_of_pairs_are_not_separated(monkeypatch):
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", HEADS * LENGTH**2)
    inputs = heads(LENGTH)
    score_mod = buckets_of(PACKED)(draw(HEADS, 8).requires_grad_())
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod), backend="gradfuse")
    assert all("spared" not in source for source in triton_sources(compiled, *inputs))
