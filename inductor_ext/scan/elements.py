"""Reads a tensor of Dynamo's graph as the element of a sequence at one time: ``x[:, t]``, ``exp(x[:, t, None]) * w``, ...

A Python loop over time is unrolled in the graph, so that each time has nodes of its own. Two nodes are elements of one
sequence if they are the same expression of slices at their times and of tensors that are the same for all times. The whole
sequence [T, ...] is then that expression of the sliced tensors themselves. It is computed elsewhere in the graph, so nothing
is an element whose memory is written later, or that is computed under ``no_grad`` or in a region of autocast.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from ..core.dynamo_graph import Inserter
from ..core.fx import full_index, indices_of, same_sizes, shape_of
from ..core.purity import changes_in_place
from ..core.terms import calls_torch, is_tensor, op
from ..core.writes import VIEWS, Writes
from .over_time import Call, over_time

#: How deep an expression of elements may be.
DEEPEST = 30


@dataclass(frozen=True)
class Element:
    """An element of the sequence with a number, at a time; or a tensor that is the same at all times (time is None)."""

    sequence: int
    time: int | None


@dataclass(frozen=True)
class _Sequence:
    """Where a sequence comes from: the slices of ``base`` along ``dim``; ``base`` itself, at all times; a call; or a loop.

    new_dims: dims of size 1 that each slice has besides. operands: the sequences of the call's operands.
    bases, states: the tensors, and the sequences of a loop's states, from which it is computed.
    """

    bases: frozenset[Node]
    states: frozenset[int] = frozenset()
    base: Node | None = None
    dim: int | None = None
    new_dims: tuple[int, ...] = ()
    call: Call | None = None
    operands: dict[Node, int] = field(default_factory=dict)
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

    def read_anew(self, nodes: Iterable[Node]) -> None:
        """Read these nodes anew, in the graph's order, so that each is read from a few operands that are known."""
        nodes = sorted(nodes)
        for node in nodes:
            self._known.pop(node, None)
        for node in nodes:
            self.of(node)

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
        self, sequence: int, missing: int, times: range, insert: Inserter, made: dict[int, Node] | None = None
    ) -> Node:
        """The whole of a sequence, with ``missing`` dims behind the first, so that it broadcasts as its elements do."""
        whole, known = self.whole(sequence, times, insert, made), self._sequences[sequence]
        if known.base is None or known.dim is not None:
            for _ in range(missing):
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
            whole = insert.method("movedim", base, known.dim, 0) if known.dim else base
            if len(times) != shape_of(whole)[0]:
                whole = insert.method("narrow", whole, 0, times.start, len(times))
            for dim in known.new_dims:
                whole = insert.method("unsqueeze", whole, dim + 1)
            return whole
        missing = known.call.missing
        wholes = {x: self.aligned(n, missing[x], times, insert, made) for x, n in known.operands.items()}
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
        base, dim, time, new = found
        if self.states_in(self.of(base).sequence):
            # Of a tensor of one time, which has no times of its own.
            return None
        return self._new(("slices", base, dim, new), _Sequence(frozenset([base]), base=base, dim=dim, new_dims=new), time)

    def _computed(self, node: Node) -> Element | None:
        """An expression of elements, at least one of which has a time, and none of which has another."""
        call = over_time(node, lambda x: self.of(x).time is not None)
        if call is None or not self._is_fixed(node):
            return None
        elements = {x: self.of(x) for x in node.all_input_nodes}
        times = {e.time for e in elements.values() if e.time is not None}
        parts = [self._sequences[e.sequence] for e in elements.values()]
        depth = 1 + max(part.depth for part in parts)
        if len(times) != 1 or depth > DEEPEST:
            return None
        arguments = map_arg((call.args, call.kwargs), lambda x: ("element", elements[x].sequence))
        operands = {x: e.sequence for x, e in elements.items()}
        bases, states = (frozenset().union(*(getattr(p, name) for p in parts)) for name in ("bases", "states"))
        sequence = _Sequence(bases, states, call=call, operands=operands, depth=depth)
        return self._new((call.target, str(arguments)), sequence, times.pop())

    def _same(self, node: Node) -> Element:
        """A tensor without a time. Each time may compute it anew, of tensors without a time that nothing ever changes."""
        alone = _Sequence(frozenset([node]), base=node)
        operands = node.all_input_nodes
        view = op(node) in VIEWS and calls_torch(node) and not changes_in_place(node)
        computed = view or over_time(node, lambda _: False) is not None
        if not computed or not operands or not all(is_tensor(x) and self.of(x).time is None for x in operands):
            return self._new(node, alone, None)
        if not self._is_fixed(node) or any(self.writes.unknown(x) or self.writes.to(x) for x in (node, *operands)):
            return self._new(node, alone, None)
        arguments = map_arg((node.args, node.kwargs), lambda x: ("element", self.of(x).sequence))
        return self._new((node.op, node.target, str(arguments)), alone, None)


def slice_of(node: Node) -> tuple[Node, int, int, tuple[int, ...]] | None:
    """Return (x, dim, t, new dims) if a node is ``x`` at index t along a dim, with all other dims whole.

    new dims: where the slice has dims of size 1 for a None in the brackets.
    """
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
    if found is None or found[3]:
        return None
    base, dim, time, _ = found
    shape, value = shape_of(base), node.args[2]
    return (base, dim, time, value) if same_sizes(shape_of(value), (*shape[:dim], *shape[dim + 1 :])) else None


def _place(node: Node) -> tuple[Node, int, int, tuple[int, ...]] | None:
    """Return (x, dim, t, new dims) if the brackets of ``x[...]`` hold one number, colons for all other dims, and None."""
    base = node.args[0]
    entries = full_index(indices_of(node), len(shape_of(base)))
    own = [e for e in entries if e is not None]
    numbers = [d for d, e in enumerate(own) if isinstance(e, int) and not isinstance(e, bool)]
    whole = [d for d, e in enumerate(own) if isinstance(e, slice) and e == slice(None)]
    if len(numbers) != 1 or not len(numbers) + len(whole) == len(own) == len(shape_of(base)):
        return None
    kept = [e for e in entries if not isinstance(e, int)]
    return _at(base, numbers[0], own[numbers[0]], tuple(d for d, e in enumerate(kept) if e is None))


def _at(base: Node, dim: Any, time: Any, new_dims: tuple[int, ...] = ()) -> tuple[Node, int, int, tuple[int, ...]] | None:
    sizes = shape_of(base)
    if not isinstance(dim, int) or not isinstance(time, int) or not isinstance(sizes[dim], int):
        return None
    return base, dim % len(sizes), time % sizes[dim], new_dims
