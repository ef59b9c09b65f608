"""Elements: one number of a tensor as a function of the position (b, h, q, k) of a score, as an expression tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from ...core.fx import HALF
from ...core.terms import canonical_name
from ...torch_api.tracing import real_tensors


def positions_in(index: Any) -> set[sympy.Symbol]:
    """Return the positions in an entry of an index, if that is an expression."""
    return set(index.free_symbols) if isinstance(index, sympy.Expr) else set()


def as_stored(x: Any, dtype: torch.dtype) -> Any:
    """Return a Python number as a tensor of half precision stores it, and anything else as it is.

    A kernel computes in fp32, and its compiler may leave out what rounds to half precision.
    """
    if type(x) not in (int, float) or dtype not in HALF:
        return x
    with real_tensors():
        return torch.tensor(x, dtype=dtype, device="cpu").item()


@dataclass(frozen=True, eq=False)
class Element:
    """The base of all elements. They are compared as objects: ``Lift`` makes one for each node and index."""

    def parts(self) -> Iterator[Element]:
        """Yield the elements from which this one is computed."""
        yield from ()

    def walk(self, indices: bool = True) -> Iterator[Element]:
        """Yield this element and all elements from which it is computed, each once.

        With ``indices=False``, those from which only an index is computed are left out.
        """
        seen, pending = {self}, [self]
        while pending:
            element = pending.pop()
            yield element
            for part in element.parts() if indices or not isinstance(element, Read) else ():
                if part not in seen:
                    seen.add(part)
                    pending.append(part)

    def positions(self) -> set[sympy.Symbol]:
        """Return the positions that this element reads directly or through its parts."""
        return set().union(*(e.own_positions() for e in self.walk()))

    def own_positions(self) -> set[sympy.Symbol]:
        """Return the positions in this element itself, without its parts."""
        return set()


@dataclass(frozen=True, eq=False)
class Score(Element):
    """The product of query and key. dtype: that in which the graph computes it."""

    dtype: torch.dtype


def depends_on_scores(x: Any) -> bool:
    """Return whether an element is computed from the product of query and key."""
    return isinstance(x, Element) and any(isinstance(e, Score) for e in x.walk())


@dataclass(frozen=True, eq=False)
class Position(Element):
    """An integer expression in the positions, as a number of ``dtype``: an element of ``arange``."""

    value: sympy.Expr
    dtype: torch.dtype

    def own_positions(self) -> set[sympy.Symbol]:
        """Return the positions in this element itself, without its parts."""
        return set(self.value.free_symbols)


@dataclass(frozen=True, eq=False)
class Constant(Element):
    """A Python number as a number of ``dtype``: an element of ``full`` or ``zeros``."""

    value: Any
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Read(Element):
    """``node[index]``. An index is an expression in the positions, or another element."""

    node: Node
    index: tuple[Any, ...]

    def parts(self) -> Iterator[Element]:
        """Yield the elements from which this one is computed."""
        yield from (i for i in self.index if isinstance(i, Element))

    def own_positions(self) -> set[sympy.Symbol]:
        """Return the positions in this element itself, without its parts."""
        return set().union(*(positions_in(i) for i in self.index))


@dataclass(frozen=True, eq=False)
class Apply(Element):
    """A function or method of elements and numbers, like the node of which it is an element.

    op: "call_function" or "call_method". dtype: that of the node.
    """

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name of the op, the same for a function, an operator and a method."""
        return canonical_name(self.target if isinstance(self.target, str) else self.target.__name__)

    def parts(self) -> Iterator[Element]:
        """Yield the elements from which this one is computed."""
        yield from (a for a in (*self.args, *self.kwargs.values()) if isinstance(a, Element))
