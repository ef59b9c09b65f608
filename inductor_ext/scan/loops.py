"""Recognises a linear recurrence in a Python loop over time, and replaces it by a scan.

    for t in range(length):
        h = a[:, t] * h + x[:, t]
        out[:, t] = h.to(out.dtype)          # or outs.append(h @ c[:, t, :, None]), and after the loop torch.stack(outs, 1)

Dynamo unrolls the loop, and its steps would run one after the other. The states h are the scan of the sequences a and x,
whose elements may be expressions (elements.py). What is assembled of elements of one sequence at all times (assembled.py)
becomes that sequence, computed for all times at once (over_time.py). The other states are read from the scan one by one, and
if there are many of them, the loop stays.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from ..core.dynamo_graph import Inserter
from ..core.fx import called, cone, requires_grad, same_shape, shape_of, value_of
from ..core.report import record, user_line
from ..core.terms import binary, calls_torch, is_tensor, op
from ..core.writes import Writes
from ..options import Options
from ..torch_api.sizes import size_hint
from .assembled import assembled_of, put_together
from .associative import runs_triton
from .elements import Elements, slice_of
from .over_time import CASTS, is_pointwise, over_time
from .recurrence import recurrence

NAME = "time_loops"
#: A shorter loop stays as it is.
FEWEST_STEPS = 8
#: The most states that are read one by one. The gradient of each is a tensor of all times.
MOST_READS = 4
#: How much memory the states may take that only the scan keeps, as a multiple of what they are computed from. If a gradient
#: is needed, the loop keeps them too.
MOST_MEMORY = 4


@dataclass(frozen=True)
class _Step:
    """``state = a * before + x`` at a time. before: the last state, which may be cast in between; ``product.args[at]``."""

    time: int
    state: Node
    product: Node
    a: Node | float
    before: Node
    at: int
    x: Node
    sequences: tuple[int | float, int]


class _NotAScan(Exception):
    """The loop stays as it is."""


def rewrite(gm: GraphModule, options: Options) -> None:
    """Replace, in place, every loop over time that is a linear recurrence."""
    if not _may_have_loops(gm.graph):
        return
    elements = Elements(Writes(gm.graph))
    loops = [_Loop(chain, elements) for chain in _chains(gm.graph, elements) if len(chain) >= FEWEST_STEPS]
    places = {loop: user_line(loop.first.state) for loop in loops}
    reasons: dict[_Loop, str] = {}
    for loop in loops:
        try:
            loop.check()
        except _NotAScan as why:
            reasons[loop] = str(why)
    while chosen := [loop for loop in loops if loop not in reasons]:
        plan = _Plan(chosen, elements)
        refused = plan.refused()
        if not refused:
            plan.apply()
            break
        reasons.update(refused)
        plan.forget()
    for loop, where in places.items():
        why = reasons.get(loop, f"its {len(loop.chain)} steps are a linear recurrence")
        record(NAME, "loop", "stock" if loop in reasons else "scan", why, where)


def _may_have_loops(graph: Graph) -> bool:
    """Whether some tensor is read at several times one by one, and torch.func transforms no part of the graph."""
    if any("increment_nesting" in called(node) for node in graph.nodes if node.op == "call_function"):
        return False
    slices = (node for node in graph.nodes if is_tensor(node) and node.op in ("call_function", "call_method"))
    counts = Counter(found[:2] for node in slices if (found := slice_of(node)) is not None)
    return any(count >= FEWEST_STEPS for count in counts.values())


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
        for at in (1, 0):
            a, before = product.args[1 - at], product.args[at]
            if added.time is None or not is_tensor(before):
                continue
            if isinstance(a, float | int) and not isinstance(a, bool):
                found.append(_Step(added.time, node, product, a, before, at, x, (float(a), added.sequence)))
            elif is_tensor(a) and elements.of(a).time in (None, added.time):
                sequences = elements.of(a).sequence, added.sequence
                found.append(_Step(added.time, node, product, a, before, at, x, sequences))
    return found


def _follows(chain: list[_Step], step: _Step) -> bool:
    direction = step.time - chain[-1].time
    straight = len(chain) < 2 or direction == chain[-1].time - chain[-2].time
    same = isinstance(step.a, Node) == isinstance(chain[-1].a, Node) and chain[-1].sequences == step.sequences
    return direction in (1, -1) and straight and same


def _uncast(node: Node) -> Node:
    """The state that is cast to another floating dtype between two steps."""
    while op(node) in CASTS and is_pointwise(node) and value_of(node).is_floating_point():
        node = node.args[0]
    return node


class _Loop:
    """A loop. inputs: what its steps read. inside: the steps. carried: those nodes of the steps that depend on a state."""

    def __init__(self, chain: list[_Step], elements: Elements) -> None:
        self.chain, self.elements = chain, elements
        self.first, self.last = chain[0], chain[-1]
        self.reverse = self.last.time < self.first.time
        self.times = range(min(self.first.time, self.last.time), max(self.first.time, self.last.time) + 1)
        self.states = {step.state: step.time for step in chain}
        numbers = self.first.sequences if isinstance(self.first.a, Node) else self.first.sequences[1:]
        self.inputs = {self.first.before}.union(*map(elements.bases, numbers))
        self.inside = set(cone(*self.states, until=self.inputs)) - self.inputs
        self.carried = {step.product for step in chain} | set(self.states)
        for step in chain[1:]:
            casts = () if step.before in self.states else (step.before,)
            self.carried |= set(cone(*casts, until=self.states))

    def check(self) -> None:
        """Raise _NotAScan if the steps are not a scan, whatever happens to the states."""
        first, writes = self.first.state, self.elements.writes
        if not runs_triton([value_of(first)]):
            raise _NotAScan("Inductor has no scan for this device")
        if any(not same_shape(state, first) or value_of(state).dtype != value_of(first).dtype for state in self.states):
            raise _NotAScan("its states differ in shape or dtype")
        if any(isinstance(n, int) and n == 0 for n in shape_of(first)):
            raise _NotAScan("its states are empty")
        operands = [x for x in (self.first.a, self.first.x, self.first.before) if isinstance(x, Node)]
        if any(value_of(x).device != value_of(first).device for x in operands):
            raise _NotAScan("its operands are on several devices")
        if isinstance(self.first.a, float | int) and abs(self.first.a) > 1:
            # In a scan they are multiplied with each other, and infinity times zero is no number.
            raise _NotAScan("the powers of its factor may be infinite")
        if not requires_grad(first) and self._memory(first) * len(self.times) > MOST_MEMORY * sum(
            map(self._memory, self.inputs)
        ):
            raise _NotAScan("no gradient is needed, and its states of all times take much more memory than its operands")
        if any(node in writes.in_other_modes for node in self.inside):
            raise _NotAScan("a part of it is computed without a gradient, or in a region of autocast")
        if any(writes.after(node) for node in self.inside):
            raise _NotAScan("its states or operands are changed in place")
        if writes.during(self.inputs, min(self.inside), self.last.state):
            raise _NotAScan("a tensor that it reads is changed in the loop")

    @staticmethod
    def _memory(node: Node) -> int:
        """The bytes of a tensor. A size that depends on data counts as one."""
        return value_of(node).element_size() * math.prod(size_hint(n) or 1 for n in shape_of(node))

    def scan(self) -> Node:
        """Insert the scan where the loop begins."""
        step, shape, elements = self.first, shape_of(self.first.state), self.elements
        # The state before the first may be that of a loop that is a scan by now.
        before = step.product.args[step.at]
        with step.state.graph.inserting_before(step.state):
            insert, made = Inserter(step.state.graph, step.state), {}
            x = elements.aligned(step.sequences[1], len(shape) - len(shape_of(step.x)), self.times, insert, made)
            a = step.a
            if isinstance(a, Node):
                a = elements.aligned(step.sequences[0], len(shape) - len(shape_of(a)), self.times, insert, made)
            dtype = value_of(step.state).dtype
            factor, added, start = (value_of(n) if isinstance(n, Node) else n for n in (a, x, before))
            arguments = a, x, before, self.reverse, dtype
            return insert.call(recurrence, arguments, lambda: (factor * start + added).to(dtype))


class _Plan:
    """Which loops become scans, what is assembled of their states, and which states are read one by one."""

    def __init__(self, loops: list[_Loop], elements: Elements) -> None:
        self.loops, self.elements = sorted(loops, key=lambda loop: loop.first.state), elements
        self.inside = set().union(*(loop.inside for loop in loops))
        self.derived = self._derived()
        self.numbers = {elements.states(loop.states): loop for loop in self.loops}
        elements.read_anew(self.derived)
        times = {number: loop.times for number, loop in self.numbers.items()}
        states = [state for loop in self.loops for state in loop.states]
        self.assembled = assembled_of(states, self.derived, times, elements)
        self.results = {n for a in self.assembled for n in (a.assignments or (a.result,))}
        self.gone = {n for n in self.derived if self._only_for(n, self.results)}

    def refused(self) -> dict[_Loop, str]:
        """Return the loops whose states are used in other ways too often, and why."""
        found = {}
        for loop in self.loops:
            reads = self._reads(loop)
            if len(reads) > MOST_READS:
                found[loop] = f"{len(reads)} of its states are used one by one"
            elif any(not value_of(state).is_contiguous() for state in reads):
                found[loop] = "a state that is used by itself is not contiguous"
            elif any(user not in loop.inside for node in loop.carried - set(loop.states) for user in node.users):
                found[loop] = "a product of a factor and a state is used by itself"
        return found

    def forget(self) -> None:
        """Read all states as tensors of no sequence again."""
        self.elements.read_anew([*self.derived, *(state for loop in self.loops for state in loop.states)])

    def apply(self) -> None:
        """Replace the loops."""
        reads, placed = {loop: self._reads(loop) for loop in self.loops}, set()
        for number, loop in self.numbers.items():
            self.elements.scans[number] = loop.scan()
            for each in self.assembled:
                if each not in placed and self.elements.states_in(each.sequence) <= self.elements.scans.keys():
                    put_together(each, loop.times, self.elements)
                    placed.add(each)
            for state in reads[loop]:
                self._read(state, loop, number)
        _erase(self.results | self.gone | self.inside | {a.result for a in self.assembled})

    def _derived(self) -> dict[Node, None]:
        """Return what may be computed from the states of all times at once, in the graph's order, without the states."""
        states = [state for loop in self.loops for state in loop.states]
        found, pending = dict.fromkeys(states), [*states]

        def has_time(node: Node) -> bool:
            return node in found or self.elements.of(node).time is not None

        while pending:
            for user in pending.pop().users:
                if user not in found and user not in self.inside and over_time(user, has_time) is not None:
                    found[user] = None
                    pending.append(user)
        return dict.fromkeys(sorted(found.keys() - set(states)))

    def _only_for(self, node: Node, ends: set[Node]) -> bool:
        """Whether a node is used only by these ends, directly or through what is derived from states."""
        pending, seen = [node], {node}
        while pending:
            for user in pending.pop().users:
                if user in ends or user in seen:
                    continue
                if user not in self.derived:
                    return False
                seen.add(user)
                pending.append(user)
        return True

    def _reads(self, loop: _Loop) -> list[Node]:
        """Return the states that something reads which stays."""
        return [state for state in loop.states if not self._only_for(state, self.results | loop.inside)]

    def _read(self, state: Node, loop: _Loop, number: int) -> None:
        """Read a state from the scan. It is a copy, so that the scan is not kept, or changed, for one state."""
        with state.graph.inserting_before(state.next):
            insert = Inserter(state.graph, state)
            own = insert.method("select", self.elements.scans[number], 0, loop.states[state] - loop.times.start)
            own = insert.function(torch.ops.gradfuse.copied.default, own)
            insert.take_place(state, own, lambda user: user not in loop.inside)


def _erase(nodes: set[Node]) -> None:
    """Erase those of these nodes that nothing uses."""
    for node in sorted(nodes, reverse=True):
        if not node.users:
            node.graph.erase_node(node)
