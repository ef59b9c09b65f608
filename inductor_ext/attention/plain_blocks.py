"""Find the blocks of scores in which the difference of captured positions is ``k - q``, by torch ops outside of a kernel.

The mask of an attention is computed for all positions. It is no proof of what a kernel hides: in a block that the block mask
lists as full, a kernel does not ask it. Such a block counts as visible as a whole, whatever the mask says.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..core.dynamo_graph import Inserter
from ..core.fx import dtype_of, fake_tensor, indices_of, name_of, shape_of, value_of
from ..core.kernels import LARGEST_TILE
from ..torch_api.higher_order import FlexBlockMask
from .calls import ForwardCall
from .footprints import inexact_integers, is_pointwise
from .functional import impurity
from .score_mod import ScoreMod
from .tables import Tables


def can_tell_blocks(call: ForwardCall, mask_mod: GraphModule | None) -> bool:
    """Return whether the blocks can be found: for known lengths, and a mask that is the same for all heads."""
    if not all(isinstance(n, int) for n in call.extents):
        return False
    if mask_mod is None:
        return True
    full = call.mask.full_kv_num_blocks
    sizes = (call.mask.query_block_size, call.mask.key_block_size)
    if full is not None and (
        sizes != (LARGEST_TILE, LARGEST_TILE) or shape_of(call.mask.full_kv_indices)[2:] != _blocks(call)
    ):
        return False
    _b, h, _q, _k, *captured = mask_mod.graph.find_nodes(op="placeholder")
    if h.users or impurity(mask_mod.graph) is not None:
        return False
    # On a grid, a captured number would not count in the dtype of a result, and floats may round otherwise.
    if not all(fake_tensor(x) is not None and fake_tensor(x).dim() > 0 for x in captured):
        return False
    nodes = [n for n in mask_mod.graph.nodes if n.op != "output"]
    if any(fake_tensor(n) is not None and fake_tensor(n).is_floating_point() for n in nodes):
        return False
    return all(_is_of_numbers(n) for n in nodes if n.op != "placeholder")


def _is_of_numbers(node: Node) -> bool:
    """Return whether a node of a mask reads one element of a captured tensor, or computes a number from numbers."""
    if node.target is operator.getitem:
        return node.args[0].op == "placeholder" and fake_tensor(node) is not None and fake_tensor(node).dim() == 0
    tensors = len(node.args) if all(isinstance(a, Node) for a in node.args) else 0
    return is_pointwise(name_of(node), tensors)


def _blocks(call: ForwardCall) -> tuple[int, ...]:
    """Return the numbers of rows and columns of blocks."""
    return tuple(-(-n // LARGEST_TILE) for n in call.extents[2:])


def plain_blocks(
    call: ForwardCall, mask_mod: GraphModule | None, outer: Inserter, inputs: ScoreMod, reads: tuple[Node, Node]
) -> Node:
    """Compute in which blocks the difference of positions is ``k - q`` for all visible scores.

    The result has the shape [B or 1, rows of blocks, columns of blocks]. mask_mod: as for ``can_tell_blocks``, which must
    hold. inputs: those of the score_mod. reads: one of the positions of keys, and one of the positions of queries.
    """
    graph = Graph()
    operands: list[Any] = []
    if mask_mod is None:
        visible = None
        _b, _h, _q, _k = (graph.placeholder(name) for name in "bhqk")
    else:
        visible = graph.graph_copy(mask_mod.graph, {})
        operands += call.mask_captured
    other = _add_difference(graph, call, inputs, reads, operands)
    seen = call_of(graph, torch.logical_and, (other, visible), value_of(other)) if isinstance(visible, Node) else other
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("score").meta = dict(inputs.score.meta)
    captured = dict(zip(ScoreMod.of(graph).captured, operands, strict=True))
    tables = Tables(outer, graph, call.query, call.key, captured, inexact_integers(graph, call.extents), masked=True)
    found = _any_in_blocks(tables, seen, call)
    if mask_mod is not None and call.mask.full_kv_num_blocks is not None:
        anywhere = outer.function(operator.and_, _full_blocks(outer, call.mask), _any_in_blocks(tables, other, call))
        found = outer.function(operator.or_, found, anywhere)
    return outer.function(torch.logical_not, found)


def _full_blocks(outer: Inserter, mask: FlexBlockMask) -> Node:
    """Return which blocks are listed as full for some head, as [B or 1, rows, columns]."""
    batch, heads, rows, columns = shape_of(mask.full_kv_indices)
    slots = outer.function(torch.arange, columns, device=value_of(mask.full_kv_indices).device)
    listed = outer.function(operator.lt, slots, outer.method("unsqueeze", mask.full_kv_num_blocks, -1))
    # What is not listed goes to a column after the last.
    places = outer.method("long", outer.function(torch.where, listed, mask.full_kv_indices, columns))
    empty = outer.function(torch.zeros, (batch, heads, rows, columns + 1), dtype=torch.bool, device=value_of(slots).device)
    full = outer.function(torch.scatter, empty, 3, places, True)
    return outer.method("any", outer.method("narrow", full, 3, 0, columns), 1)


def _add_difference(
    graph: Graph, call: ForwardCall, inputs: ScoreMod, reads: tuple[Node, Node], operands: list[Any]
) -> Node:
    """Add to a mask's graph whether the difference of positions is another one than ``k - q``."""
    given = dict(zip(inputs.captured, call.captured, strict=True))
    mask = ScoreMod.of_mask(graph)
    for position, like in zip(mask.positions, inputs.positions, strict=True):
        position.meta = dict(like.meta)
    shifts, last = [], graph.find_nodes(op="placeholder")[-1]
    for read, position in zip(reads, (mask.k, mask.q), strict=True):
        with graph.inserting_after(last):
            last = graph.placeholder(f"positions_{len(shifts)}")
        last.meta = dict(read.args[0].meta)
        operands.append(given[read.args[0]])
        index = tuple(mask.b if i is inputs.b else position for i in indices_of(read))
        found = call_of(graph, operator.getitem, (last, index), value_of(read))
        shifts.append(call_of(graph, operator.sub, (found, in_dtype_of(graph, position, read)), value_of(read)))
    return call_of(graph, operator.ne, tuple(shifts), torch.ne(*map(value_of, shifts)))


