"""How many copies of a gradient there are, and that their sum is right (interpreted)."""

import pytest
import torch

from inductor_ext.attention import hoisting
from inductor_ext.attention.copies import MOST_BYTES, MOST_COPIES, copies
from tests.support.emitted import triton_sources

from .test_entries import BATCH, HEADS, LENGTH, assert_matches_float64, flex_attention, integers, table


def test_how_many():
    assert copies((512, 32)) == MOST_COPIES
    assert copies(()) == MOST_COPIES
    assert copies((0, 3)) == MOST_COPIES
    assert copies((MOST_BYTES // 16,)) == 4
    assert copies((MOST_BYTES // 16 + 1,)) == 2
    assert copies((MOST_BYTES,)) == 1
    assert copies((torch.SymInt, 3)) == 1


@pytest.mark.breadth(1)
@pytest.mark.parametrize("one_pass", [False, True])
def test_the_sum_of_all_copies(one_pass, monkeypatch):
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)
    edge = torch.randint(0, 90, (BATCH, LENGTH, LENGTH), generator=torch.Generator().manual_seed(0))
    segment = integers(0, 3)
    # The second read is one value for each query, which is added to a copy of the same gradient.
    bias = lambda t: lambda s, b, h, q, k: s + t[h, edge[b, q, k]] + s * t[h, segment[b, q]]  # noqa: E731
    assert_matches_float64(bias, table((HEADS, 90)), bwd_ONE_PASS=one_pass)


def backward(index):
    inputs = [torch.zeros(BATCH, HEADS, LENGTH, 16, requires_grad=True) for _ in range(3)]
    t = torch.zeros(BATCH, HEADS, LENGTH, 3, requires_grad=True)
    score_mod = lambda s, b, h, q, k: s * t[(*index(b, h, q, k),)]  # noqa: E731
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod), backend="gradfuse")
    return triton_sources(compiled, *inputs)[1]


def test_entries_of_one_batch_element_are_not_copied():
    assert f"% {MOST_COPIES} *" not in backward(lambda b, h, q, k: (b, h, q, (q * k) % 3))
