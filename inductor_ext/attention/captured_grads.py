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
from torch.fx import GraphModule, Node

from ..core.fx import CASTS_AND_COPIES, ZEROS, cone, dtype_of, shape_of
from ..core.integers import exact_integers
from ..torch_api.higher_order import zeros_and_scatter
from .score_mod import ScoreMod, output_nodes
from .tile_inputs import is_of_blocks

aten = torch.ops.aten


class NotUnderstood(Exception):
    """A gradient is not a sum of scalar contributions. ``node`` is the FX node that is the cause."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(why)
        self.node = node


@dataclass(frozen=True)
class Contribution:
    """``gradient[indices] += value`` for every (b, h, q, k).

    value: a scalar node of the joint graph. indices: one scalar node or int for each dim of the captured tensor, which has
    this shape. positions: for each index, which of b, h, q, k (0 to 3) it is, or None if it is something else. axes: for
    each of b, h, q, k, whether the indices depend on it; along the others, the values may be summed first. by_query, by_key:
    for each index, whether it depends on q (on k). on_score: whether the indices are computed from the score or from its
    gradient, so that they may be different for every score. condition: a condition of whole blocks and whether it must hold;
    elsewhere the value is zero. None if there is no such condition.
    """

    value: Node
    indices: tuple[Node | int, ...]
    shape: tuple[Any, ...]
    positions: tuple[int | None, ...]
    axes: tuple[bool, ...]
    by_query: tuple[bool, ...]
    by_key: tuple[bool, ...]
    on_score: bool
    condition: tuple[Node, bool] | None = None

    @property
    def varying(self) -> tuple[bool, ...]:
        """For each index, whether it depends on q or k."""
        return tuple(q or k for q, k in zip(self.by_query, self.by_key, strict=True))

    @property
    def query_dim(self) -> int | None:
        """The only dim whose index depends on the query, if that index does not depend on the key. Otherwise None."""
        dims = [dim for dim, by_query in enumerate(self.by_query) if by_query]
        return dims[0] if len(dims) == 1 and not self.by_key[dims[0]] else None

    @property
    def plain(self) -> bool:
        """Whether every index is a constant or a position, and no position occurs twice."""
        positions = [p for p in self.positions if p is not None]
        constant = all(p is not None or isinstance(i, int) for p, i in zip(self.positions, self.indices, strict=True))
        return constant and len(set(positions)) == len(positions)


@dataclass(frozen=True)
class JointGraph:
    """A joint graph that is split into contributions.

    inputs: the inputs of ``module``. grad_score: the node of the gradient of the score, or None if the score needs no
    gradient. captured: for each captured tensor its contributions, or None if it needs no gradient.
    """

    module: GraphModule
    inputs: ScoreMod
    grad_score: Node | None
    captured: tuple[tuple[Contribution, ...] | None, ...]


def take_apart(module: GraphModule) -> JointGraph:
    """Split a joint graph ``(score, b, h, q, k, grad_score, *captured) -> gradients`` into contributions.

    Raises NotUnderstood if a captured gradient is not a sum of scatters of scalars.
    """
    inputs = ScoreMod.of_joint(module.graph)
    # The positions are integers, so their gradients are None.
    grad_score, _b, _h, _q, _k, *gradients = output_nodes(module.graph)

    def contributions(tensor: Node, gradient: Node) -> tuple[Contribution, ...]:
        return tuple(_contribution(inputs, shape_of(tensor), *scattered) for scattered in _scatters(gradient))

    captured = (None if g is None else contributions(t, g) for t, g in zip(inputs.captured, gradients, strict=True))
    return JointGraph(module, inputs, grad_score, tuple(captured))


def _contribution(inputs: ScoreMod, shape: tuple[Any, ...], value: Node, indices: Sequence[Any]) -> Contribution:
    constants = (constant_of(i) for i in indices)
    indices = tuple(i if c is None else c for i, c in zip(indices, constants, strict=True))
    cones = [set(cone(i)) if isinstance(i, Node) else set() for i in indices]
    reached = set().union(*cones)
    scores = inputs.score, inputs.grad_score
    on_score = not reached.isdisjoint(scores)
    axes = tuple(on_score or position in reached for position in inputs.positions)
    by_query, by_key = (tuple(not one.isdisjoint((p, *scores)) for one in cones) for p in (inputs.q, inputs.k))
    positions = tuple(inputs.positions.index(i) if i in inputs.positions else None for i in indices)
    condition = _condition(value, inputs)
    return Contribution(value, indices, shape, positions, axes, by_query, by_key, on_score, condition)


def _condition(value: Node, inputs: ScoreMod) -> tuple[Node, bool] | None:
    """Return the condition of blocks in ``where(condition, x, 0)`` or ``where(condition, 0, x)``, and where x counts."""
    while value.target in CASTS_AND_COPIES:
        value = value.args[0]
    if value.target is not aten.where.self or not is_of_blocks(value.args[0], inputs):
        return None
    condition, *branches = value.args
    zero = [_is_zero(branch) for branch in branches]
    return (condition, zero[1]) if zero[0] != zero[1] else None


def _is_zero(node: Any) -> bool:
    full = isinstance(node, Node) and node.target in (aten.full.default, aten.scalar_tensor.default)
    return full and (node.args[1] if node.target is aten.full.default else node.args[0]) == 0


def constant_of(index: Any) -> int | None:
    """Return the integer that an index is, if the score_mod has a constant there (``table[h, 3]``), otherwise None."""
    kept = []
    while isinstance(index, Node) and index.target in CASTS_AND_COPIES:
        kept.append(exact_integers(dtype_of(index)))
        index = index.args[0]
    if isinstance(index, Node) and index.op == "get_attr":
        index = getattr(index.graph.owning_module, index.target)
    elif isinstance(index, Node) and index.target is aten.full.default and not index.args[0]:
        index = index.args[1]
    if isinstance(index, torch.Tensor) and index.dim() == 0 and not index.is_floating_point():
        index = int(index)
    # A narrow dtype makes another number of one that does not fit.
    return index if isinstance(index, int) and all(low <= index <= high for low, high in kept) else None


def _scatters(node: Node) -> list[tuple[Node, tuple[Any, ...]]]:
    """Return the value and the indices of each scatter of a scalar of which a gradient is the sum."""
    if node.target in CASTS_AND_COPIES:
        return _scatters(node.args[0])
    if node.target in ZEROS:
        return []
    if node.target is aten.add.Tensor and isinstance(node.args[1], Node) and node.kwargs.get("alpha", 1) == 1:
        return _scatters(node.args[0]) + _scatters(node.args[1])
    if node.target is zeros_and_scatter:
        return _scattered(node)
    if shape_of(node) == ():
        return [(node, ())]
    raise NotUnderstood(node, f"the gradient of a captured tensor goes through {node.target}, so it is not a sum of scalars")


def _scattered(node: Node) -> list[tuple[Node, tuple[Any, ...]]]:
    shape, indices, value = node.args
    if any(i is None for i in indices) or any(isinstance(i, Node) and shape_of(i) != () for i in indices):
        raise NotUnderstood(node, "a captured tensor is indexed by something that is not a scalar")
    if len(indices) == len(shape):
        return [(value, tuple(indices))]
    # table[i] is a row, and the gradient of the row is a scatter again. Both together are the scatter of table[i, j].
    return [(inner, (*indices, *columns)) for inner, columns in _scatters(value)]