def _any_in_blocks(tables: Tables, condition: Node, call: ForwardCall) -> Node:
    """Return whether a condition holds anywhere in each block. After the last position, it is that of the last one."""
    extents, blocks = call.extents, _blocks(call)
    outer, device = tables.outer, fake_tensor(tables.query).device
    batch = extents[0] if ScoreMod.of(tables.inner).b.users else 1
    b, q, k = (
        outer.method("clamp", outer.function(torch.arange, number, dtype=torch.int32, device=device), max=length - 1)
        for number, length in zip((batch, *(LARGEST_TILE * n for n in blocks)), (batch, *extents[2:]), strict=True)
    )
    b, q, k = (outer.method("view", x, *shape) for x, shape in ((b, (-1, 1, 1, 1)), (q, (1, 1, -1, 1)), (k, (1, 1, 1, -1))))
    found = tables.outside(condition, (b, None, q, k, ()))
    whole = outer.function(torch.broadcast_to, found, (batch, 1, *(LARGEST_TILE * n for n in blocks)))
    split = outer.method("reshape", whole, batch, blocks[0], LARGEST_TILE, blocks[1], LARGEST_TILE)
    return outer.method("any", outer.method("any", split, 4), 2)


def in_dtype_of(graph: Graph, position: Node, read: Node) -> Node:
    """Return a position in the dtype of a captured one."""
    if dtype_of(position) is dtype_of(read):
        return position
    cast = graph.call_method("to", (position, dtype_of(read)))
    cast.meta = {"example_value": value_of(read)}
    return cast


def call_of(graph: Graph, target: Any, args: tuple[Any, ...], value: Any) -> Node:
    """Add a call to a graph. ``value``: the fake tensor of its result."""
    node = graph.call_function(target, args)
    node.meta = {"example_value": value}
    return node
