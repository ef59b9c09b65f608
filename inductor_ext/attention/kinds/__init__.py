"""Footprint kinds: the forms in which an expression of a score_mod may depend on the query and key positions.

To add a kind, write a class in this package and a test. In ``KINDS`` it must come before every kind of which it is a special
case. If kernels read whole tiles of it, also write a file of macros in ``templates/attention/kinds``.
"""

from __future__ import annotations

import sympy

from .base import FootprintKind, K, Q, Reduction, TiledKind
from .diagonals import Antidiagonal, Diagonal
from .images import Image, images_of
from .pair import Pair
from .positions import Column, Row, Scalar

__all__ = [
    "COLUMN",
    "DIAGONAL",
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
    "named",
    "recognise",
]

NONE, ROW, COLUMN, DIAGONAL, PAIR = Scalar(), Row(), Column(), Diagonal(), Pair()
#: The kinds in the order in which they are tried on an expression; those of images come before the last. ``pair`` holds for
#: every expression.
KINDS: tuple[FootprintKind, ...] = (NONE, ROW, COLUMN, DIAGONAL, Antidiagonal(), PAIR)


def recognise(expression: sympy.Expr) -> FootprintKind:
    """Return the kind of an exact integer expression in ``Q``, ``K``, their rows in images, and other symbols."""
    *kinds, pair = KINDS
    return next(kind for kind in (*kinds, *images_of(expression), pair) if kind.holds(expression))


def named(text: str) -> FootprintKind:
    """Return the kind whose ``str`` is this text."""
    return next((kind for kind in KINDS if str(kind) == text), None) or Image.named(text)


def join(first: FootprintKind, second: FootprintKind) -> FootprintKind:
    """Return the least kind that covers both."""
    above = (first, second, *first.above(), *second.above(), PAIR)
    return next(kind for kind in above if kind.covers(first) and kind.covers(second))
