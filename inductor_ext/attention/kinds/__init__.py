"""Footprint kinds: the forms in which an expression of a score_mod may depend on the query and key positions.

A new kind is a class here, in ``KINDS`` before every kind that it is a special case of, a file of macros in
``templates/attention/kinds`` if kernels read it a tile at a time, and a test.
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
#: In the order in which an expression is tried on them; ``pair`` holds for every expression.
KINDS: tuple[FootprintKind, ...] = (NONE, ROW, COLUMN, Diagonal(), Antidiagonal(), PAIR)
BY_NAME = {kind.name: kind for kind in KINDS}


def recognise(polynomial: sympy.Expr) -> FootprintKind:
    """The kind of an exact integer expression in ``Q``, ``K`` and other symbols."""
    return next(kind for kind in KINDS if kind.holds(polynomial))


def join(first: FootprintKind, second: FootprintKind) -> FootprintKind:
    """The least kind that holds wherever either of two does."""
    if second in (first, NONE):
        return first
    return second if first is NONE else PAIR
