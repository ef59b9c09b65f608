"""Integer expressions in the positions b, h, q and k of a score, as they arise when a view is read at a position.

Reading ``x.view(B, H, Q, K)`` at ``(b, h, q, k)`` reads ``x`` at quotients and remainders of ``((b*H + h)*Q + q)*K + k``.
Most of them simplify, because the range of every position is known: ``(q*K + k) // K`` is q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from ...torch_api.sizes import statically_known_true
from ..footprints import B, H
from ..kinds import K, Q

POSITIONS = (B, H, Q, K)
ZERO = sympy.Integer(0)
#: The bound of a position whose range is symbolic.
_MOST = 2**30


class Quotient(sympy.Function):
    """``x // n`` for an integer n > 0. SymPy does not evaluate it, so that it stays the partner of its remainder."""


class Remainder(sympy.Function):
    """``x % n`` for an integer n > 0, which is at least 0."""


@dataclass(frozen=True)
class Interval:
    """The integers from ``low`` to ``high``."""

    low: int
    high: int

    def within(self, size: int) -> bool:
        """Whether all of them are valid indices of a dim of this size."""
        return self.low >= 0 and self.high < size


class Ranges:
    """The numbers of values of b, h, q and k, and what follows from them."""

    def __init__(self, extents: Sequence[Any]) -> None:
        self.extents: dict[sympy.Symbol, Any] = dict(zip(POSITIONS, extents, strict=True))

    def including(self, symbol: sympy.Symbol, extent: Any) -> Ranges:
        """Return the ranges with another symbol, which is no position of a score."""
        ranges = Ranges(tuple(self.extents.values()))
        ranges.extents[symbol] = extent
        return ranges

    def of_groups(self, size: int) -> Ranges:
        """Return the ranges where h counts groups of this many heads."""
        return Ranges([n // size if p is H else n for p, n in self.extents.items()])

    def interval(self, index: sympy.Expr) -> Interval:
        """Return bounds of an expression. They hold for all positions, and need not be reached."""
        low = high = 0
        for atom, factor in _terms(index):
            within = self._of_atom(atom)
            ends = (factor * within.low, factor * within.high)
            low, high = low + min(ends), high + max(ends)
        return Interval(low, high)

    def fits_32_bits(self, index: sympy.Expr) -> bool:
        """Return whether no partial sum of an expression exceeds 32 bits."""
        most = 0
        for atom, factor in _terms(index):
            within = self._of_atom(atom)
            most += max(abs(factor * within.low), abs(factor * within.high))
            if isinstance(atom, (Quotient, Remainder)) and not self.fits_32_bits(atom.args[0]):
                return False
        return most < 2**31

    def _of_atom(self, atom: sympy.Expr) -> Interval:
        if atom == 1:
            return Interval(1, 1)
        if isinstance(atom, Quotient):
            x, n = self.interval(atom.args[0]), int(atom.args[1])
            return Interval(x.low // n, x.high // n)
        if isinstance(atom, Remainder):
            return Interval(0, int(atom.args[1]) - 1)
        extent = self.extents[atom]
        return Interval(0, max((extent if isinstance(extent, int) else _MOST) - 1, 0))

    def divided(self, index: sympy.Expr, n: int) -> tuple[sympy.Expr, sympy.Expr]:
        """Return ``index // n`` and ``index % n``, in simple form if the ranges allow it."""
        if n == 1:
            return index, ZERO
        for residue in (_least, _nearest):
            rest = sum((residue(factor, n) * atom for atom, factor in _terms(index) if atom != 1), ZERO)
            low = self.interval(rest).low
            # The smallest constant with the same remainder for which the rest is not negative.
            rest += (_constant(index) + low) % n - low
            if self.interval(rest).within(n):
                return sympy.expand((index - rest) / n), rest
        return Quotient(index, n), Remainder(index, n)

    def joined(self, indices: Sequence[sympy.Expr], sizes: Sequence[int]) -> sympy.Expr:
        """Return the index into a contiguous block with dims of these sizes."""
        flat: sympy.Expr = ZERO
        for index, size in zip(indices, sizes, strict=True):
            flat = flat * size + index
        return _recombined(sympy.expand(flat))

    def split(self, flat: sympy.Expr, sizes: Sequence[int]) -> list[sympy.Expr]:
        """Return the indices along dims of these sizes of an element of a contiguous block."""
        indices = []
        for size in reversed(sizes[1:]):
            flat, last = self.divided(flat, size)
            indices.append(last)
        return [flat, *reversed(indices)] if sizes else []

    def radix(self, index: sympy.Expr, size: Any) -> list[sympy.Symbol] | None:
        """Return the positions, outermost first, if ``index`` counts the elements of a block with one dim for each of them.

        The dim of size 6 that is read at ``3*b + h`` is such a block of 2 batches and 3 heads. None for other expressions.
        """
        terms = sorted(_terms(index), key=lambda term: -term[1])
        expected: Any = 1
        for atom, factor in reversed(terms):
            if atom not in self.extents or not isinstance(expected, int) or factor != expected:
                return None
            expected = expected * self.extents[atom]
        return [atom for atom, _ in terms] if terms and statically_known_true(expected == size) else None


def _terms(index: sympy.Expr) -> list[tuple[sympy.Expr, int]]:
    return [(atom, int(factor)) for atom, factor in sympy.sympify(index).as_coefficients_dict().items() if factor != 0]


def _constant(index: sympy.Expr) -> int:
    return dict(_terms(index)).get(sympy.Integer(1), 0)


def _least(factor: int, n: int) -> int:
    return factor % n


def _nearest(factor: int, n: int) -> int:
    return (factor + n // 2) % n - n // 2


def _recombined(index: sympy.Expr) -> sympy.Expr:
    """Replace ``n * (x // n) + x % n`` by ``x``, once for each remainder."""
    factors = dict(_terms(index))
    for atom, factor in list(factors.items()):
        if isinstance(atom, Remainder):
            quotient, n = Quotient(*atom.args), int(atom.args[1])
            if factors.get(quotient) == factor * n:
                whole = factor * (atom.args[0] - n * quotient - atom)
                return _recombined(sympy.expand(index + whole))
    return index
