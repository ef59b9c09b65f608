"""Index arithmetic of views: the element of the operand is the one that torch reads."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_ext.attention.recognition import views
from inductor_ext.attention.recognition.indices import POSITIONS, B, H, K, Q, Quotient, Ranges, Remainder
from inductor_ext.core import terms, writes

EXTENTS = (2, 3, 6, 4)


def evaluate(index):
    """An expression at all positions."""
    grids = torch.meshgrid(*[torch.arange(n) for n in EXTENTS], indexing="ij")
    at = dict(zip(POSITIONS, grids, strict=True))

    def value(x):
        if x in at:
            return at[x]
        if isinstance(x, (Quotient, Remainder)):
            inner, n = value(x.args[0]), int(x.args[1])
            return inner // n if isinstance(x, Quotient) else inner % n
        total = torch.zeros(EXTENTS, dtype=torch.int64)
        for atom, factor in x.as_coefficients_dict().items():
            total = total + int(factor) * (value(atom) if atom != 1 else 1)
        return total

    return value(index)


LINEAR = st.tuples(*[st.integers(-9, 9)] * 4, st.integers(-20, 60))


@settings(deadline=None, max_examples=300)
@given(LINEAR, st.integers(1, 15), st.integers(1, 9))
def test_quotients_and_remainders(factors, n, m):
    ranges = Ranges(EXTENTS)
    *of, constant = factors
    index = sum((f * p for f, p in zip(of, POSITIONS, strict=True)), start=B * 0 + constant)
    quotient, remainder = ranges.divided(index, n)
    assert torch.equal(evaluate(quotient), evaluate(index) // n)
    assert torch.equal(evaluate(remainder), evaluate(index) % n)
    assert torch.equal(evaluate(ranges.joined([quotient, remainder], [0, n])), evaluate(index))
    inner = ranges.divided(quotient + 1, m)
    assert torch.equal(evaluate(inner[1]), (evaluate(index) // n + 1) % m)
    bounds = ranges.interval(index)
    assert bounds.low <= evaluate(index).min() and evaluate(index).max() <= bounds.high


def test_what_simplifies():
    ranges = Ranges((2, 3, 32, 32))
    assert ranges.divided(32 * Q + K, 32) == (Q, K)
    assert ranges.joined(ranges.split(Q, [4, 8]), [4, 8]) == Q
    # The relative shift of XLNet: row q and column k of a matrix that was viewed with other dims and lost its first row.
    row, column = ranges.split(63 * Q + K, [63, 32])
    assert ranges.split(ranges.joined([row + 1, column], [64, 32]), [32, 64]) == [Q, K - Q + 32]
    assert ranges.radix(3 * B + H, 6) == [B, H]
    assert ranges.radix(3 * B + H, 7) is None and ranges.radix(2 * B + H, 6) is None and ranges.radix(B + 1, 3) is None


def test_ops_that_are_followed_as_views_write_nothing():
    """What a walk goes through, ``Writes`` must not take for an op that changes its operand."""
    assert set(views.VIEWS) | set(terms._VIEWS) <= writes.VIEWS
