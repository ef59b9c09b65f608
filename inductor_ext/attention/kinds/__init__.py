"""Footprint kinds: the forms in which an expression of a score_mod may depend on the query and key positions.

To add a kind, write a class in this package and a test. In ``KINDS`` it must come before every kind of which it is a special
case. If kernels read whole tiles of it, also write a file of macros in ``templates/attention/kinds``.
"""

from __future__ import annotations

import sympy

from .base import FootprintKind, K, Q, Reduction, TiledKind
from .diagonals import Antidiagonal, Diagonal
from .pair import Pair
from .positions import Column, Row, Scalar

__all__ = [
    "BY_NAME",
    "COLUMN",
    "KINDS",
    "NONE",
    "PAIR",
    "ROW",
    "FootprintKind",
    "K",
    "Q",
    "Reduction",
    "TiledKind",
    "join",
    "recognise",
]

NONE, ROW, COLUMN, PAIR = Scalar(), Row(), Column(), Pair()
#: The kinds in the order in which they are tried on an expression. ``pair`` holds for every expression.
KINDS: tuple[FootprintKind, ...] = (NONE, ROW, COLUMN, Diagonal(), Antidiagonal(), PAIR)
BY_NAME = {kind.name: kind for kind in KINDS}


def recognise(polynomial: sympy.Expr) -> FootprintKind:
    """Return the kind of an exact integer expression in ``Q``, ``K`` and other symbols."""
    return next(kind for kind in KINDS if kind.holds(polynomial))


def join(first: FootprintKind, second: FootprintKind) -> FootprintKind:
    """Return the least kind that holds for every expression for which one of the two kinds holds."""
    if second in (first, NONE):
        return first
    return second if first is NONE else PAIR
