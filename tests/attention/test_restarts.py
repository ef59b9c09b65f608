"""Positions that restart in packed documents: lookups at ``position[k] - position[q]`` (interpreted)."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from inductor_ext.attention import hoisting
from tests.support.emitted import triton_sources
from tests.support.interpreter import triton_on_cpu

BATCH, HEADS, LENGTH, DIM, REACH = 2, 2, 150, 16, 40


@pytest.fixture(autouse=True)
def no_table_of_pairs(monkeypatch):
    """As for long sequences."""
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)


#: Documents of 40 positions, whose positions restart; and positions that do not follow each other at all.
DOCUMENT = torch.arange(LENGTH) // REACH
PACKED = torch.arange(LENGTH) % REACH
SCATTERED = torch.randint(0, REACH, (LENGTH,), generator=torch.Generator().manual_seed(0))


def same_document(b, h, q, k):
    return DOCUMENT[q] == DOCUMENT[k]


def draw(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def compare(score_mod, table, *, mask=same_document, kv_heads=HEADS, dynamic=None, compiler=None, all_full=False, **options):
    """Output and gradients against float64. ``score_mod``: from a table to a score_mod."""
    inputs = [draw(BATCH, n, LENGTH, DIM, seed=i) for i, n in enumerate((HEADS, kv_heads, kv_heads))]
    inputs = [x.requires_grad_() for x in (*inputs, table)]
    block_mask = mask and create_block_mask(mask, None, None, LENGTH, LENGTH, device="cpu")
    if all_full:
        # The kernel does not ask the mask in these blocks.
        number, index = torch.full((1, 1, 2), 2, dtype=torch.int32), torch.arange(2, dtype=torch.int32).expand(1, 1, 2, 2)
        lists = number * 0, index * 0, number, index.contiguous()
        block_mask = BlockMask.from_kv_blocks(*lists, mask_mod=mask, seq_lengths=(LENGTH, LENGTH))
        mask = None
    grad = draw(BATCH, HEADS, LENGTH, DIM, seed=9)

    def attend(q, k, v, t):
        gqa = kv_heads != HEADS
        return flex_attention(q, k, v, score_mod=score_mod(t), block_mask=block_mask, enable_gqa=gqa, kernel_options=options)

    with triton_on_cpu(tma=True):
        run = torch.compile(attend, backend="gradfuse", fullgraph=True, dynamic=dynamic, options=compiler)
        out = run(*inputs)
        got = [out, *torch.autograd.grad(out, inputs, grad)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    b, h, i, j = (
        torch.arange(n).view([-1 if a == d else 1 for a in range(4)]) for d, n in enumerate((BATCH, HEADS, LENGTH, LENGTH))
    )
    k, v = (x.repeat_interleave(HEADS // kv_heads, 1) for x in exact[1:3])
    scores = score_mod(exact[3])(exact[0] @ k.mT / DIM**0.5, b, h, i, j)
    if mask is not None:
        scores = scores.masked_fill(~mask(b, h, i, j), -torch.inf)
    out = scores.softmax(-1) @ v
    want = [out, *torch.autograd.grad(out, exact, grad.double())]
    for x, y in zip(got, want, strict=True):
        assert (x - y).norm() < 1e-5 * y.norm()


def bucket(distance):
    return distance.abs().clamp(1).log().long()


def buckets_of(position):
    return lambda t: lambda s, b, h, q, k: s + t[h, bucket(position[k] - position[q])]


@pytest.mark.breadth(3)
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
    compare(buckets_of(position), draw(HEADS, 8), mask=mask, bwd_ONE_PASS=one_pass)


def test_a_position_for_each_batch_element():
    position = torch.stack([PACKED, torch.arange(LENGTH)])
    compare(
        lambda t: lambda s, b, h, q, k: s * (1 + t[bucket(position[b, k] - position[b, q]), h]), draw(8, HEADS), mask=None
    )


def test_distances_that_no_document_has_are_out_of_range():
    """The table has the distances of one document only, and nothing hides the others from the diagonals."""

    def inside(b, h, q, k):
        return DOCUMENT[q] == DOCUMENT[k]

    def score_mod(t):
        return lambda s, b, h, q, k: torch.where(inside(b, h, q, k), s + t[h, PACKED[k] - PACKED[q] + REACH - 1], -torch.inf)

    compare(score_mod, draw(HEADS, 2 * REACH - 1), mask=None)


def test_a_shift_that_does_not_cancel():
    """``position[k] - q`` is not ``k - q`` where the two positions have the same shift."""

    def score_mod(t):
        return lambda s, b, h, q, k: s + t[h, bucket(PACKED[k] - PACKED[q])] * t[h, bucket(PACKED[k] - q)]

    compare(score_mod, draw(HEADS, 8), mask=None)


def test_other_positions_of_keys_than_of_queries():
    ahead = PACKED + 3
    compare(lambda t: lambda s, b, h, q, k: s + t[h, bucket(ahead[k] - PACKED[q])], draw(HEADS, 8))


def test_grouped_heads_and_a_causal_mask():
    compare(buckets_of(PACKED), draw(HEADS, 8), mask=lambda b, h, q, k: (q >= k) & same_document(b, h, q, k), kv_heads=1)


def test_a_block_mask_that_shows_what_its_mask_mod_hides():
    compare(buckets_of(PACKED), draw(HEADS, 8), all_full=True)


def test_deterministic():
    compare(buckets_of(PACKED), draw(HEADS, 8), compiler={"deterministic": True})


def test_symbolic_sizes():
    compare(buckets_of(PACKED), draw(HEADS, 8), dynamic=True)


@pytest.mark.parametrize(
    ("mask", "separated"),
    [
        pytest.param(None, True, id="none"),
        pytest.param(same_document, True, id="documents"),
        pytest.param(lambda b, h, q, k: (q >= k) & same_document(b, h, q, k) & (q - k < 30), True, id="several conditions"),
        pytest.param(lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) | (h == 0), False, id="another for each head"),
    ],
)
def test_under_which_masks_distances_are_separated(mask, separated):
    table, block_mask = draw(HEADS, 16).requires_grad_(), None
    if mask is not None:
        block_mask = create_block_mask(mask, None, HEADS, LENGTH, LENGTH, device="cpu")
    inputs = [draw(BATCH, HEADS, LENGTH, DIM).requires_grad_() for _ in range(3)]

    def attend(q, k, v):
        return flex_attention(q, k, v, score_mod=buckets_of(PACKED)(table), block_mask=block_mask)

    sources = triton_sources(torch.compile(attend, backend="gradfuse"), *inputs)
    assert all(("if tl.min(spared" in source) == separated for source in sources)


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
    inputs = [draw(BATCH, HEADS, LENGTH, DIM).requires_grad_() for _ in range(3)]
    score_mod = lambda s, b, h, q, k: s + table[h, index(PACKED, other, q, k).clamp(0, 15)]  # noqa: E731
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod), backend="gradfuse")
    forward, backward = triton_sources(compiled, *inputs)
    assert ("if tl.min(spared" in forward) == ("if tl.min(spared" in backward) == separated
    assert ("if tl.min(condition" in backward) == separated


def test_small_tables_of_pairs_are_not_separated(monkeypatch):
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", HEADS * LENGTH**2)
    inputs = [draw(BATCH, HEADS, LENGTH, DIM).requires_grad_() for _ in range(3)]
    score_mod = buckets_of(PACKED)(draw(HEADS, 8).requires_grad_())
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod), backend="gradfuse")
    assert all("spared" not in source for source in triton_sources(compiled, *inputs))
