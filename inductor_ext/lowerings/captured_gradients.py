"""How the gradients of captured tensors are reduced: one plan for each contribution, one buffer for each tensor.

place of a contribution                   plan
every element has one writer              STORE   in the tensor's own dtype; no zeros where there is no mask, no cast
a skewed strip (analysis/strips.py)       STRIP   whole tiles by TMA into a taller strip, folded afterwards
does not depend on the query or the key   SUM     in registers, along the axes it does not depend on
anything else                             SCATTER one fp32 add for each score
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from .. import compat
from ..analysis import strips
from ..analysis.bounds import extents_of
from ..analysis.captured_grads import JOINT_INPUTS, Contribution, JointGraph, axes_of, returning
from ..compat import FlexBlockMask, lowerings
from . import deterministic_gradients as deterministic
from . import flex_common as common
from . import subgraphs

aten = torch.ops.aten


class Kind(enum.Enum):
    """How a contribution reaches memory; the value is what the report says."""

    STORE = "stored by its one writer"
    STRIP = "tiles added to a strip"
    SUM = "summed in registers"
    SCATTER = "one fp32 add a score"
    PARTIAL = "partial sums in a fixed order"


class NotInOrder(Exception):
    """A contribution whose place is neither plain positions nor a diagonal, so that only atomics can reduce it."""


@dataclass(frozen=True)
class Plan:
    """One contribution: how it goes to memory.

    owner: which captured tensor it belongs to. target: the buffer that the kernel writes. axes: which of b, h, q, k its
    place depends on. plain: the place is positions and constants. checked: it may be out of bounds. diagonal,
    antidiagonal: the tensor holds one. wide: the tensor has four bytes an element or more.
    """

    owner: int
    contribution: Contribution
    kind: Kind
    target: Any
    axes: tuple[bool, bool, bool, bool]
    plain: bool
    checked: bool
    diagonal: bool
    antidiagonal: bool
    wide: bool


@dataclass
class CapturedGradients:
    """The gradients of one flex_attention's captured tensors.

    ranges: b, h, q, k of the joint graph with their extents. buffers: for each captured tensor the gradient to be, None
    where it needs none, or where its plans have workspaces instead. inlined: value, offset and in_bounds of each
    contribution as subgraphs, flat.
    """

    ranges: dict[Node, Any]
    buffers: list[Any] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    inlined: list[Any] = field(default_factory=list)

    @property
    def lengths(self) -> tuple[Any, Any]:
        """How many queries and keys there are."""
        _, _, queries, keys = self.ranges.values()
        return queries, keys

    @property
    def written(self) -> list[Any]:
        """The buffers that the kernel writes."""
        return list({id(plan.target): plan.target for plan in self.plans}.values())

    @property
    def note(self) -> str:
        """For the report."""
        kinds = [plan.kind.value for plan in self.plans]
        return f"{len(kinds)} contributions to captured gradients" + (": " + ", ".join(kinds) if kinds else "")

    @property
    def wide_tiles(self) -> bool:
        """Whether tiles of some captured tensor, four bytes an element, take part in the pipeline."""
        return any(all(plan.axes[2:]) and plan.wide for plan in self.plans)

    @property
    def gathers(self) -> bool:
        """Whether some contribution is one add for each score, at a place that has to be computed."""
        return any(plan.kind is Kind.SCATTER and not plan.plain for plan in self.plans)

    @property
    def has_strips(self) -> bool:
        """Whether tiles are added to a strip."""
        return any(plan.kind is Kind.STRIP for plan in self.plans)

    @property
    def tallest_tile(self) -> int:
        """The most queries a tile may hold: those of a strip's block."""
        return strips.TILE_ROWS if self.has_strips else common.LARGEST_TILE

    @property
    def sums_along_keys(self) -> bool:
        """Whether some contribution is one value a query, which query programs sum in registers."""
        return any(plan.kind is Kind.SUM and plan.axes[2] for plan in self.plans)

    def options(self) -> dict[str, Any]:
        """The template's options: bit i of each mask speaks of contribution i."""

        def mask(holds: Callable[[Plan], bool]) -> int:
            return sum(1 << i for i, plan in enumerate(self.plans) if holds(plan))

        return {
            "NUM_CONTRIBUTIONS": len(self.plans),
            "CHECKED_CONTRIBUTIONS": mask(lambda p: p.checked),
            "QUERY_FREE_CONTRIBUTIONS": mask(lambda p: not p.axes[2]),
            "KEY_FREE_CONTRIBUTIONS": mask(lambda p: not p.axes[3]),
            "ONE_WRITER_CONTRIBUTIONS": mask(lambda p: p.kind is Kind.STORE),
            "PARTIAL_CONTRIBUTIONS": mask(lambda p: p.kind is Kind.PARTIAL),
            "STRIPS": mask(lambda p: p.kind is Kind.STRIP),
            "ANTIDIAGONAL_STRIPS": mask(lambda p: p.kind is Kind.STRIP and p.antidiagonal),
            "STRIPS_BY_BATCH": mask(lambda p: p.kind is Kind.STRIP and p.axes[0]),
            "STRIPS_BY_HEAD": mask(lambda p: p.kind is Kind.STRIP and p.axes[1]),
            "STRIP_ROWS": strips.TILE_ROWS,
            "STRIP_OFFSET": strips.tile_shape(*self.lengths)[0] if self.has_strips else 0,
        }

    def results(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The gradients, in the captured tensors' own dtypes: rounded once, here."""
        results = []
        for owner, (buffer, tensor) in enumerate(zip(self.buffers, tensors, strict=True)):
            total = buffer
            plans = [plan for plan in self.plans if plan.owner == owner]
            if plans and plans[0].kind is Kind.STRIP:
                total = lowerings[aten.reshape](_fold(plans[0], self.lengths), tensor.get_size())
            for plan in plans if plans and plans[0].kind is Kind.PARTIAL else ():
                part = self._in_order(plan, tensor)
                total = part if total is None else lowerings[aten.add](total, part)
            convert = lowerings[torch.ops.prims.convert_element_type]
            results.append(None if total is None else convert(total, tensor.get_dtype()))
        return tuple(results)

    def _in_order(self, plan: Plan, tensor: Any) -> Any:
        """The gradient that a workspace of partial sums adds up to."""
        total = deterministic.summed(plan.target, plan.axes)
        if plan.diagonal:
            return deterministic.along_diagonals(total, plan.antidiagonal)
        return deterministic.placed(total, plan.contribution, self.ranges, tensor.get_size())


def plan_gradients(
    joint: JointGraph,
    node: Node,
    device: torch.device,
    captured: Sequence[Any],
    block_mask: FlexBlockMask,
    kernel_options: dict[str, Any],
    *,
    strips_allowed: bool,
    in_order: bool,
) -> CapturedGradients:
    """Allocate the buffers and lower the subgraphs of every contribution of a flex_attention_backward node.

    ``kernel_options`` say which captured tensors hold diagonals. ``strips_allowed``: the kernel may add whole tiles to
    them. ``in_order``: no atomics; raises NotInOrder where that cannot be.
    """
    extents = common.extents(node)
    placeholders = joint.module.graph.find_nodes(op="placeholder")[JOINT_INPUTS:]
    result = CapturedGradients(extents_of(joint.module, extents, first=1))
    antidiagonals = kernel_options.get(strips.ANTIDIAGONAL_OPTION, 0)
    diagonals = kernel_options.get(strips.DIAGONAL_OPTION, 0) | antidiagonals
    if any(name.endswith(("BLOCK_M1", "BLOCK_M2")) and size > strips.TILE_ROWS for name, size in kernel_options.items()):
        strips_allowed = False
    for owner, (contributions, placeholder, tensor) in enumerate(zip(joint.captured, placeholders, captured, strict=True)):
        if contributions is None:
            result.buffers.append(None)
            continue
        shape, diagonal = subgraphs.shape_of(placeholder), bool((diagonals >> owner) & 1)
        kind = _kind(contributions, shape, result.ranges, diagonal and strips_allowed, in_order)
        workspaces = kind is Kind.PARTIAL and bool(contributions)
        result.buffers.append(None if workspaces else _buffer(kind, tensor, block_mask, device, result.lengths))
        for contribution in contributions:
            checked = _inline(result, joint, node, contribution, shape, device, captured)
            axes = axes_of(joint.module, contribution)
            plain = deterministic.is_plain(contribution, result.ranges)
            target = result.buffers[-1]
            if workspaces:
                if not diagonal and not plain:
                    raise NotInOrder
                target = deterministic.workspace(axes, extents, device, zeroed=not common.is_unmasked(block_mask))
            reduced = Kind.SUM if kind is Kind.SCATTER and not (axes[2] and axes[3]) else kind
            wide = tensor.get_dtype().itemsize >= 4
            anti = bool((antidiagonals >> owner) & 1)
            result.plans.append(Plan(owner, contribution, reduced, target, axes, plain, checked, diagonal, anti, wide))
    return result


def _kind(
    contributions: Sequence[Contribution], shape: Sequence[Any], ranges: dict[Node, Any], strip: bool, in_order: bool
) -> Kind:
    if _writes_once(contributions, shape, ranges):
        return Kind.STORE
    if in_order:
        return Kind.PARTIAL
    return Kind.STRIP if strip else Kind.SCATTER


def _inline(
    result: CapturedGradients,
    joint: JointGraph,
    node: Node,
    contribution: Contribution,
    shape: Sequence[Any],
    device: torch.device,
    captured: Sequence[Any],
) -> bool:
    """Lower value, offset and in_bounds of a contribution; whether in_bounds is to be asked."""
    extents = common.extents(node)
    value = returning(joint.module, [contribution.value])
    address, checked = subgraphs.address(joint.module, contribution, shape, result.ranges)
    for module in (value, address):
        subgraphs.clamp_reads(module, extents_of(module, extents, first=1))
        inputs = subgraphs.score_placeholders(device, torch.float32, gradient=True)
        result.inlined.extend(subgraphs.inline(module, inputs, captured))
    return checked


def _writes_once(contributions: Sequence[Contribution], shape: Sequence[Any], ranges: dict[Any, Any]) -> bool:
    """Whether every element of a gradient of ``shape`` gets one value, of one score: ``t[b, h, q, k]`` in any order."""
    if len(contributions) != 1 or not all(i in ranges for i in contributions[0].indices):
        return False
    indices = contributions[0].indices
    whole = all(compat.statically_known_true(ranges[i] == n) for i, n in zip(indices, shape, strict=True))
    rest = [n for position, n in ranges.items() if position not in indices]
    return whole and len(set(indices)) == len(indices) and all(compat.statically_known_true(n == 1) for n in rest)


def _buffer(kind: Kind, tensor: Any, block_mask: FlexBlockMask, device: torch.device, lengths: tuple[Any, Any]) -> Any:
    size = tensor.get_size()
    if kind is Kind.STORE and common.is_unmasked(block_mask):
        return compat.empty_strided(size, compat.contiguous_strides(size), dtype=tensor.get_dtype(), device=device)
    if kind is Kind.STORE:
        return compat.full(size, 0, tensor.get_dtype(), device)
    if kind is Kind.STRIP:
        size = [sympy.prod(size[:-2]), strips.TILE_ROWS, strips.tile_shape(*lengths)[1]]
    return compat.full(size, 0, torch.float32, device)


def _fold(plan: Plan, lengths: tuple[Any, Any]) -> Any:
    """The strip that tiles were added to, [planes, TILE_ROWS, columns], as a table's: [planes, TABLE_ROWS, columns]."""
    groups = strips.TILE_ROWS // strips.TABLE_ROWS
    width = strips.table_shape(*lengths)[1]
    total = None
    for group in range(groups):
        first, row = strips.fold_start(*lengths, group, plan.antidiagonal), group * strips.TABLE_ROWS
        part = lowerings[aten.slice](plan.target, 1, row, row + strips.TABLE_ROWS)
        part = lowerings[aten.slice](part, 2, first, first + width)
        total = part if total is None else lowerings[aten.add](total, part)
    return total
