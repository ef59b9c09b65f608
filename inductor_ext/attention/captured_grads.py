"""Split the gradients of a score_mod's captured tensors into contributions.

AOTAutograd gives us the *joint graph* of a score_mod. It is a graph over one score, and returns the gradient of the score
and, for each captured tensor, a gradient tensor that is built from ``zeros_and_scatter(shape, indices, value)``. An
attention kernel cannot compute such tensors, but it does not have to. Each gradient is a sum of **contributions**, and a
contribution is a scalar ``value`` that is added at scalar ``indices``. The kernel chooses how it does that: by an atomic
add, a reduction, or a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..core.fx import CASTS_AND_COPIES, ZEROS, shape_of
from ..torch_api.higher_order import zeros_and_scatter
from .score_mod import ScoreMod

aten = torch.ops.aten


class NotUnderstood(Exception):
    """A gradient is not a sum of scalar contributions. ``node`` is the FX node that is the cause."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(why)
        self.node = node


@dataclass(frozen=True)
class Contribution:
    """``gradient[indices] += value`` for every (b, h, q, k).

    ``value`` is a scalar node of the joint graph. ``indices`` has one scalar node or int for each dim of the captured
    tensor, so it is empty for a 0-d tensor.
    """

    value: Node
    indices: tuple[Node | int, ...]


@dataclass(frozen=True)
class JointGraph:
    """A joint graph that is split into contributions.

    grad_score: the node of the gradient of the score, or None if the score needs no gradient.
    captured: for each captured tensor its contributions, or None if it needs no gradient.
    """

    module: GraphModule
    grad_score: Node | None
    captured: tuple[tuple[Contribution, ...] | None, ...]


def output_nodes(graph: Graph) -> list[Any]:
    """Return the nodes that a graph returns, as a flat list."""
    (out,) = graph.find_nodes(op="output")[0].args
    return list(out) if isinstance(out, (list, tuple)) else [out]


def take_apart(module: GraphModule) -> JointGraph:
    """Split a joint graph ``(score, b, h, q, k, grad_score, *captured) -> gradients`` into contributions.

    Raises NotUnderstood if a captured gradient is not a sum of scatters of scalars.
    """
    # The positions are integers, so their gradients are None.
    grad_score, _b, _h, _q, _k, *captured = output_nodes(module.graph)
    return JointGraph(
        module,
        grad_score,
        tuple(None if node is None else tuple(_with_constants(c) for c in _contributions(node)) for node in captured),
    )


def _with_constants(contribution: Contribution) -> Contribution:
    indices = ((i if (c := constant_of(i)) is None else c) for i in contribution.indices)
    return Contribution(contribution.value, tuple(indices))


def constant_of(index: Any) -> int | None:
    """Return the integer that an index is, if the score_mod has a constant there (``table[h, 3]``), otherwise None."""
    while isinstance(index, Node) and index.target in CASTS_AND_COPIES:
        index = index.args[0]
    if isinstance(index, Node) and index.op == "get_attr":
        index = getattr(index.graph.owning_module, index.target)
    elif isinstance(index, Node) and index.target is aten.full.default and not index.args[0]:
        index = index.args[1]
    if isinstance(index, torch.Tensor):
        return int(index) if index.dim() == 0 and not index.is_floating_point() else None
    return index if isinstance(index, int) else None


def _contributions(node: Node) -> list[Contribution]:
    if node.target in CASTS_AND_COPIES:
        return _contributions(node.args[0])
    if node.target in ZEROS:
        return []
    if node.target is aten.add.Tensor and isinstance(node.args[1], Node) and node.kwargs.get("alpha", 1) == 1:
        return _contributions(node.args[0]) + _contributions(node.args[1])
    if node.target is zeros_and_scatter:
        return _scattered(node)
    if shape_of(node) == ():
        return [Contribution(node, ())]
    raise NotUnderstood(node, f"the gradient of a captured tensor goes through {node.target}, so it is not a sum of scalars")


def _scattered(node: Node) -> list[Contribution]:
    shape, indices, value = node.args
    if any(i is None for i in indices) or any(isinstance(i, Node) and shape_of(i) != () for i in indices):
        raise NotUnderstood(node, "a captured tensor is indexed by something that is not a scalar")
    if len(indices) == len(shape):
        return [Contribution(value, tuple(indices))]
    # table[i] is a row, and the gradient of the row is a scatter again. Both together are the scatter of table[i, j].
    return [Contribution(inner.value, (*indices, *inner.indices)) for inner in _contributions(value)]


def returning(module: GraphModule, outputs: Sequence[Any]) -> GraphModule:
    """Return a copy of ``module`` without dead code, with the same inputs, that returns ``outputs`` (nodes of it)."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.graph_copy(module.graph, copies)
    graph.output([copies[o] if isinstance(o, Node) else o for o in outputs])
    graph.eliminate_dead_code()
    return GraphModule(module, graph)


def axes_of(module: GraphModule, contribution: Contribution) -> tuple[bool, ...]:
    """Return, for each of b, h, q, k, whether the indices of a contribution depend on it.

    The values of the contribution may be summed first along the axes on which they do not depend.
    """
    reached = _reached(contribution)
    # An index that is computed from the score or its gradient may be different for every score.
    everywhere = depends_on_score(module, contribution)
    return tuple(everywhere or position in reached for position in ScoreMod.of_joint(module.graph).positions)


def depends_on_score(module: GraphModule, contribution: Contribution) -> bool:
    """Return whether the indices of a contribution are computed from the score or from its gradient."""
    inputs = ScoreMod.of_joint(module.graph)
    return not _reached(contribution).isdisjoint((inputs.score, inputs.grad_score))


def _reached(contribution: Contribution) -> set[Node]:
    """Return all nodes from which the indices of a contribution are computed."""
    reached: set[Node] = set()
    stack = [i for i in contribution.indices if isinstance(i, Node)]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack.extend(node.all_input_nodes)
    return reached
