"""What the gradient of a score_mod's captured tensors is made of.

AOTAutograd hands us the *joint graph* of a score_mod: a graph over one score element that returns the gradient of the
score and, for each captured tensor, a tensor-shaped gradient built from ``zeros_and_scatter(shape, indices, value)``.
Nothing tensor-shaped can be computed inside an attention kernel, but nothing has to be: each gradient is a sum of
**contributions**, and a contribution is a scalar ``value`` added at scalar ``indices``. What is done with it (an atomic
add, a reduction, a store) is for the kernel to choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..torch_api.higher_order import zeros_and_scatter

aten = torch.ops.aten

#: score, b, h, q, k come before the captured tensors in a score_mod; the joint graph has the score's gradient besides.
SCORE_MOD_INPUTS = 5
JOINT_INPUTS = 6

_PASS_THROUGH = {
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    torch.ops.prims.convert_element_type.default,
}
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}


class NotUnderstood(Exception):
    """A gradient that is not a sum of scalar contributions; ``node`` is the FX node that is in the way."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(why)
        self.node = node


@dataclass(frozen=True)
class Contribution:
    """``gradient[indices] += value`` for every (b, h, q, k); both are scalar nodes of the joint graph.

    ``indices`` has one entry (node or int) for each dim of the captured tensor, and none for a 0-d tensor.
    """

    value: Node
    indices: tuple[Node | int, ...]


@dataclass(frozen=True)
class JointGraph:
    """A joint graph taken apart.

    grad_score: node of the gradient of the score, None where the score needs none.
    captured: for each captured tensor its contributions, or None where it needs no gradient.
    """

    module: GraphModule
    grad_score: Node | None
    captured: tuple[tuple[Contribution, ...] | None, ...]


def shape_of(node: Node) -> tuple[Any, ...]:
    """The shape of the fake tensor a node was traced with."""
    return tuple(node.meta["val"].shape)


def output_nodes(graph: Graph) -> list[Any]:
    """The nodes a graph returns, as a flat list."""
    (out,) = graph.find_nodes(op="output")[0].args
    return list(out) if isinstance(out, (list, tuple)) else [out]


def take_apart(module: GraphModule) -> JointGraph:
    """Split a joint graph ``(score, b, h, q, k, grad_score, *captured) -> gradients`` into contributions.

    Raises NotUnderstood where a captured gradient is not a sum of scatters of scalars.
    """
    grad_score, *others = output_nodes(module.graph)
    captured = others[SCORE_MOD_INPUTS - 1 :]
    return JointGraph(
        module,
        grad_score,
        tuple(None if node is None else tuple(_with_constants(c) for c in _contributions(node)) for node in captured),
    )


def _with_constants(contribution: Contribution) -> Contribution:
    indices = ((i if (c := constant_of(i)) is None else c) for i in contribution.indices)
    return Contribution(contribution.value, tuple(indices))


def constant_of(index: Any) -> int | None:
    """The integer that an index is where the score_mod was written with one (``table[h, 3]``), else None."""
    while isinstance(index, Node) and index.target in _PASS_THROUGH:
        index = index.args[0]
    if isinstance(index, Node) and index.op == "get_attr":
        index = getattr(index.graph.owning_module, index.target)
    elif isinstance(index, Node) and index.target is aten.full.default and not index.args[0]:
        index = index.args[1]
    if isinstance(index, torch.Tensor):
        return int(index) if index.dim() == 0 and not index.is_floating_point() else None
    return index if isinstance(index, int) else None


def _contributions(node: Node) -> list[Contribution]:
    if node.target in _PASS_THROUGH:
        return _contributions(node.args[0])
    if node.target in _ZEROS:
        return []
    if node.target is aten.add.Tensor and isinstance(node.args[1], Node) and node.kwargs.get("alpha", 1) == 1:
        return _contributions(node.args[0]) + _contributions(node.args[1])
    if node.target is zeros_and_scatter:
        return _scattered(node)
    if shape_of(node) == ():
        return [Contribution(node, ())]
    raise NotUnderstood(node, f"the gradient of a captured tensor passes through {node.target}")


def _scattered(node: Node) -> list[Contribution]:
    shape, indices, value = node.args
    if any(i is None for i in indices) or any(isinstance(i, Node) and shape_of(i) != () for i in indices):
        raise NotUnderstood(node, "a captured tensor is indexed by something that is not a scalar")
    if len(indices) == len(shape):
        return [Contribution(value, tuple(indices))]
    # table[i] leaves a row; its gradient is again a scatter, table[i][j] in one step.
    return [Contribution(inner.value, (*indices, *inner.indices)) for inner in _contributions(value)]


def returning(module: GraphModule, outputs: Sequence[Any]) -> GraphModule:
    """A copy of ``module`` with the same inputs that returns ``outputs`` (nodes of ``module``), dead code removed."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.graph_copy(module.graph, copies)
    graph.output([copies[o] if isinstance(o, Node) else o for o in outputs])
    graph.eliminate_dead_code()
    return GraphModule(module, graph)


def axes_of(module: GraphModule, contribution: Contribution) -> tuple[bool, ...]:
    """Which of b, h, q, k the indices of a contribution depend on; along the others its values may be summed first."""
    positions = module.graph.find_nodes(op="placeholder")[1:SCORE_MOD_INPUTS]
    reached = _reached(contribution)
    # An index made of the score or of its gradient differs everywhere.
    everywhere = depends_on_score(module, contribution)
    return tuple(everywhere or position in reached for position in positions)


def depends_on_score(module: GraphModule, contribution: Contribution) -> bool:
    """Whether the indices of a contribution are made of the score or of its gradient."""
    score, *_, grad = module.graph.find_nodes(op="placeholder")[:JOINT_INPUTS]
    return not _reached(contribution).isdisjoint((score, grad))


def _reached(contribution: Contribution) -> set[Node]:
    """All that the indices of a contribution are computed from."""
    reached: set[Node] = set()
    stack = [i for i in contribution.indices if isinstance(i, Node)]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack.extend(node.all_input_nodes)
    return reached
