"""How the gradients of captured tensors are reduced: one plan for each contribution, one buffer for each tensor.

place of a contribution                   plan
every element has one writer              STORE   in the tensor's own dtype; no zeros where there is no mask, no cast
a skewed strip (analysis/strips.py)       STRIP   whole tiles by TMA into a taller strip, folded afterwards
does not depend on the query or the key   SUM     in registers, along the axes it does not depend on
anything else                             SCATTER one fp32 add for each score
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
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
from . import flex_common as common
from . import subgraphs

aten = torch.ops.aten


class Kind(enum.Enum):
    """How a contribution reaches memory; the value is what the report says."""

    STORE = "stored by its one writer"
    STRIP = "tiles added to a strip"
    SUM = "summed in registers"
    SCATTER = "one fp32 add a score"


@dataclass(frozen=True)
class Plan:
    """One contribution: the buffer it goes to, how, and what its place depends on.

    checked: the place may be out of bounds. wide: the captured tensor has four bytes an element or more.
    """

    target: Any
    kind: Kind
    checked: bool
    axes: tuple[bool, bool, bool, bool]
    wide: bool
    antidiagonal: bool = False


@dataclass
class CapturedGradients:
    """The gradients of one flex_attention's captured tensors.

    buffers: one for each captured tensor, None where it needs no gradient. inlined: value, offset and in_bounds of each
    contribution as subgraphs, flat.
    """

    lengths: tuple[Any, Any]
    buffers: list[Any] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    inlined: list[Any] = field(default_factory=list)

    @property
    def needed(self) -> list[Any]:
        """The buffers there are."""
        return [b for b in self.buffers if b is not None]

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

        def mask(holds: Any) -> int:
            return sum(1 << i for i, plan in enumerate(self.plans) if holds(plan))

        return {
            "NUM_CONTRIBUTIONS": len(self.plans),
            "CHECKED_CONTRIBUTIONS": mask(lambda p: p.checked),
            "QUERY_FREE_CONTRIBUTIONS": mask(lambda p: not p.axes[2]),
            "KEY_FREE_CONTRIBUTIONS": mask(lambda p: not p.axes[3]),
            "ONE_WRITER_CONTRIBUTIONS": mask(lambda p: p.kind is Kind.STORE),
            "STRIPS": mask(lambda p: p.kind is Kind.STRIP),
            "ANTIDIAGONAL_STRIPS": mask(lambda p: p.antidiagonal),
            "STRIPS_BY_BATCH": mask(lambda p: p.kind is Kind.STRIP and p.axes[0]),
            "STRIPS_BY_HEAD": mask(lambda p: p.kind is Kind.STRIP and p.axes[1]),
            "STRIP_ROWS": strips.TILE_ROWS,
            "STRIP_OFFSET": strips.tile_shape(*self.lengths)[0] if self.has_strips else 0,
        }

    def results(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The gradients, in the captured tensors' own dtypes: rounded once, here."""
        convert = lowerings[torch.ops.prims.convert_element_type]
        folded = {id(p.target): _fold(p, self.lengths) for p in self.plans if p.kind is Kind.STRIP}
        results = []
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            if buffer is None:
                results.append(None)
                continue
            value = folded.get(id(buffer), buffer)
            if id(buffer) in folded:
                value = lowerings[aten.reshape](value, tensor.get_size())
            results.append(convert(value, tensor.get_dtype()))
        return tuple(results)


def plan_gradients(
    joint: JointGraph,
    node: Node,
    device: torch.device,
    captured: Sequence[Any],
    block_mask: FlexBlockMask,
    kernel_options: dict[str, Any],
) -> CapturedGradients:
    """Allocate the buffers and lower the subgraphs of every contribution of a flex_attention_backward node.

    ``kernel_options`` say which captured tensors are strips (none where whole tiles cannot be added).
    """
    extents = common.extents(node)
    ranges = extents_of(joint.module, extents, first=1)
    placeholders = joint.module.graph.find_nodes(op="placeholder")[JOINT_INPUTS:]
    result = CapturedGradients((extents[2], extents[3]))
    antidiagonal = kernel_options.get(strips.ANTIDIAGONAL_OPTION, 0)
    listed = kernel_options.get(strips.DIAGONAL_OPTION, 0) | antidiagonal
    if any(name.endswith(("BLOCK_M1", "BLOCK_M2")) and size > strips.TILE_ROWS for name, size in kernel_options.items()):
        listed = 0
    for i, (contributions, placeholder, tensor) in enumerate(zip(joint.captured, placeholders, captured, strict=True)):
        if contributions is None:
            result.buffers.append(None)
            continue
        shape = subgraphs.shape_of(placeholder)
        kind = Kind.SCATTER
        if _writes_once(contributions, shape, ranges):
            kind = Kind.STORE
        elif (listed >> i) & 1:
            kind = Kind.STRIP
        buffer = _buffer(kind, tensor, block_mask, device, result.lengths)
        result.buffers.append(buffer)
        for contribution in contributions:
            value = returning(joint.module, [contribution.value])
            subgraphs.clamp_reads(value, extents_of(value, extents, first=1))
            address, checked = subgraphs.address(joint.module, contribution, shape, ranges)
            subgraphs.clamp_reads(address, extents_of(address, extents, first=1))
            for module in (value, address):
                inputs = subgraphs.score_placeholders(device, torch.float32, gradient=True)
                result.inlined.extend(subgraphs.inline(module, inputs, captured))
            axes = axes_of(joint.module, contribution)
            own = Kind.SUM if kind is Kind.SCATTER and not (axes[2] and axes[3]) else kind
            wide = tensor.get_dtype().itemsize >= 4
            result.plans.append(Plan(buffer, own, checked, axes, wide, own is Kind.STRIP and bool((antidiagonal >> i) & 1)))
    return result


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
