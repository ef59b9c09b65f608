"""What a footprint kind is: one form in which an expression depends on the query and key positions."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import sympy
import torch
from torch.fx import Graph, Node

from ...core.dynamo_graph import Inserter
from ...torch_api.ir import full

#: The query and key positions in the expressions of an analysis.
Q, K = sympy.symbols("q k", integer=True)


class FootprintKind:
    """One kind: how it is recognised, where a table of it lies in memory, and how a kernel reads that table.

    Kinds form a lattice: ``none`` is below every other one, ``pair`` above, and the rest have nothing in common but these. A
    table of a kind is made outside the kernel by ordinary ops, one element for each value that an expression of the kind can
    have, and is read inside at ``index(q, k)``.

    name: in reports and in what hoisting hands to the lowering. reads: how many values a kernel reads of a table, as reports
    say it. expensive: whether a table costs more than cheap arithmetic on what a kernel reads anyway.
    """

    name: ClassVar[str]
    reads: ClassVar[str]
    expensive: ClassVar[bool] = False

    def holds(self, polynomial: sympy.Expr) -> bool:
        """Whether an exact integer expression in ``Q``, ``K`` and other symbols depends on them in this form only."""
        raise NotImplementedError

    def alike(self, q: Any, k: Any) -> Any:
        """A number, of two integers or tensors of them, that is equal only where expressions of this kind are."""
        raise NotImplementedError

    def axes(self) -> list[str]:
        """The axes of a table along the sequence, as a report names them."""
        raise NotImplementedError

    def shape(self, outer: Inserter, queries: Any, keys: Any) -> list[Any]:
        """The lengths of these axes; ``queries`` and ``keys`` are ints, or nodes of the outer graph."""
        raise NotImplementedError

    def coordinates(self, outer: Inserter, axes: Sequence[Node], queries: Any, keys: Any) -> tuple[Any, Any]:
        """A query and a key for which an expression has the value of each element of a table; None for one that has no say.

        ``axes`` are the positions along the table's axes.
        """
        raise NotImplementedError

    def index(self, inner: Graph, q: Node, k: Node) -> tuple[Node, ...]:
        """The indices along these axes by which a score_mod reads a table."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.name


class Reduction(enum.Enum):
    """How a contribution to the gradient of a captured tensor reaches memory; the value is what the report says."""

    STORE = "stored by its one writer"
    STRIP = "tiles added to a strip"
    DIAGONAL = "summed along the diagonals of a tile"
    BLOCK = "tiles added"
    SUM = "summed in registers"
    SCATTER = "one fp32 add a score"
    PARTIAL = "partial sums in a fixed order"


class TiledKind(FootprintKind):
    """A kind whose tables a kernel reads, and whose gradients it adds, a tile at a time.

    Its macros are in ``templates/attention/flex_tables.jinja``. as_vector: whether a tile reads one vector of the table,
    which is spread over the tile, and not as many elements as it has. ``lengths`` are the numbers of queries and keys.
    """

    expensive = True
    as_vector: ClassVar[bool] = False

    def readable(self, tensor: Any) -> bool:
        """Whether the kernel can read this table (an IR node) by tile; if not, it reads it an element at a time."""
        return True

    def reduction(self, tma: bool, lengths: tuple[Any, Any]) -> Reduction:
        """How contributions with several writers are added; ``tma``: whether whole tiles can be."""
        raise NotImplementedError

    def buffer(self, reduction: Reduction, size: Sequence[Any], lengths: tuple[Any, Any], device: torch.device) -> Any:
        """What the kernel adds to, zeros, for a table of ``size``."""
        return full(size, 0, torch.float32, device)

    def folded(self, buffer: Any, reduction: Reduction, size: Sequence[Any], lengths: tuple[Any, Any]) -> Any:
        """The gradient of ``size`` that a buffer adds up to."""
        return buffer

    def workspace(self, extents: Sequence[Any], device: torch.device, tilings: Sequence[dict[str, Any]]) -> Any:
        """Where every program writes its totals if nothing may be added by atomics, for a kind that is read as vectors.

        ``extents`` are the lengths of b, h, q and k, ``tilings`` the template options of which one will be chosen.
        """
        raise NotImplementedError

    def total(self, workspace: Any, axes: Sequence[bool]) -> Any:
        """A workspace as the gradient of a table that depends on ``axes`` of (b, h, q, k)."""
        raise NotImplementedError


def arithmetic(outer: Inserter, op: Callable[..., Any], x: Any, y: Any) -> Any:
    """``op(x, y)`` of lengths, each an int or a node of the outer graph."""
    return op(x, y) if isinstance(x, int) and isinstance(y, int) else outer.function(op, x, y)
