"""Kinds that depend on one position or on none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
from torch.fx import Graph, Node

from ...core.dynamo_graph import Inserter
from .base import FootprintKind, K, Q


class Scalar(FootprintKind):
    """``t[b, h]``: neither the query nor the key."""

    name = "none"
    reads = "one value for all pairs"

    def holds(self, polynomial: sympy.Expr) -> bool:
        """Neither position is in the expression."""
        return polynomial.free_symbols.isdisjoint((Q, K))

    def alike(self, q: Any, k: Any) -> Any:
        """The same everywhere."""
        return 0 * q + 0 * k

    def axes(self) -> list[str]:
        """No axes."""
        return []

    def shape(self, outer: Inserter, queries: Any, keys: Any) -> list[Any]:
        """No axes."""
        return []

    def coordinates(self, outer: Inserter, axes: Sequence[Node], queries: Any, keys: Any) -> tuple[Any, Any]:
        """Any query and any key will do."""
        return None, None

    def index(self, inner: Graph, q: Node, k: Node) -> tuple[Node, ...]:
        """No axes."""
        return ()


class Row(FootprintKind):
    """``t[b, h, q]``: the query only."""

    name = "row"
    reads = "one value a query"

    def holds(self, polynomial: sympy.Expr) -> bool:
        """The key is not in the expression."""
        return K not in polynomial.free_symbols

    def alike(self, q: Any, k: Any) -> Any:
        """The query."""
        return q + 0 * k

    def axes(self) -> list[str]:
        """One element a query."""
        return ["Q"]

    def shape(self, outer: Inserter, queries: Any, keys: Any) -> list[Any]:
        """One element a query."""
        return [queries]

    def coordinates(self, outer: Inserter, axes: Sequence[Node], queries: Any, keys: Any) -> tuple[Any, Any]:
        """The query is the position along the table."""
        return axes[0], None

    def index(self, inner: Graph, q: Node, k: Node) -> tuple[Node, ...]:
        """The query."""
        return (q,)


class Column(FootprintKind):
    """``t[b, h, k]``: the key only."""

    name = "column"
    reads = "one value a key"

    def holds(self, polynomial: sympy.Expr) -> bool:
        """The query is not in the expression."""
        return Q not in polynomial.free_symbols

    def alike(self, q: Any, k: Any) -> Any:
        """The key."""
        return 0 * q + k

    def axes(self) -> list[str]:
        """One element a key."""
        return ["K"]

    def shape(self, outer: Inserter, queries: Any, keys: Any) -> list[Any]:
        """One element a key."""
        return [keys]

    def coordinates(self, outer: Inserter, axes: Sequence[Node], queries: Any, keys: Any) -> tuple[Any, Any]:
        """The key is the position along the table."""
        return None, axes[0]

    def index(self, inner: Graph, q: Node, k: Node) -> tuple[Node, ...]:
        """The key."""
        return (k,)
