"""Tables with few entries for queries and others for keys: ``t[h, segment[q], segment[k]]`` (interpreted)."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from inductor_ext.attention import hoisting
from tests.support.emitted import triton_sources

from . import comparison
from .comparison import BATCH, DIM, HEADS

LENGTH = 72


@pytest.fixture(autouse=True)
def no_table_of_pairs(monkeypatch):
    """As for long sequences."""
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)


def integers(low, high):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, high, (BATCH, LENGTH), generator=generator)


#: The shape of a table, and its index from b, h, and the entries of q and k, which are from -3 to 2.
CASES = {
    "segments": ((HEADS, 3, 3), lambda b, h, q, k: (h, q, k)),
    "of_keys_first": ((3, 3), lambda b, h, q, k: (k, q)),
    "shared_by_heads": ((3, BATCH, 3), lambda b, h, q, k: (q, b, k)),
    "two_dims_of_keys": ((3, 3, 5), lambda b, h, q, k: (k, q, k + 1)),
    "32_entries": ((HEADS, 32, 3), lambda b, h, q, k: (h, 7 * q + 9, k)),
    "one_entry": ((1, 3), lambda b, h, q, k: (q * 0, k)),
}


def assert_matches_float64(score_mod, table, **options):
    comparison.assert_matches_float64(score_mod, table, (LENGTH, LENGTH), **options)


def table(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, one_pass):
    shape, index = CASES[name]
    entry = integers(-3, 3)
    segment = entry.sort(-1).values
    bias = lambda t: lambda s, b, h, q, k: s + t[index(b, h, entry[b, q], segment[b, k])] * 2  # noqa: E731
    assert_matches_float64(bias, table(shape), bwd_ONE_PASS=one_pass)


def test_symbolic_sizes():
    """The first entry of the queries times a symbolic stride is 0 (score_mods:1200068 of the fuzzer)."""
    segment = integers(0, 3)
    assert_matches_float64(
        lambda t: lambda s, b, h, q, k: s + t[segment[b, q], segment[b, k], h], table((3, 3, HEADS)), dynamic=True
    )


def test_masks_and_grouped_heads():
    segment = integers(0, 3).sort(-1).values
    bias = lambda t: lambda s, b, h, q, k: s + t[h, segment[b, q], segment[b, k]]  # noqa: E731
    assert_matches_float64(bias, table((HEADS, 3, 3)), mask=lambda b, h, q, k: q >= k, kv_heads=1)


def test_keys_out_of_bounds_that_the_mask_hides():
    """As in padding, whose segment is -100 or 1000."""
    inside = integers(0, 3)
    segment = inside.clone()
    segment[:, 60:66], segment[:, 66:] = -100, 1000

    def bias(t):
        keys = inside if t.dtype is torch.float64 else segment
        return lambda s, b, h, q, k: s + t[h, inside[b, q], keys[b, k]]

    assert_matches_float64(bias, table((HEADS, 3, 3)), mask=lambda b, h, q, k: k < 60)


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    ("index", "entries", "summed"),
    [
        pytest.param(lambda q, k: (q, k), 32, True, id="few entries"),
        pytest.param(lambda q, k: (q, k), 33, False, id="many entries"),
        pytest.param(lambda q, k: (q - k, k), 8, False, id="an index of both"),
        pytest.param(lambda q, k: (q, q), 8, False, id="two indices of the query"),
    ],
)
def test_which_contributions_are_summed_by_entry(index, entries, summed):
    t, entry = table((HEADS, entries, entries)).requires_grad_(), integers(0, 8)
    inputs = [torch.zeros(BATCH, HEADS, LENGTH, DIM, requires_grad=True) for _ in range(3)]
    score_mod = lambda s, b, h, q, k: s * t[(h, *index(entry[b, q], entry[b, k]))] * (entry[b, k] + 1)  # noqa: E731
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod), backend="gradfuse")
    assert ("one_hot = " in triton_sources(compiled, *inputs)[1]) == summed
