"""The kind that depends on both positions in no simpler form that is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
from torch.fx import Graph, Node

from ...core.dynamo_graph import Inserter
from ...core.subgraphs import expression
from ...core.target import TMA_ALIGNMENT, Target
from ...torch_api.ir import rows_are_aligned
from ...torch_api.lowering import V
from .base import FootprintKind, Reduction, TiledKind

#: Rows of this many elements are aligned, also in half precision.
_UNIT = TMA_ALIGNMENT // 2


def _padded(keys: Any) -> Any:
    """Return the length of a table's rows. A symbolic length is as it is."""
    return -(-keys // _UNIT) * _UNIT if isinstance(keys, int) and keys % _UNIT else keys


class Pair(TiledKind):
    """``t[b, h, q, k]``: an expression that depends on both positions, in no simpler form that is known.

    The rows of a table are padded with their last value so that TMA can move blocks of it, for any number of keys.
    """

    name = "pair"
    reads = "one value for each pair"
    small = False

    def holds(self, polynomial: sympy.Expr) -> bool:
        """Return True, because every expression is of this kind."""
        return True

    def covers(self, other: FootprintKind) -> bool:
        """Return True, because every expression is of this kind."""
        return True

    def alike(self, q: Any, k: Any) -> Any:
        """Return a different number for each pair of positions below 2**16."""
        return q * 2**16 + k

    def axes(self) -> list[str]:
        """There is one element for each query and key."""
        return ["Q", "K"]

    def shape(self, outer: Inserter, queries: Any, keys: Any) -> list[Any]:
        """There is one element for each query and key, in rows of whole units of TMA."""
        return [queries, _padded(keys)]

    def coordinates(self, outer: Inserter, axes: Sequence[Node], queries: Any, keys: Any) -> tuple[Any, Any]:
        """Return the positions along the table."""
        q, k = axes
        return q, k if _padded(keys) is keys else outer.method("clamp", k, max=keys - 1)

    def index(self, inner: Graph, q: Node, k: Node) -> tuple[Node, ...]:
        """Return the query and the key."""
        return q, k

    def readable(self, tensor: Any) -> bool:
        """Return whether TMA can move blocks of it (2 to 4 dims): the rows have consecutive elements and are aligned."""
        return Target.of(tensor.get_device()).tma and rows_are_aligned(tensor, TMA_ALIGNMENT)

    def writable(self, shape: Sequence[Any], itemsize: int) -> bool:
        """Return whether the rows of the gradient are aligned. It has no padding between its rows, as the table may have."""
        return V.graph.sizevars.statically_known_true(sympy.Eq(expression(shape[-1]) * itemsize % TMA_ALIGNMENT, 0))

    def reduction(self, tma: bool, lengths: tuple[Any, Any]) -> Reduction:
        """TMA adds whole tiles; without TMA single elements are added."""
        return Reduction.BLOCK if tma else Reduction.SCATTER
