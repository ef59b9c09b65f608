"""Kinds that depend on one position or on none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
from torch.fx import Graph, Node

from ...core.dynamo_graph import Inserter
from .base import FootprintKind, K, Q


class Scalar(FootprintKind):
    """``t[b, h]``: an expression that depends on neither the query nor the key."""

    name = "none"
    reads = "one value for all pairs"

    def holds(self, polynomial: sympy.Expr) -> bool:
        """Return whether neither position is in the expression."""
        return polynomial.free_symbols.isdisjoint((Q, K))

    def alike(self, q: Any, k: Any) -> Any:
        """Return the same number for all positions."""
        return 0 * q + 0 * k

    def axes(self) -> list[str]:
        """There are no axes."""
        return []

    def shape(self, outer: Inserter, queries: Any, keys: Any) -> list[Any]:
        """There are no axes."""
        return []

    def coordinates(self, outer: Inserter, axes: Sequence[Node], queries: Any, keys: Any) -> tuple[Any, Any]:
        """Return None for both, because any query and any key can be used."""
        return None, None

    def index(self, inner: Graph, q: Node, k: Node) -> tuple[Node, ...]:
        """There are no axes."""
        return ()


class Row(FootprintKind):
    """``t[b, h, q]``: an expression that depends on the query only."""

    name = "row"
    reads = "one value for each query"

    def holds(self, polynomial: sympy.Expr) -> bool:
        """Return whether the key is not in the expression."""
        return K not in polynomial.free_symbols

    def alike(self, q: Any, k: Any) -> Any:
        """Return the query."""
        return q + 0 * k

    def axes(self) -> list[str]:
        """There is one element for each query."""
        return ["Q"]

    def shape(self, outer: Inserter, queries: Any, keys: Any) -> list[Any]:
        """There is one element for each query."""
        return [queries]

    def coordinates(self, outer: Inserter, axes: Sequence[Node], queries: Any, keys: Any) -> tuple[Any, Any]:
        """Return the position along the table as the query."""
        return axes[0], None

    def index(self, inner: Graph, q: Node, k: Node) -> tuple[Node, ...]:
        """Return the query."""
        return (q,)


class Column(FootprintKind):
    """``t[b, h, k]``: an expression that depends on the key only."""

    name = "column"
    reads = "one value for each key"

    def holds(self, polynomial: sympy.Expr) -> bool:
        """Return whether the query is not in the expression."""
        return Q not in polynomial.free_symbols

    def alike(self, q: Any, k: Any) -> Any:
        """Return the key."""
        return 0 * q + k

    def axes(self) -> list[str]:
        """There is one element for each key."""
        return ["K"]

    def shape(self, outer: Inserter, queries: Any, keys: Any) -> list[Any]:
        """There is one element for each key."""
        return [keys]

    def coordinates(self, outer: Inserter, axes: Sequence[Node], queries: Any, keys: Any) -> tuple[Any, Any]:
        """Return the position along the table as the key."""
        return None, axes[0]

    def index(self, inner: Graph, q: Node, k: Node) -> tuple[Node, ...]:
        """Return the key."""
        return (k,)
