"""Recognises a linear recurrence in a Python loop over time, and replaces it by a scan.

    for t in range(length):
        h = a[:, t] * h + x[:, t]
        out[:, t] = h.to(out.dtype)          # or outs.append(h), and after the loop torch.stack(outs, 1)

Dynamo unrolls the loop, and its steps would run one after the other. The states h are the scan of the sequences a and x,
whose elements may be expressions (elements.py). What is assembled of elements of one sequence at all times becomes that
sequence. The other states are read from the scan one by one, and if there are many of them, the loop stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from ..core.dynamo_graph import Inserter
from ..core.fx import cone, requires_grad, shape_of, value_of
from ..core.outside import is_returned
from ..core.report import record, user_line
from ..core.terms import arg, binary, calls_torch, is_tensor, op
from ..core.writes import Writes
from ..options import Options
from .associative import runs_triton
from .elements import CASTS, Elements, assigned, is_pointwise
from .recurrence import recurrence

NAME = "time_loops"
#: A shorter loop stays as it is.
FEWEST_STEPS = 8
#: The most states that are read one by one. The gradient of each is a tensor of all times.
MOST_READS = 4
_NEW_TENSORS = {"zeros", "empty", "ones", "full", "zeros_like", "empty_like", "ones_like", "full_like"}
_NEW_TENSORS |= {"new_zeros", "new_empty", "new_ones", "new_full"}


class _NotAScan(Exception):
    """The loop stays as it is."""


@dataclass(frozen=True)
class _Step:
    """``state = a * before + x`` at a time. before: the last state, which may be cast in between."""

    time: int
    state: Node
    a: Node | float
    before: Node
    x: Node
    sequences: tuple[int | float, int]


@dataclass(frozen=True)
class _Assembled:
    """A tensor of elements of one sequence at all times of a loop, which has time at ``dim``.

    result: the tensor. sequence: of the elements. assignments: the nodes that assemble it in place, or none. joined: the
    elements have a dim ``dim`` of their own, along which they are joined. reverse: the last time is first.
    """

    result: Node
    sequence: int
    dim: int
    assignments: tuple[Node, ...] = ()
    joined: bool = False
    reverse: bool = False


def rewrite(gm: GraphModule, options: Options) -> None:
    """Replace, in place, every loop over time that is a linear recurrence."""
    elements = Elements()
    chains = [chain for chain in _chains(gm.graph, elements) if len(chain) >= FEWEST_STEPS]
    writes = Writes(gm.graph) if chains else None
    for chain in chains:
        where = user_line(chain[0].state)
        try:
            _Loop(gm.graph, chain, elements, writes).replace()
        except _NotAScan as why:
            record(NAME, "loop", "stock", str(why), where)
        else:
            record(NAME, "loop", "scan", f"its {len(chain)} steps are a linear recurrence", where)


def _chains(graph: Graph, elements: Elements) -> list[list[_Step]]:
    """Return the longest chains of steps, each at the time after, or before, the last one's."""
    ending: dict[Node, list[list[_Step]]] = {}
    for node in graph.nodes:
        if is_tensor(node):
            # In the graph's order, so that what is read is a few operands, and not all that they are computed from.
            elements.of(node)
        steps = _steps(node, elements)
        longer = [(before, c, s) for s in steps for before in [_uncast(s.before)] for c in ending.get(before, ())]
        followed = next(((before, chain, step) for before, chain, step in longer if _follows(chain, step)), None)
        if followed is not None:
            before, chain, step = followed
            del ending[before]
            chain.append(step)
            ending[node] = [chain]
        elif steps:
            ending[node] = [[step] for step in steps]
    return [chains[0] for chains in ending.values()]


def _steps(node: Node, elements: Elements) -> list[_Step]:
    """Return the ways to read a node as a step."""
    if not (is_tensor(node) and binary(node, "add") and calls_torch(node) and value_of(node).is_floating_point()):
        return []
    found = []
    for product, x in (node.args, node.args[::-1]):
        if not (is_tensor(product) and binary(product, "mul") and calls_torch(product) and is_tensor(x)):
            continue
        added = elements.of(x)
        for a, before in (product.args, product.args[::-1]):
            if added.time is None or not is_tensor(before):
                continue
            if isinstance(a, float | int) and not isinstance(a, bool):
                found.append(_Step(added.time, node, a, before, x, (a, added.sequence)))
            elif is_tensor(a) and elements.of(a).time in (None, added.time):
                found.append(_Step(added.time, node, a, before, x, (elements.of(a).sequence, added.sequence)))
    return found


