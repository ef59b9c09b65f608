"""Values that a template computes for a whole tile before it inlines the subgraphs that use them.

Coordinates: ``k // 64`` and ``k % 64`` (and those of q). A tile starts at a multiple of its length, so ``k // 64`` is one
number on a tile of 64 keys, and a read at it is one value for each query. ``k % 64`` is the same in all tiles.

Early reads: the values of a score_mod that are read from captured tensors and do not depend on the score. Their loads are
issued before the matmul that computes the scores, so that they are done when it is. What a ``where`` takes under a condition
of whole blocks only is read only on tiles of such blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import Graph, Node

from ..core.fx import cone, dtype_of, fake_tensor
from ..core.kernels import LARGEST_TILE
from .score_mod import ScoreMod, output_nodes

aten = torch.ops.aten


@dataclass(frozen=True)
class Coordinate:
    """``position // divisor`` ("div") or ``position % divisor`` ("mod"). axis: "q" or "k"."""

    axis: Literal["q", "k"]
    operation: Literal["div", "mod"]
    divisor: int

    @property
    def name(self) -> str:
        """The name of its value in a kernel, which is an input of the subgraphs."""
        return f"{self.axis}_{self.operation}_{self.divisor}"


@dataclass(frozen=True)
class EarlyRead:
    """A value that is read early.

    by_query, by_key: whether it depends on these. unless: the number of the subgraph of a condition under which it is not
    needed, or None. The subgraphs of all values come first.
    """

    number: int
    by_query: bool
    by_key: bool
    unless: int | None = None

    @property
    def name(self) -> str:
        """The name of its value in a kernel, which is an input of the score_mod's subgraph."""
        return f"read_{self.number}"


@dataclass(frozen=True)
class ConditionalTile:
    """A table that is read by tile in some blocks only. name: of its tile. condition: the number of the subgraph."""

    name: str
    condition: int


def coordinate_of(node: Node, inputs: ScoreMod) -> Coordinate | None:
    """Return the coordinate that a node of a score_mod is, or None if it is none."""
    operation = _operation(node)
    if operation is None or len(node.args) < 2:
        return None
    position, divisor = node.args[:2]
    if position not in (inputs.q, inputs.k) or type(divisor) is not int or divisor < 2:
        return None
    if dtype_of(node) is not dtype_of(position):
        return None
    return Coordinate("q" if position is inputs.q else "k", operation, divisor)


def _operation(node: Node) -> Literal["div", "mod"] | None:
    if node.target is aten.floor_divide.default:
        return "div"
    # A position is not negative, so rounding down and truncating give the same.
    if node.target is aten.div.Tensor_mode and node.kwargs.get("rounding_mode") in ("floor", "trunc"):
        return "div"
    return "mod" if node.target in (aten.remainder.Scalar, aten.fmod.Scalar) else None


def values_read_early(graph: Graph, inputs: ScoreMod, by_tile: Iterable[Node]) -> list[Node]:
    """Return the largest values of a score_mod that are read at q or k and do not depend on the score.

    ``by_tile``: the captured tensors that are read by tile, whose tiles come after the matmul.
    """
    late = {inputs.score, *by_tile}
    for node in graph.nodes:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    results = {r for r in output_nodes(graph) if isinstance(r, Node)}
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and node not in late and (node in results or not late.isdisjoint(node.users))
        if _reads_at_positions(node, inputs)
    ]


def condition_of(values: Sequence[Node], graph: Graph, inputs: ScoreMod, branch: int) -> Node | None:
    """Return the condition of whole blocks under which values are not needed or, with branch 1, are needed; or None.

    branch: 2 if every user is ``where(condition, other, value)``, and 1 if it is ``where(condition, value, other)``.
    """
    conditions = {user.args[0] if _takes(user, value, branch) else None for value in values for user in value.users}
    if not set(values).isdisjoint(output_nodes(graph)) or len(conditions) != 1:
        return None
    (condition,) = conditions
    return condition if isinstance(condition, Node) and is_of_blocks(condition, inputs) else None


def _takes(user: Node, value: Node, branch: int) -> bool:
    """Return whether a user is a ``where`` that takes a value in one branch, and nowhere else."""
    taken = [i for i, operand in enumerate(user.args) if operand is value]
    return user.target is aten.where.self and taken == [branch]


def is_of_blocks(condition: Node, inputs: ScoreMod) -> bool:
    """Return whether a condition is one number for all scores of a tile: ``captured[b, q // 128, k // 128]``."""
    if condition.target is not aten.index.Tensor or condition.args[0] not in inputs.captured:
        return False
    for index in condition.args[1]:
        coordinate = coordinate_of(index, inputs) if isinstance(index, Node) else None
        whole = coordinate is not None and coordinate.operation == "div" and coordinate.divisor == LARGEST_TILE
        if not whole and not cone(index).isdisjoint((inputs.q, inputs.k, inputs.score)):
            return False
    return True


def _reads_at_positions(node: Node, inputs: ScoreMod) -> bool:
    value = fake_tensor(node)
    # A float64 value would be rounded to fp32 before it is used.
    if value is None or value.dtype is torch.float64 or not value.is_floating_point() or value.dim() > 0:
        return False
    sources = cone(node)
    reads = [n for n in sources if n.target is aten.index.Tensor]
    return any(not {inputs.q, inputs.k}.isdisjoint(cone(read)) for read in reads)
