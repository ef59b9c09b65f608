"""Reads a tensor of Dynamo's graph as the element of a sequence at one time: ``x[:, t]``, ``exp(x[:, t]) * w``, ...

A Python loop over time is unrolled in the graph, so that each time has nodes of its own. Two nodes are elements of one
sequence if they are the same expression of slices at their times and of tensors that are the same for all times. The whole
sequence [T, ...] is then that expression of the sliced tensors themselves. It is computed elsewhere in the graph, so nothing
is an element whose memory is written later, or that is computed under ``no_grad`` or in a region of autocast.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from ..core.dynamo_graph import Inserter
from ..core.fx import full_index, indices_of, same_sizes, shape_of, value_of
from ..core.purity import changes_in_place
from ..core.terms import calls_torch, is_tensor, op
from ..core.writes import VIEWS, Writes

#: Ops that are computed element by element, of tensors and numbers.
POINTWISE = {"mul", "add", "sub", "div", "neg", "exp", "log", "sqrt", "square", "abs", "sigmoid", "tanh", "relu", "silu"}
CASTS = {"to", "type", "float", "double", "half", "bfloat16"}
#: How deep an expression of elements may be.
DEEPEST = 30


@dataclass(frozen=True)
class Element:
    """An element of the sequence with a number, at a time; or a tensor that is the same at all times (time is None)."""

    sequence: int
    time: int | None


@dataclass(frozen=True)
class _Call:
    """An op of elements. target: a function, or the name of a method. operands: the sequences of its elements, and ranks.

    The nodes among the arguments may be erased by now.
    """

    target: Callable[..., Any] | str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: dict[Node, tuple[int, int]]


@dataclass(frozen=True)
class _Sequence:
    """Where a sequence comes from: the slices of ``base`` along ``dim``; ``base`` itself, at all times; a call; or a loop.

    bases, states: the tensors, and the sequences of a loop's states, from which it is computed.
    """

    bases: frozenset[Node]
    states: frozenset[int] = frozenset()
    base: Node | None = None
    dim: int | None = None
    call: _Call | None = None
    depth: int = 0


class Elements:
    """Finds the sequences of a graph, and gives each a number. scans: the tensor of all states of a loop, by number."""

    def __init__(self, writes: Writes) -> None:
        self.writes = writes
        self.scans: dict[int, Node] = {}
        self._known: dict[Node, Element] = {}
        self._numbers: dict[Hashable, int] = {}
        self._sequences: list[_Sequence] = []
        self._replaced: dict[Node, Node] = {}

    def of(self, node: Node) -> Element:
        """Read a tensor as an element."""
        if node not in self._known:
            self._known[node] = self._slice(node) or self._computed(node) or self._same(node)
        return self._known[node]

    def states(self, times: dict[Node, int]) -> int:
        """Make a sequence of the states of a loop, by their times, and return its number."""
        number = len(self._sequences)
        self._sequences.append(_Sequence(frozenset(), frozenset([number])))
        self._known.update({node: Element(number, time) for node, time in times.items()})
        return number

    def forget(self, nodes: Iterable[Node]) -> None:
        """Read these nodes anew."""
        for node in nodes:
            self._known.pop(node, None)

    def replaced(self, old: Node, new: Node) -> None:
        """Say that a tensor has taken the place of another one."""
        self._replaced[old] = new

    def bases(self, sequence: int) -> set[Node]:
        """The tensors from which the elements of a sequence are computed, but for the states of a loop."""
        return set(self._sequences[sequence].bases)

    def states_in(self, sequence: int) -> frozenset[int]:
        """The sequences of states from which the elements of a sequence are computed."""
        return self._sequences[sequence].states

    def now(self, node: Node) -> Node:
        """Return the node that has taken the place of a node, or the node itself."""
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def whole(self, sequence: int, times: range, insert: Inserter, made: dict[int, Node] | None = None) -> Node:
        """Insert the elements of a sequence at ``times`` as one tensor [T, ...]; of what has no time, the tensor itself.

        made: what has been inserted already.
        """
        made = {} if made is None else made
        if sequence not in made:
            made[sequence] = self._whole(sequence, times, insert, made)
        return made[sequence]

    def aligned(
        self, sequence: int, own_rank: int, rank: int, times: range, insert: Inserter, made: dict[int, Node] | None = None
    ) -> Node:
        """The whole of a sequence, with dims behind the first that broadcast as those of its elements do."""
        whole, known = self.whole(sequence, times, insert, made), self._sequences[sequence]
        if known.base is None or known.dim is not None:
            for _ in range(rank - own_rank):
                whole = insert.method("unsqueeze", whole, 1)
        return whole

    def _whole(self, sequence: int, times: range, insert: Inserter, made: dict[int, Node]) -> Node:
        known = self._sequences[sequence]
        if sequence in known.states:
            return self.scans[sequence]
        if known.call is None:
            base = self.now(known.base)
            if known.dim is None:
                return base
            moved = insert.method("movedim", base, known.dim, 0) if known.dim else base
            partial = len(times) != shape_of(moved)[0]
            return insert.method("narrow", moved, 0, times.start, len(times)) if partial else moved
        operands = known.call.operands
        rank = max(rank for _, rank in operands.values())
        wholes = {x: self.aligned(n, own, rank, times, insert, made) for x, (n, own) in operands.items()}
        args, kwargs = map_arg((known.call.args, known.call.kwargs), wholes.__getitem__)
        call = insert.method if isinstance(known.call.target, str) else insert.function
        return call(known.call.target, *args, **kwargs)

    def _new(self, key: Hashable, sequence: _Sequence, time: int | None) -> Element:
        if key not in self._numbers:
            self._numbers[key] = len(self._sequences)
            self._sequences.append(sequence)
        return Element(self._numbers[key], time)

    def _is_fixed(self, node: Node) -> bool:
        """Whether a tensor has the same value wherever it is computed after its operands, and the same gradient."""
        return node not in self.writes.in_other_modes and not self.writes.after(node)

    def _slice(self, node: Node) -> Element | None:
        found = slice_of(node)
        if found is None or not self._is_fixed(node):
            return None
        base, dim, time = found
        return self._new(("slices", base, dim), _Sequence(frozenset([base]), base=base, dim=dim), time)

    def _computed(self, node: Node) -> Element | None:
        """An expression of elements, at least one of which has a time, and none of which has another."""
        if not is_pointwise(node) or not self._is_fixed(node):
            return None
        elements = {x: self.of(x) for x in node.all_input_nodes}
        times = {e.time for e in elements.values() if e.time is not None}
        parts = [self._sequences[e.sequence] for e in elements.values()]
        depth = 1 + max(part.depth for part in parts)
        if len(times) != 1 or depth > DEEPEST:
            return None
        arguments = map_arg((node.args, node.kwargs), lambda x: ("element", elements[x].sequence))
        operands = {x: (e.sequence, len(shape_of(x))) for x, e in elements.items()}
        bases, states = (frozenset().union(*(getattr(p, name) for p in parts)) for name in ("bases", "states"))
        call = _Call(node.target, node.args, node.kwargs, operands)
        return self._new(
            (node.op, node.target, str(arguments)), _Sequence(bases, states, call=call, depth=depth), times.pop()
        )

    def _same(self, node: Node) -> Element:
        """A tensor without a time. Each time may compute it anew, of tensors without a time that nothing ever changes."""
        alone = _Sequence(frozenset([node]), base=node)
        operands = node.all_input_nodes
        computed = op(node) in POINTWISE | CASTS | VIEWS and calls_torch(node) and not changes_in_place(node)
        if not computed or not operands or not all(is_tensor(x) and self.of(x).time is None for x in operands):
            return self._new(node, alone, None)
        if not self._is_fixed(node) or any(self.writes.unknown(x) or self.writes.to(x) for x in (node, *operands)):
            return self._new(node, alone, None)
        arguments = map_arg((node.args, node.kwargs), lambda x: ("element", self.of(x).sequence))
        return self._new((node.op, node.target, str(arguments)), alone, None)


def is_pointwise(node: Node) -> bool:
    """Whether an op is computed element by element, on one device, and of tensors and numbers."""
    if op(node) not in POINTWISE | CASTS or not is_tensor(node) or not calls_torch(node) or changes_in_place(node):
        return False
    if any(isinstance(x, torch.memory_format) for x in (*node.args, *node.kwargs.values())):
        return False
    operands = node.all_input_nodes
    here = all(is_tensor(x) and value_of(x).device == value_of(node).device for x in operands)
    return bool(operands) and here and (len(operands) == 1 or op(node) in POINTWISE)


def slice_of(node: Node) -> tuple[Node, int, int] | None:
    """Return (x, dim, t) if a node is ``x`` at index t along a dim, with all other dims whole."""
    if op(node) == "select" and calls_torch(node) and len(node.args) == 3 and is_tensor(node.args[0]):
        return _at(*node.args)
    if node.target is not operator.getitem or not is_tensor(node.args[0]):
        return None
    return _place(node)


def assigned(node: Node) -> tuple[Node, int, int, Node] | None:
    """Return (x, dim, t, value) if a node is the assignment ``x[:, t] = value`` of a tensor of the slice's shape."""
    if node.target is not operator.setitem or not all(map(is_tensor, (node.args[0], node.args[2]))):
        return None
    found = _place(node)
    if found is None:
        return None
    base, dim, time = found
    shape, value = shape_of(base), node.args[2]
    return (base, dim, time, value) if same_sizes(shape_of(value), (*shape[:dim], *shape[dim + 1 :])) else None


def _place(node: Node) -> tuple[Node, int, int] | None:
    """Return (x, dim, t) if the brackets of ``x[...]`` hold one number, and for all other dims a colon."""
    base = node.args[0]
    entries = full_index(indices_of(node), len(shape_of(base)))
    numbers = [d for d, e in enumerate(entries) if isinstance(e, int) and not isinstance(e, bool)]
    whole = [d for d, e in enumerate(entries) if isinstance(e, slice) and e == slice(None)]
    if len(numbers) != 1 or not len(numbers) + len(whole) == len(entries) == len(shape_of(base)):
        return None
    return _at(base, numbers[0], entries[numbers[0]])


def _at(base: Node, dim: Any, time: Any) -> tuple[Node, int, int] | None:
    sizes = shape_of(base)
    if not isinstance(dim, int) or not isinstance(time, int) or not isinstance(sizes[dim], int):
        return None
    return base, dim % len(sizes), time % sizes[dim]
