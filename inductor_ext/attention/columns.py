"""Inner products of rows, ``s + torch.dot(a[b, h, q], c[b, h, k])``, as more columns of the query and the key.

The product of query and key then computes the term, and the product of the gradients its gradients:

    scale * (q . k) + sign * (a . c)  =  scale * ([q, sign * a / scale] . [k, c])

A table of the term would have a number for each score. The columns are rounded to the dtype of the query. In bf16 that
changes nothing where ``1 / scale`` is a power of two, as it is for a head width of 16, 64 or 256; with any other scale such
a query keeps the table. So it does where a row is shared by batch elements or heads, whose gradients are added unrounded,
unless that table is too large. A query in fp16 always keeps it, because the exponents of fp16 are too few: a factor of 8
makes infinity of 10,000, and gradients that are an eighth as large lose digits.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..core.fx import called, dtype_of, fake_tensor
from ..torch_api.sizes import statically_known_true
from .calls import ForwardCall
from .footprints import Footprint
from .kinds import COLUMN, ROW, FootprintKind
from .reductions import factors
from .row_lookups import LARGEST_TABLE
from .tables import Tables

#: The widest query and key for which there are tiles.
WIDEST = 256
#: Multiplied by more than the second or less than the first, rows might become infinite or lose their digits.
FACTORS = 2.0**-40, 2.0**40


@dataclass(frozen=True)
class Product:
    """``factor`` times the inner product of two vectors of ``width`` elements: nodes of a score_mod."""

    of_query: Node
    of_key: Node
    factor: float
    width: int


def product(term: Node, sign: int) -> Product | None:
    """Return the product that a signed term of a score_mod is, perhaps times a number, or None for other terms."""
    factor = float(sign)
    if called(term) == "mul" and len(term.args) == 2:
        numbers = [x for x in term.args if isinstance(x, (int, float))]
        nodes = [x for x in term.args if isinstance(x, Node)]
        if len(numbers) == len(nodes) == 1:
            (term,), factor = nodes, factor * numbers[0]
    vectors = factors(term)
    if vectors is None or factor == 0 or not math.isfinite(factor):
        return None
    width, other = (fake_tensor(v).shape[0] for v in vectors)
    known = isinstance(width, int) and isinstance(other, int)
    return Product(*vectors, factor, width) if known and width == other else None


@dataclass
class Columns:
    """The columns that are appended to the query and the key of one call.

    call: its operands are nodes of the outer graph. footprints: those of the nodes of the score_mod.
    """

    call: ForwardCall
    tables: Tables
    footprints: dict[Node, Footprint]

    def takes(self, products: Sequence[Product]) -> bool:
        """Return whether these products together may become columns."""
        query, key = fake_tensor(self.call.query), fake_tensor(self.call.key)
        alike = all(statically_known_true(m == n) for m, n in zip(query.shape[:2], key.shape[:2], strict=True))
        width = query.shape[3] + sum(p.width for p in products)
        scalable = isinstance(self.call.scale, (int, float)) and self.call.scale != 0
        fits = alike and scalable and isinstance(width, int) and width <= WIDEST
        return fits and all(map(self._is_exact, products))

    def _is_exact(self, product: Product) -> bool:
        dtype = fake_tensor(self.call.query).dtype
        vectors = product.of_query, product.of_key
        found = [self.footprints.get(v) for v in vectors]
        if any(f is None or f.score or f.unknown for f in found):
            return False
        factor = product.factor / self.call.scale
        if not FACTORS[0] <= abs(factor) <= FACTORS[1]:
            return False
        if any(torch.promote_types(dtype_of(v), dtype) is not dtype for v in vectors):
            return False
        if dtype is torch.float16:
            return False
        if dtype is not torch.bfloat16:
            return True
        of_powers_of_two = abs(math.frexp(factor)[0]) == 0.5
        elements = self.tables.elements(found[0].join(found[1]))
        too_large = elements is None or elements > LARGEST_TABLE
        return of_powers_of_two and (too_large or not any(self._shared(f) for f in found))

    def _shared(self, footprint: Footprint) -> bool:
        """Return whether a row may be that of several batch elements or heads."""
        batch, heads = fake_tensor(self.call.query).shape[:2]
        alone = [used or statically_known_true(n == 1) for used, n in ((footprint.batch, batch), (footprint.head, heads))]
        return not all(alone)

    def appended(self, products: Sequence[Product]) -> tuple[Node, Node]:
        """Return the query and the key with columns for the products."""
        of_query, of_key = [], []
        for p in products:
            rows = self._rows(p.of_query, ROW, self.call.query)
            of_query.append(self.tables.outer.function(operator.mul, rows, p.factor / self.call.scale))
            of_key.append(self._rows(p.of_key, COLUMN, self.call.key))
        return self._joined(self.call.query, of_query), self._joined(self.call.key, of_key)

    def _rows(self, vector: Node, kind: FootprintKind, like: Node) -> Node:
        """Compute a vector of the score_mod for all b and h, and all q or k: [B, H, L, width], in the dtype of ``like``."""
        rows = self.tables.rows(vector, Footprint(batch=True, head=True, kind=kind))
        return self.tables.outer.method("to", rows, fake_tensor(like).dtype)

    def _joined(self, tensor: Node, columns: Sequence[Node]) -> Node:
        """Append columns [B, H, L, ...] to a tensor, and keep the order of its dims in memory, which the result inherits."""
        order = _outermost_first(fake_tensor(tensor).stride())
        method = self.tables.outer.method
        pieces = [method("permute", x, order) for x in (tensor, *columns)]
        whole = self.tables.outer.function(torch.cat, pieces, order.index(3))
        return method("permute", whole, [order.index(d) for d in range(4)])


def _outermost_first(strides: Sequence[Any]) -> list[int]:
    """Return the dims by descending strides. Dims whose symbolic strides cannot be compared stay as they are."""

    def compare(i: int, j: int) -> int:
        return statically_known_true(strides[i] < strides[j]) - statically_known_true(strides[i] > strides[j])

    return sorted(range(len(strides)), key=functools.cmp_to_key(compare))
