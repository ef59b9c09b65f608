"""Plan how the gradients of captured tensors are reduced: one plan for each contribution, one buffer for each tensor.

index of a contribution                   plan
every element has one writer              STORE    stored in the tensor's dtype, so no cast; no zeros if there is no mask
a diagonal                                STRIP    TMA adds whole tiles to a skewed strip, which is folded afterwards
                                          DIAGONAL without TMA: summed along the diagonals of a tile
a pair of positions                       BLOCK    with TMA: whole tiles are added
few entries for queries, others for keys  BY_ENTRY summed for each key and entry of the query, by a matmul with a one-hot
does not depend on the query or the key   SUM      summed in registers, along the axes on which it does not depend
t[h, q, k], if there are many tiles       OVER_BATCH  a kernel of its own sums it over the batch (batch_sums.py)
anything else                             SCATTER  one fp32 add for each score, or for scores of a tile that share an element
read for each pair, the same for heads    PARTIAL  stored into a workspace, which is summed afterwards (pair_entries.py)
any of these, deterministic               PARTIAL  the same (deterministic.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from ..core import subgraphs
from ..core.kernels import LARGEST_TILE
from ..core.templates import Listed
from ..torch_api.ir import contiguous_strides, full
from ..torch_api.lowering import empty_strided, lowerings
from ..torch_api.sizes import statically_known_true
from . import batch_sums, deterministic, pair_entries
from .captured_grads import Contribution
from .copies import copies
from .inlining import InlinedContribution, Inlining
from .kinds import Reduction
from .kinds.diagonals import STRIP_ROWS, strip_shape
from .plans import Plan

aten = torch.ops.aten


class NotInOrder(Exception):
    """The index of a contribution depends on the score itself, so only atomics in the kernel can reduce it."""


@dataclass
class CapturedGradients:
    """The gradients of one flex_attention's captured tensors.

    extents: the lengths of b, h, q and k as Inductor's expressions. plans: the contributions. inlined: the subgraphs for
    value, offset and in_bounds of each, in one flat list. learned: whether each captured tensor needs a gradient. targets:
    the buffer that the kernel writes for each plan. buffers: for each captured tensor the buffer that becomes its gradient,
    or None if it needs no gradient, or if its plans have workspaces instead. Both are empty until they are allocated.
    apart: the contribution that has a kernel of its own, with its subgraphs and, once there is one, the gradient; it is not
    among the plans.
    """

    extents: list[Any]
    plans: list[Plan] = field(default_factory=list)
    inlined: list[Any] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    targets: list[Any] = field(default_factory=list)
    buffers: list[Any] = field(default_factory=list)
    apart: Plan | None = None
    inlined_apart: list[Any] = field(default_factory=list)
    gradient_apart: Any = None

    @property
    def lengths(self) -> tuple[Any, Any]:
        """The numbers of queries and keys."""
        _, _, queries, keys = self.extents
        return queries, keys

    @property
    def written(self) -> list[Any]:
        """The buffers that the kernel writes."""
        return list({id(target): target for target in self.targets}.values())

    @property
    def note(self) -> str:
        """The sentence for the report."""
        how = [value for _, value in self.reductions]
        adds = f"; at most {self.atomics} atomic adds for each score" if self.atomics else ""
        return f"there are {len(how)} contributions to captured gradients" + (": " + ", ".join(how) if how else "") + adds

    @property
    def reductions(self) -> tuple[tuple[int, str], ...]:
        """How each contribution is reduced, with the number of its captured tensor."""
        every = [*self.plans, self.apart] if self.apart else self.plans
        return tuple((plan.owner, plan.reduction.value) for plan in every)

    @property
    def atomics(self) -> int:
        """The largest number of atomic adds for each score: for contributions of which nothing better is known."""
        each = (plan for plan in self.plans if plan.reduction is Reduction.SCATTER)
        return sum(not (plan.keys_repeat or plan.writers.coarse) for plan in each)

    @property
    def wide_tiles(self) -> bool:
        """Whether tiles of some captured tensor with at least four bytes for each element take part in the pipeline."""
        return any(all(plan.axes[2:]) and plan.wide and not plan.as_vector for plan in self.plans)

    @property
    def gathers(self) -> bool:
        """Whether some contribution is one add for each score."""
        return any(plan.reduction is Reduction.SCATTER for plan in self.plans)

    @property
    def moves_blocks(self) -> bool:
        """Whether TMA moves blocks of a table of pairs."""
        return any(plan.moved_by_tma for plan in self.plans)

    @property
    def keys_descend(self) -> bool:
        """Whether TMA moves blocks in which keys are in descending order."""
        return any(plan.moved_by_tma and plan.block is not None for plan in self.plans)

    @property
    def by_entry(self) -> bool:
        """Whether key programs sum some contribution for each key and each entry of the queries."""
        return any(plan.reduction is Reduction.BY_ENTRY for plan in self.plans)

    @property
    def stores_scores(self) -> bool:
        """Whether there is a workspace with a number for each score."""
        each = (plan for plan in self.plans if plan.reduction is Reduction.PARTIAL)
        return any(all(plan.axes[2:]) and not plan.as_vector for plan in each)

    @property
    def adds_conditionally(self) -> bool:
        """Whether single elements are added in some blocks only."""
        return any(plan.adds_where is not None and plan.reduction is Reduction.SCATTER for plan in self.plans)

    @property
    def in_large_tables(self) -> bool:
        """Whether the scores of a tile belong to very many entries, of which the position of neither determines one."""
        return any(plan.reduction is Reduction.SCATTER and not (plan.may_share or plan.shares_row) for plan in self.plans)

    @property
    def adds_blocks(self) -> bool:
        """Whether TMA adds blocks to the gradient of a table of pairs."""
        return any(plan.moved_by_tma and plan.reduction is Reduction.BLOCK for plan in self.plans)

    @property
    def repeats(self) -> bool:
        """Whether query programs sum whole tiles of some contribution, of which there is one for all keys."""
        return any(plan.keys_repeat for plan in self.plans)

    @property
    def shares_rows(self) -> bool:
        """Whether some contribution may be one value for each query or each key of a tile."""
        return any(plan.shares_row for plan in self.plans)

    @property
    def tallest_tile(self) -> int:
        """The largest number of queries in a tile, which is limited by the block of a strip."""
        return STRIP_ROWS if self.has_strips else LARGEST_TILE

    @property
    def has_strips(self) -> bool:
        """Whether tiles are added to a strip."""
        return any(plan.reduction is Reduction.STRIP for plan in self.plans)

    @property
    def has_strips_of_short_rows(self) -> bool:
        """Whether tiles are added to a strip of an image whose rows are shorter than the longest tile."""
        strips = [plan for plan in self.plans if plan.reduction is Reduction.STRIP and plan.table is not None]
        return any(plan.table.kind.longest_tile < LARGEST_TILE for plan in strips)

    @property
    def sums_along_keys(self) -> bool:
        """Whether some contribution is one value for each query, which query programs sum in registers."""
        return any(plan.reduction is Reduction.SUM and plan.axes[2] for plan in self.plans)

    @property
    def sums_only(self) -> bool:
        """Whether all contributions are one value for each key or for each program, which key programs sum in registers."""
        return all(plan.reduction is Reduction.SUM and not plan.axes[2] for plan in self.plans)

    @property
    def strips_only(self) -> bool:
        """Whether all contributions, of which there are some, are tiles that are added to a strip."""
        return bool(self.plans) and all(plan.reduction is Reduction.STRIP for plan in self.plans)

    def options(self) -> dict[str, Any]:
        """Return the contributions, over which the backward template iterates, and the shape of strips."""
        return {
            "CONTRIBUTIONS": Listed(
                plan.seen_by_template(number, self._copies(plan.owner)) for number, plan in enumerate(self.plans)
            ),
            "STRIP_ROWS": STRIP_ROWS,
            "STRIP_OFFSET": strip_shape(*self.lengths)[0] if self.has_strips else 0,
        }

    def _copies(self, owner: int) -> int:
        plans = [plan for plan in self.plans if plan.owner == owner]
        crowded = any(plan.crowded for plan in plans) and all(plan.table is None for plan in plans)
        return copies(plans[0].contribution.shape) if crowded else 1

    def allocate(
        self, tensors: Sequence[Any], unmasked: bool, device: torch.device, tilings: Sequence[dict[str, Any]]
    ) -> None:
        """Allocate the buffers that the kernel writes. They are large enough for each of ``tilings``.

        unmasked: no score is hidden, so that elements with one writer need no zeros.
        """
        extents = self.extents
        targets: dict[int, Any] = {}
        for owner, (learned, tensor) in enumerate(zip(self.learned, tensors, strict=True)):
            plans = [i for i, plan in enumerate(self.plans) if plan.owner == owner]
            if self.apart is not None and self.apart.owner == owner:
                self.buffers.append(None)
                continue
            if any(self.plans[i].reduction is Reduction.PARTIAL for i in plans):
                self.buffers.append(None)
                for i in plans:
                    plan = self.plans[i]
                    if plan.as_vector:
                        targets[i] = plan.table.kind.workspace(extents, device, tilings)
                    else:
                        targets[i] = deterministic.workspace(plan.axes, extents, device, zeroed=not unmasked)
                continue
            self.buffers.append(self._buffer([self.plans[i] for i in plans], tensor, device, unmasked) if learned else None)
            targets.update(dict.fromkeys(plans, self.buffers[-1]))
        self.targets = [targets[i] for i in range(len(self.plans))]

    def _buffer(self, plans: list[Plan], tensor: Any, device: torch.device, unmasked: bool) -> Any:
        size = tensor.get_size()
        one_writer = any(plan.reduction is Reduction.STORE for plan in plans)
        if one_writer and unmasked and plans[0].everywhere:
            return empty_strided(size, contiguous_strides(size), dtype=tensor.get_dtype(), device=device)
        if one_writer:
            return full(size, 0, tensor.get_dtype(), device)
        if plans and plans[0].table is not None:
            return plans[0].table.kind.buffer(plans[0].reduction, size, self.lengths, device)
        several = self._copies(plans[0].owner) if plans else 1
        return full([several, *size] if several > 1 else size, 0, torch.float32, device)

    def results(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Return the gradients in the dtypes of the captured tensors. This is the only rounding."""
        results = []
        for owner, (buffer, tensor) in enumerate(zip(self.buffers, tensors, strict=True)):
            total = self.gradient_apart if self.apart is not None and self.apart.owner == owner else buffer
            plans = [(plan, target) for plan, target in zip(self.plans, self.targets, strict=True) if plan.owner == owner]
            first = plans[0][0] if plans else None
            if first is not None and first.table is not None and buffer is not None:
                total = first.table.kind.folded(buffer, first.reduction, tensor.get_size(), self.lengths)
            elif first is not None and buffer is not None and self._copies(owner) > 1:
                total = lowerings[aten.sum](buffer, axis=[0])
            for plan, target in plans if first is not None and first.reduction is Reduction.PARTIAL else ():
                part = self._in_order(plan, target, tensor, tensors)
                total = part if total is None else lowerings[aten.add](total, part)
            convert = lowerings[torch.ops.prims.convert_element_type]
            if total is None and not isinstance(tensor, sympy.Basic) and tensor.get_dtype().is_floating_point:
                # The score_mod detaches it, and the graph may add this gradient to that of another use of the tensor.
                total = full(tensor.get_size(), 0, tensor.get_dtype(), tensor.get_device())
            # A cast to the same dtype would be a copy.
            rounded = total is not None and total.get_dtype() is not tensor.get_dtype()
            results.append(convert(total, tensor.get_dtype()) if rounded else total)
        return tuple(results)

    def _in_order(self, plan: Plan, target: Any, tensor: Any, tensors: Sequence[Any]) -> Any:
        """Sum a workspace of partial sums to a gradient."""
        if plan.as_vector:
            return plan.table.kind.total(target, plan.axes)
        if plan.dim_of_heads is not None and not plan.contribution.plain:
            return pair_entries.summed(target, plan, tensors, tensor)
        total = deterministic.summed(target, plan.axes)
        if plan.contribution.plain:
            return deterministic.with_indices(total, plan.contribution, self.extents, tensor.get_size())
        return deterministic.scattered(total, plan.axes, plan.address, tensors, tensor.get_size())


