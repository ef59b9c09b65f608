"""The base classes of footprint kinds. A kind is one form in which an expression depends on the positions q and k."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import sympy
import torch
from torch.fx import Graph, Node

from ...core.dynamo_graph import Inserter
from ...torch_api.ir import full

#: The longest tile of a kind that has no limit.
ANY_LENGTH = 2**31
#: The query and key positions in the expressions of an analysis.
Q, K = sympy.symbols("q k", integer=True)


class FootprintKind:
    """One kind: how it is recognised, how its tables lie in memory, and how a kernel reads them.

    Kinds form a lattice: ``none`` is below every other kind, ``pair`` is above every other kind, and the others are not
    comparable. Ordinary ops make a table of a kind outside the kernel. It has one element for each value that an expression
    of the kind can have, and is read inside the kernel at ``index(q, k)``.

    name: the name of its macros. Kinds with one name differ in ``str``, the name in reports and in the descriptor that
    hoisting passes to the lowering. reads: the text for reports that says how many values of a table a kernel reads.
    expensive: whether a table costs more than cheap arithmetic on values that a kernel reads anyway. small: whether a table
    is small, whatever the lengths are.
    """

    name: ClassVar[str]
    reads: ClassVar[str]
    expensive: ClassVar[bool] = False
    small: bool = True

    def holds(self, polynomial: sympy.Expr) -> bool:
        """Return whether an exact integer expression in ``Q``, ``K`` and other symbols has this form."""
        raise NotImplementedError

    def covers(self, other: FootprintKind) -> bool:
        """Return whether every expression of the other kind is of this kind too."""
        return other is self or other.name == "none"

    def above(self) -> Sequence[FootprintKind]:
        """Return the kinds that cover this one, the least first, without ``pair``."""
        return ()

    def alike(self, q: Any, k: Any) -> Any:
        """Return a number that is equal for two pairs (q, k) only if every expression of this kind is.

        ``q`` and ``k`` are integers or tensors of integers.
        """
        raise NotImplementedError

    def axes(self) -> list[str]:
        """Return the names of the axes of a table along the sequence, for reports."""
        raise NotImplementedError

    def shape(self, outer: Inserter, queries: Any, keys: Any) -> list[Any]:
        """Return the lengths of these axes. ``queries`` and ``keys`` are ints, or nodes of the outer graph."""
        raise NotImplementedError

    def coordinates(self, outer: Inserter, axes: Sequence[Node], queries: Any, keys: Any) -> tuple[Any, Any]:
        """Return a query and a key at which an expression has the value of each element of a table.

        One of them is None if the expression does not depend on it. ``axes`` are the positions along the table's axes.
        """
        raise NotImplementedError

    def index(self, inner: Graph, q: Node, k: Node) -> tuple[Node, ...]:
        """Return the indices along these axes at which a score_mod reads a table."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.name


class Reduction(enum.Enum):
    """How a contribution to the gradient of a captured tensor goes to memory. The value is the text in reports."""

    STORE = "stored by its one writer"
    STRIP = "tiles added to a strip"
    DIAGONAL = "summed along the diagonals of a tile"
    BLOCK = "tiles added to the gradient"
    SUM = "summed in registers"
    BY_ENTRY = "summed for each key and each entry of the query"
    SCATTER = "one fp32 add for each score, or for those of a tile that share an element"
    PARTIAL = "partial sums in a fixed order"
    OVER_BATCH = "summed over the batch by programs of its own"


class TiledKind(FootprintKind):
    """A kind for which a kernel reads whole tiles of a table, and adds whole tiles to its gradient.

    Its macros are in ``templates/attention/kinds``. as_vector: whether a tile reads one vector of the table, which is then
    spread over the tile, instead of one element for each element of the tile. longest_tile: the largest number of queries,
    and of keys, in a tile, also if the user asks for longer ones. In all methods, ``lengths`` are the numbers of queries and
    keys.
    """

    expensive = True
    as_vector: ClassVar[bool] = False
    longest_tile: int = ANY_LENGTH

    def readable(self, tensor: Any) -> bool:
        """Return whether the kernel can read this table (an IR node) by tile. If not, it reads single elements."""
        return True

    def writable(self, shape: Sequence[Any], itemsize: int) -> bool:
        """Return whether the kernel can add whole tiles to a contiguous gradient of ``shape``. If not, it adds elements.

        ``itemsize``: the bytes of an element of the gradient.
        """
        return True

    def reduction(self, tma: bool, lengths: tuple[Any, Any]) -> Reduction:
        """Return how contributions with several writers are added. ``tma``: whether TMA can add whole tiles."""
        raise NotImplementedError

    def buffer(self, reduction: Reduction, size: Sequence[Any], lengths: tuple[Any, Any], device: torch.device) -> Any:
        """Allocate the buffer of zeros to which the kernel adds, for a table of ``size``."""
        return full(size, 0, torch.float32, device)

    def folded(self, buffer: Any, reduction: Reduction, size: Sequence[Any], lengths: tuple[Any, Any]) -> Any:
        """Reduce the buffer to the gradient of ``size``."""
        return buffer

    def workspace(self, extents: Sequence[Any], device: torch.device, tilings: Sequence[dict[str, Any]]) -> Any:
        """Allocate the workspace for the totals of all programs, if atomics are not allowed and the kind is read as vectors.

        ``extents`` are the lengths of b, h, q and k. ``tilings`` are the template options from which one will be chosen.
        """
        raise NotImplementedError

    def total(self, workspace: Any, axes: Sequence[bool]) -> Any:
        """Sum a workspace to the gradient of a table that depends on ``axes`` of (b, h, q, k)."""
        raise NotImplementedError


def arithmetic(outer: Inserter, op: Callable[..., Any], x: Any, y: Any) -> Any:
    """Compute ``op(x, y)`` for two lengths. Each is an int or a node of the outer graph."""
    return op(x, y) if isinstance(x, int) and isinstance(y, int) else outer.function(op, x, y)