def _follows(chain: list[_Step], step: _Step) -> bool:
    direction = step.time - chain[-1].time
    straight = len(chain) < 2 or direction == chain[-1].time - chain[-2].time
    return direction in (1, -1) and straight and chain[-1].sequences == step.sequences


def _uncast(node: Node) -> Node:
    while op(node) in CASTS and is_pointwise(node):
        node = node.args[0]
    return node


class _Loop:
    """A loop, and what takes its place."""

    def __init__(self, graph: Graph, chain: list[_Step], elements: Elements, writes: Writes) -> None:
        self.graph, self.chain, self.elements, self.writes = graph, chain, elements, writes
        self.first, self.last = chain[0], chain[-1]
        self.reverse = self.last.time < self.first.time
        self.times = range(min(self.first.time, self.last.time), max(self.first.time, self.last.time) + 1)
        self.states = {step.state: step.time for step in chain}
        numbers = self.first.sequences if isinstance(self.first.a, Node) else self.first.sequences[1:]
        self.inputs = {self.first.before}.union(*map(elements.bases, numbers))
        self.inside = set(cone(*self.states, until=self.inputs)) - self.inputs

    def replace(self) -> None:
        """Replace the loop. Raises _NotAScan."""
        self._check()
        derived = self._derived()
        self.elements.forget(derived)
        number = self.elements.states(self.states)
        assembled = [a for a in self._assembled(derived) if self.elements.depends(a.sequence, number)]
        gone = self.inside | {n for a in assembled for n in (a.assignments or (a.result,))}
        gone |= {n for n in derived if self.elements.depends(self.elements.of(n).sequence, number)}
        read = [state for state in self.states if self._is_read(state, gone, assembled)]
        if len(read) > MOST_READS:
            raise _NotAScan(f"{len(read)} of its states are used one by one")
        self.elements.scanned(number, self._scan())
        for each in assembled:
            self._put_together(each)
        for state in read:
            self._read(state, self.elements.whole(number, self.times, None), gone)
        _erase({n for a in assembled for n in (*a.assignments, a.result)} | gone)

    def _check(self) -> None:
        if not runs_triton([value_of(self.first.state)]):
            raise _NotAScan("Inductor has no scan for this device")
        shapes = {(tuple(shape_of(state)), value_of(state).dtype) for state in self.states}
        if len(shapes) > 1:
            raise _NotAScan("its states differ in shape or dtype")
        if any(state in self.writes.without_gradient for state in self.states):
            raise _NotAScan("it is computed without a gradient")
        if any(self.writes.after(node) for node in self.inside):
            raise _NotAScan("its states or operands are changed in place")
        begin = min(self.inside)
        for x in self.inputs:
            if self.writes.unknown(x) or any(begin < write < self.last.state for write in self.writes.to(x)):
                raise _NotAScan("a tensor that it reads is changed in the loop")

    def _derived(self) -> list[Node]:
        """Return what is computed from the states element by element, in the graph's order, without the states."""
        found: dict[Node, None] = {}
        pending = list(self.states)
        while pending:
            for user in pending.pop().users:
                if user not in found and user not in self.inside and is_pointwise(user):
                    found[user] = None
                    pending.append(user)
        return sorted(found)

    def _assembled(self, derived: Iterable[Node]) -> list[_Assembled]:
        """Return what is assembled of states or of what is derived from them."""
        users = dict.fromkeys(user for node in (*self.states, *derived) for user in node.users)
        tensors = dict.fromkeys(found[0] for user in users if (found := assigned(user)) is not None)
        joined = [self._joined(user) for user in users if op(user) in ("stack", "cat", "concat") and calls_torch(user)]
        return [a for a in (*joined, *map(self._filled, tensors)) if a is not None]

    def _joined(self, node: Node) -> _Assembled | None:
        values, dim = arg(node, 0, "tensors"), arg(node, 1, "dim", 0)
        if not isinstance(values, list | tuple) or not all(map(is_tensor, values)) or self.writes.after(node):
            return None
        found = [self.elements.of(value) for value in values]
        times = [e.time for e in found]
        if len({e.sequence for e in found}) > 1 or times not in ([*self.times], [*reversed(self.times)]):
            return None
        rank = len(shape_of(node))
        return _Assembled(node, found[0].sequence, dim % rank, joined=op(node) != "stack", reverse=times != [*self.times])

    def _filled(self, tensor: Node) -> _Assembled | None:
        """A new tensor, if each of its parts along a dim is assigned once, and nothing else happens to it meanwhile."""
        found = {user: assigned(user) for user in tensor.users if user.args[0] is tensor and assigned(user) is not None}
        places = {(dim, time) for _, dim, time, _ in found.values()}
        dims = {dim for dim, _ in places}
        if op(tensor) not in _NEW_TENSORS or not calls_torch(tensor) or len(dims) != 1 or len(places) != len(found):
            return None
        (dim,) = dims
        parts = {time: self.elements.of(value) for _, _, time, value in found.values()}
        whole = sorted(parts) == [*self.times] == [*range(shape_of(tensor)[dim])]
        same = len({e.sequence for e in parts.values()}) == 1 and all(e.time == time for time, e in parts.items())
        last = max(found)
        alone = all(user in found or user > last for user in tensor.users) and not self.writes.unknown(tensor)
        if not (whole and same and alone and set(self.writes.to(tensor)) == set(found)):
            return None
        (number,) = {e.sequence for e in parts.values()}
        return _Assembled(tensor, number, dim, tuple(sorted(found)))

    def _is_read(self, state: Node, gone: set[Node], assembled: list[_Assembled]) -> bool:
        """Whether a state, or what is derived from it, is used by something that stays."""
        pending, seen = [state], {state}
        while pending:
            for user in pending.pop().users:
                if user not in gone:
                    return True
                if user not in seen and user not in self.states and user not in self.inside and is_pointwise(user):
                    seen.add(user)
                    pending.append(user)
        return False

    def _scan(self) -> Node:
        """Insert the scan where the loop begins."""
        step, shape = self.first, shape_of(self.first.state)
        with self.graph.inserting_before(step.state):
            insert = Inserter(self.graph, step.state)
            x = self.elements.aligned(step.sequences[1], len(shape_of(step.x)), len(shape), self.times, insert)
            a = step.a
            if isinstance(a, Node):
                a = self.elements.aligned(step.sequences[0], len(shape_of(a)), len(shape), self.times, insert)
            dtype, values = (
                value_of(step.state).dtype,
                [value_of(n) if isinstance(n, Node) else n for n in (a, x, step.before)],
            )
            value = lambda: (values[0] * values[2] + values[1]).to(dtype)  # noqa: E731
            return insert.call(recurrence, (a, x, step.before, self.reverse, dtype), value)

    def _put_together(self, assembled: _Assembled) -> None:
        """Insert the sequence in the place of what is assembled of its elements."""
        tensor, after = assembled.result, max(assembled.assignments, default=None)
        with self.graph.inserting_before(tensor if after is None else after.next):
            insert = Inserter(self.graph, tensor if after is None else after)
            whole = self.elements.whole(assembled.sequence, self.times, insert)
            if value_of(whole).dtype != value_of(tensor).dtype:
                whole = insert.method("to", whole, value_of(tensor).dtype)
            if assembled.reverse:
                whole = insert.method("flip", whole, 0)
            whole = insert.method("movedim", whole, 0, assembled.dim)
            if assembled.joined:
                whole = insert.method("flatten", whole, assembled.dim, assembled.dim + 1)
            whole = insert.method("contiguous", whole)
            if requires_grad(whole) and is_returned(tensor):
                whole = insert.function(torch.ops.gradfuse.copied.default, whole)
        self.elements.replaced(tensor, whole)
        tensor.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in assembled.assignments)

    def _read(self, state: Node, whole: Node, gone: set[Node]) -> None:
        """Read a state from the scan. It is a copy, so that the scan is not kept, or changed, for one state."""
        with self.graph.inserting_before(state.next):
            insert = Inserter(self.graph, state)
            own = insert.method("select", whole, 0, self.states[state] - self.times.start)
            own = insert.function(torch.ops.gradfuse.copied.default, own)
        state.replace_all_uses_with(own, delete_user_cb=lambda user: user not in self.inside)


def _erase(nodes: set[Node]) -> None:
    """Erase those of these nodes that nothing uses, and that write to nothing that stays."""
    for node in sorted(nodes, reverse=True):
        if not node.users:
            node.graph.erase_node(node)
