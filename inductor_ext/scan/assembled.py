"""Tensors that a loop over time assembles of elements of one sequence: by ``stack``, by ``cat``, or by assignments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..core.dynamo_graph import Inserter
from ..core.fx import cone, shape_of, value_of
from ..core.outside import is_returned
from ..core.terms import arg, calls_torch, is_tensor, op
from .elements import Elements, assigned

_NEW_TENSORS = {"zeros", "empty", "ones", "full", "zeros_like", "empty_like", "ones_like", "full_like"}
_NEW_TENSORS |= {"new_zeros", "new_empty", "new_ones", "new_full"}


@dataclass(frozen=True)
class Assembled:
    """A tensor of elements of one sequence at all times of a loop, which has time at ``dim``.

    result: the tensor. sequence: that of the elements, which are ``values``. assignments: the nodes that assemble it in
    place, in their order, or none. joined: the elements have a dim ``dim`` of their own, along which they are joined.
    reverse: the last time is first.
    """

    result: Node
    sequence: int
    values: tuple[Node, ...]
    dim: int
    assignments: tuple[Node, ...] = ()
    joined: bool = False
    reverse: bool = False


def assembled_of(
    states: Iterable[Node], derived: Iterable[Node], times: dict[int, range], elements: Elements
) -> list[Assembled]:
    """Return what is assembled of states and what is derived from them, in the graph's order.

    times: of the states of each loop, by their sequence.
    """
    users = dict.fromkeys(user for node in (*states, *derived) for user in node.users)
    filled = dict.fromkeys(found[0] for user in users if (found := assigned(user)) is not None)
    found = [_joined(user, elements) for user in users if op(user) in ("stack", "cat", "concat") and calls_torch(user)]
    found += [_filled(tensor, elements) for tensor in filled]
    kept = [a for a in found if a is not None and _is_whole(a, set(states), times, elements)]
    return sorted(kept, key=lambda a: a.assignments[-1] if a.assignments else a.result)


def _is_whole(found: Assembled, states: set[Node], times: dict[int, range], elements: Elements) -> bool:
    """Whether the elements are at all times of loops, and nothing that they are computed from changes meanwhile."""
    numbers, writes = elements.states_in(found.sequence), elements.writes
    own = [elements.of(value).time for value in found.values]
    if not numbers or any(own != [*times[number]] for number in numbers):
        return False
    nodes = [*found.values, *(found.assignments or (found.result,))]
    if any(node in writes.in_other_modes for node in nodes) or any(writes.after(value) for value in found.values):
        return False
    bases = elements.bases(found.sequence)
    derived = set(cone(*(v for v in found.values if v not in states), until=bases | states)) - bases - states
    return not writes.during(bases, min(derived | set(nodes)), max(nodes))


def _joined(node: Node, elements: Elements) -> Assembled | None:
    values, dim = arg(node, 0, "tensors"), node.kwargs.get("axis", arg(node, 1, "dim", 0))
    plain = set(node.kwargs) <= {"tensors", "dim", "axis"} and isinstance(values, list | tuple) and isinstance(dim, int)
    if not plain or not values or not all(map(is_tensor, values)) or elements.writes.after(node):
        return None
    found = [elements.of(value) for value in values]
    if len({e.sequence for e in found}) > 1 or any(e.time is None for e in found):
        return None
    reverse = found[0].time > found[-1].time
    values = tuple(reversed(values)) if reverse else tuple(values)
    joined, rank = op(node) != "stack", len(shape_of(node))
    return Assembled(node, found[0].sequence, values, dim % rank, joined=joined, reverse=reverse)


def _filled(tensor: Node, elements: Elements) -> Assembled | None:
    """A new tensor, if each of its parts along a dim is assigned once, and nothing else happens to it meanwhile."""
    found = {user: a for user in tensor.users if (a := assigned(user)) is not None and a[0] is tensor}
    parts = {time: value for _, _, time, value in found.values()}
    dims = {dim for _, dim, _, _ in found.values()}
    new = op(tensor) in _NEW_TENSORS and calls_torch(tensor) and _order(tensor) is not None
    if not new or len(dims) != 1 or len(parts) != len(found):
        return None
    (dim,) = dims
    whole = sorted(parts) == [*range(shape_of(tensor)[dim])] if isinstance(shape_of(tensor)[dim], int) else False
    last = max(found)
    alone = all(user in found or user > last for user in tensor.users) and not elements.writes.unknown(tensor)
    if not (whole and alone and set(elements.writes.to(tensor)) == set(found)):
        return None
    read = {time: elements.of(value) for time, value in parts.items()}
    numbers = {e.sequence for e in read.values()}
    elsewhere = any(value_of(value).device != value_of(tensor).device for value in parts.values())
    if len(numbers) > 1 or elsewhere or any(e.time != time for time, e in read.items()):
        return None
    values = tuple(parts[time] for time in sorted(parts))
    return Assembled(tensor, numbers.pop(), values, dim, tuple(sorted(found)))


def _order(tensor: Node) -> list[int] | None:
    """The dims of a tensor in the order in which they are in memory; None if there are gaps, or sizes that are not known."""
    value = value_of(tensor)
    if not all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        return [*range(value.dim())] if value.is_contiguous() else None
    order = sorted(range(value.dim()), key=lambda d: (-value.stride(d), d))
    return order if value.permute(order).is_contiguous() else None


def put_together(assembled: Assembled, times: range, elements: Elements) -> None:
    """Insert the sequence in the place of what is assembled of its elements."""
    tensor, last = assembled.result, max(assembled.assignments, default=assembled.result)
    with tensor.graph.inserting_before(last.next):
        insert = Inserter(tensor.graph, last)
        whole = elements.whole(assembled.sequence, times, insert)
        if value_of(whole).dtype != value_of(tensor).dtype:
            whole = insert.method("to", whole, value_of(tensor).dtype)
        if assembled.reverse:
            whole = insert.method("flip", whole, 0)
        whole = insert.method("movedim", whole, 0, assembled.dim)
        if assembled.joined:
            whole = insert.method("flatten", whole, assembled.dim, assembled.dim + 1)
        order = _order(tensor)
        if order != [*range(len(order))]:
            whole = insert.method("contiguous", insert.method("permute", whole, order))
            whole = insert.method("permute", whole, [order.index(d) for d in range(len(order))])
        else:
            whole = insert.method("contiguous", whole)
        if is_returned(tensor):
            # The caller may change it. The states may be needed unchanged, and other results may be made of them.
            whole = insert.function(torch.ops.gradfuse.copied.default, whole, False)
        insert.take_place(tensor, whole, lambda user: user not in assembled.assignments)
    elements.replaced(tensor, whole)
