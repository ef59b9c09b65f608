"""Positions that restart in packed documents: a lookup at ``position[k] - position[q]``, as of T5's buckets.

Within a document the difference of two captured positions is ``k - q``, and a mask hides the scores between documents. So a
lookup at the difference is written as

    where(plain[b, q // 128, k // 128], D[h, k - q], f(position[k] - position[q]))

where ``plain`` says that the difference is ``k - q`` for all visible scores of a block (plain_blocks.py), and is computed at
every call. It is the same number for any positions, but where a mask hides it. D has one element for each distance, is
computed outside of the kernel, and its gradient is summed along diagonals. A kernel takes one of the two branches for a
whole tile.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from ..core.dynamo_graph import Inserter
from ..core.fx import cone, dtype_of, fake_tensor, indices_of, value_of
from ..core.kernels import LARGEST_TILE
from .calls import ForwardCall
from .expressions import expression
from .footprints import Footprint, K, Q, footprints
from .kinds import DIAGONAL, PAIR
from .plain_blocks import call_of, can_tell_blocks, in_dtype_of, plain_blocks
from .score_mod import ScoreMod

_C = sympy.Symbol("c", integer=True)
#: The dtypes in which differences of positions are exact.
_POSITIONS = (torch.int32, torch.int64)


@dataclass
class Restarts:
    """What was written in that way.

    lookups: the reads of D's expression, whose index may be out of range at distances that no document has. operands: the
    tensors that the score_mod captures in addition. done: a description of each expression.
    """

    lookups: set[Node] = field(default_factory=set)
    operands: list[Node] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


def separate_distances(
    graph: Graph, call: ForwardCall, mask_mod: GraphModule | None, outer: Inserter, larger_than: int
) -> Restarts:
    """Separate ``k - q`` from other differences of captured positions. Changes the graph of a score_mod.

    mask_mod: the graph of the mask, or None if it hides nothing. outer: inserts nodes before the call. larger_than: an
    expression of which a table of all pairs would have at most this number of elements is left alone.
    """
    found = Restarts()
    inputs, extents = ScoreMod.of(graph), call.extents
    if not can_tell_blocks(call, mask_mod):
        return found
    of_keys, of_queries = (_reads(graph, inputs, position) for position in (inputs.k, inputs.q))
    for keys in of_keys.values():
        for queries in of_queries.values():
            known = footprints(graph, extents)
            assumed = footprints(graph, extents, {**dict.fromkeys(keys, K + _C), **dict.fromkeys(queries, Q + _C)})
            separable = [n for n in graph.nodes if _separable(n, known, assumed) and _pairs(known[n], extents) > larger_than]
            largest = [n for n in separable if not all(user in separable for user in n.users)]
            if largest:
                plain = plain_blocks(call, mask_mod, outer, inputs, (keys[0], queries[0]))
                read = _read_of_block(graph, plain, found)
            for node in largest:
                _separate(node, read, {**dict.fromkeys(keys, inputs.k), **dict.fromkeys(queries, inputs.q)}, found)
    return found


def _reads(graph: Graph, inputs: ScoreMod, position: Node) -> dict[Node, list[Node]]:
    """Return the reads ``x[position]`` and ``x[b, position]`` of each captured tensor x of integers."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        captured = node.target is operator.getitem and node.args[0] in inputs.captured
        if captured and dtype_of(node) in _POSITIONS and indices_of(node) in ((position,), (inputs.b, position)):
            found.setdefault(node.args[0], []).append(node)
    return found


def _separable(node: Node, known: dict[Node, Footprint], assumed: dict[Node, Footprint]) -> bool:
    """Return whether a node is a float that a lookup at a distance of positions decides, and nothing else of a pair."""
    value, footprint = fake_tensor(node), known.get(node)
    # Only the lookup itself: arithmetic around it may have no number at distances that no document has (a root, a quotient).
    if node.target is not operator.getitem or footprint is None or footprint.unknown or footprint.score:
        return False
    diagonal = footprint.kind is PAIR and assumed[node].kind is DIAGONAL and not assumed[node].unknown
    return diagonal and value is not None and value.dim() == 0 and value.is_floating_point() and bool(_lookups(node, known))


def _lookups(node: Node, known: dict[Node, Footprint]) -> list[Node]:
    """Return the reads from which a node is computed whose index depends on the query and the key."""
    reads = [n for n in cone(node) if n.target is operator.getitem]
    return [n for n in reads if any(isinstance(i, Node) and known[i].kind is PAIR for i in indices_of(n))]


def _pairs(footprint: Footprint, extents: Sequence[int]) -> int:
    batch, heads, *lengths = extents
    return math.prod([*[batch] * footprint.batch, *[heads] * footprint.head, *lengths])


def _read_of_block(graph: Graph, plain: Node, found: Restarts) -> Node:
    """Add a captured tensor with one number for each block, and return its read, which is before all other nodes."""
    inputs = ScoreMod.of(graph)
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        captured = graph.placeholder(f"plain_{len(found.operands)}")
    captured.meta = {"example_value": value_of(plain)}
    found.operands.append(plain)
    with graph.inserting_before(captured.next):
        rows, columns = (
            call_of(graph, operator.floordiv, (position, LARGEST_TILE), value_of(position))
            for position in (inputs.q, inputs.k)
        )
        batch = inputs.b if value_of(plain).shape[0] > 1 else 0
        return call_of(graph, operator.getitem, (captured, (batch, rows, columns)), value_of(plain).new_empty(()))


def _separate(node: Node, plain: Node, positions: dict[Node, Node], found: Restarts) -> None:
    """Replace a node by its value at plain positions, where ``plain`` holds. ``positions``: those that reads stand for."""
    graph = node.graph
    inside = cone(node)
    with graph.inserting_before(node.next):
        copies = {read: in_dtype_of(graph, position, read) for read, position in positions.items() if read in inside}
        for n in [n for n in graph.nodes if n in inside and n not in copies]:
            if any(source in copies for source in n.all_input_nodes):
                copies[n] = graph.node_copy(n, lambda x: copies.get(x, x))
                if n.target is operator.getitem:
                    found.lookups.add(copies[n])
        either = call_of(graph, torch.where, (plain, copies[node], node), value_of(node))
    node.replace_all_uses_with(either, delete_user_cb=lambda user: user is not either)
    found.done.append(f"{expression(node)} is read along diagonals where the positions follow each other")