def plan_gradients(
    inlined: Sequence[Sequence[InlinedContribution] | None],
    inlining: Inlining,
    *,
    tma_allowed: bool,
    in_order: bool,
    over_batch: bool,
) -> CapturedGradients:
    """Plan the contributions to the gradient of each captured tensor (None if it needs none).

    ``tma_allowed``: the kernel may add whole tiles to the gradients of tables. ``in_order``: use no atomics.
    ``over_batch``: one tensor may have a kernel of its own, which sums its gradient over the batch. Raises NotInOrder if
    atomics are needed and not allowed.
    """
    result = CapturedGradients([subgraphs.expression(n) for n in inlining.lengths])
    for owner, parts in enumerate(inlined):
        result.learned.append(parts is not None)
        table = inlining.tables.of(owner)
        once = _writes_once(parts or (), inlining.lengths)
        if parts and table is not None:
            itemsize = inlining.captured[owner].get_dtype().itemsize if once else torch.float32.itemsize
            if table.block is not None:
                writable = all(part.block is not None and part.block.aligned(itemsize) for part in parts)
            else:
                writable = table.kind.writable(parts[0].contribution.shape, itemsize)
            table = table if writable else None
        for part in parts or ():
            if in_order and not once and part.contribution.on_score:
                raise NotInOrder
            dtype = inlining.captured[owner].get_dtype()
            takes = over_batch and len(parts) == 1 and batch_sums.takes(part.contribution, dtype, inlining.lengths)
            if once:
                reduction = Reduction.STORE
            elif takes and result.apart is None:
                reduction = Reduction.OVER_BATCH
            elif in_order or (table is None and all(p.address is not None for p in parts)):
                reduction = Reduction.PARTIAL
            elif table is not None:
                reduction = table.kind.reduction(tma_allowed, result.lengths)
            else:
                scattered = Reduction.BY_ENTRY if part.by_entry else Reduction.SCATTER
                reduction = scattered if all(part.contribution.axes[2:]) else Reduction.SUM
            wide = dtype.itemsize >= 4
            # Another contribution to the same tensor could be added where this one stores.
            inside = reduction is Reduction.SCATTER and len(parts) == 1 and bool(part.inside)
            everywhere = once and _writes_everywhere(part.contribution, inlining.lengths)
            plan = Plan(
                owner,
                part.contribution,
                part.writers,
                part.block,
                reduction,
                everywhere,
                part.checked,
                table,
                wide,
                part.address,
                inside,
                part.dim_of_heads,
            )
            buffers = [part.buffers[0], *part.by_entry] if reduction is Reduction.BY_ENTRY else [*part.buffers]
            buffers += part.inside if inside else []
            buffers += [] if plan.adds_where is None else part.condition
            if reduction is Reduction.OVER_BATCH:
                result.apart, result.inlined_apart = plan, buffers
                continue
            result.plans.append(plan)
            result.inlined.extend(buffers)
    return result


def _writes_once(parts: Sequence[InlinedContribution], lengths: Sequence[Any]) -> bool:
    """Return whether every element of a gradient gets a value from at most one score: ``t[b, h, q, k]`` above all.

    The indices must determine q and k even if there is only one query or key. A tensor that they do not index has a gradient
    that is summed and added.
    """
    if len(parts) != 1:
        return False
    determined = parts[0].writers.determined
    return all(determined[2:]) and all(d or statically_known_true(n == 1) for d, n in zip(determined, lengths, strict=True))


def _writes_everywhere(contribution: Contribution, lengths: Sequence[Any]) -> bool:
    """Return whether a contribution that determines all positions writes all elements."""
    positions = contribution.positions
    if not contribution.plain or None in positions:
        return False
    return all(statically_known_true(lengths[p] == n) for p, n in zip(positions, contribution.shape, strict=True))
