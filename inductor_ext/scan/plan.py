"""How a scan runs, forward and backward. Both forms are chosen here, and nowhere else.

There are two moments. ``plan_forward`` chooses while the scan itself is traced. The gradient needs the Jacobian of the
combine_fn, which exists only while the backward is traced, so ``plan_backward`` chooses then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import Tensor

from ..core.linear_scan import supported
from ..core.report import record, traced_line
from . import scan_backward, scan_forward
from .associative import long_and_few
from .captured import Captured

NAME = "scans"

#: An entry of the Jacobian that is one for all values.
ONE = 1
#: ∂c_i/∂y_j by (i, j). Entries that are zero for all values are left out.
Jacobian = dict[tuple[int, int], Tensor | int]


class Form(Enum):
    """How leaves are scanned along time."""

    LINEAR = "a linear recurrence in one kernel"
    CHANNELS = "a kernel over channels"
    CARRIED = "carried back in time"
    FUSED = "a linear recurrence that computes its own coefficients"
    TWO_LEVELS = "a scan in two levels"
    ONE_LEVEL = "a scan in one level"
    NONE = "no scan"


@dataclass(frozen=True)
class Group:
    """The form of the gradient of leaves that interact.

    why: the reason for the form. entries: the entries (j, i) of the transposed Jacobian that a scan in levels carries; a
    running sum has none. product: the vector-Jacobian product of the combine_fn, for CARRIED and FUSED.
    """

    leaves: tuple[int, ...]
    form: Form
    why: str
    entries: tuple[tuple[int, int], ...] = ()
    product: scan_backward.Product | None = None


@dataclass(frozen=True)
class ScanPlan:
    """How one scan runs.

    forward: the form of the scan, because of ``why``. recurrence: see ``gated``, for LINEAR. source: the combine_fn as the
    operand of an op, for CHANNELS. where: the user's line, or None where the plan is not recorded. backward: the groups of
    leaves that have a gradient; it is empty until ``plan_backward``.
    """

    forward: Form
    why: str
    recurrence: tuple[int, int] | None = None
    source: str | None = None
    where: str | None = None
    backward: tuple[Group, ...] = ()


def plan_forward(combine: Callable[..., Any], recurrence: tuple[int, int] | None, xs: Sequence[Tensor]) -> ScanPlan:
    """Choose the form of the scan of ``xs`` [T, ...] along dim 0; recurrence: see ``gated``."""
    if recurrence is not None and all(supported(x) for x in xs):
        why = "its combine_fn is a gated recurrence, and its channels fill a GPU"
        return ScanPlan(Form.LINEAR, why, recurrence=recurrence)
    if scan_forward.supported(xs):
        source = scan_forward.combination(combine, [x.dtype for x in xs])
        if source is not None:
            return ScanPlan(Form.CHANNELS, "its channels fill a GPU and lie next to each other in memory", source=source)
    return ScanPlan(*_in_levels(xs))


def plan_backward(
    plan: ScanPlan, combine: Callable[..., Any], jacobian: Jacobian, xs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> ScanPlan:
    """Complete ``plan`` for ``grads``, the gradients of the scan of ``xs`` (None where there is none)."""
    groups = _groups(_reached(jacobian, grads), jacobian)
    one_op = _in_one_op(plan, combine, jacobian, xs, groups)
    if one_op is not None:
        return replace(plan, backward=(one_op,))
    (some, *_) = (g for g in grads if g is not None)
    return replace(plan, backward=tuple(_plan_group(group, jacobian, some) for group in groups))


def _in_one_op(
    plan: ScanPlan, combine: Callable[..., Any], jacobian: Jacobian, xs: Sequence[Tensor], groups: list[list[int]]
) -> Group | None:
    """Return the form of all groups in one op that computes the Jacobian where it is used, or None if there are others."""
    apart = all(len(group) == 1 for group in groups)
    if not scan_backward.supported(xs) or (apart and not _computes_coefficients(plan, combine, jacobian, groups)):
        return None
    leaves = sorted(itertools.chain(*groups))
    product = scan_backward.product(combine, len(xs), leaves, apart)
    if product is None:
        return None
    if apart:
        why = "each leaf interacts with itself only, its coefficients are computed, and its channels fill a GPU"
        return Group(tuple(leaves), Form.FUSED, why, product=product)
    return Group(tuple(leaves), Form.CARRIED, "its leaves interact, and its channels fill a GPU", product=product)


def _computes_coefficients(plan: ScanPlan, combine: Callable[..., Any], jacobian: Jacobian, groups: list[list[int]]) -> bool:
    """Whether a leaf has a coefficient that is not an operand (as in a gated recurrence) and not one.

    A captured tensor is a leaf of which all elements are the same, and whose gradient is a sum of what is not rounded yet.
    """
    own = [jacobian.get((i, i)) for (i,) in groups]
    computed = plan.forward is Form.CHANNELS and any(isinstance(entry, Tensor) for entry in own)
    return computed and len(own) <= scan_backward.MOST_APART and not isinstance(combine, Captured)


def _plan_group(group: list[int], jacobian: Jacobian, some: Tensor) -> Group:
    leaves, own = tuple(group), jacobian.get((group[0], group[0])) if len(group) == 1 else None
    if own is not None and supported(some):
        return Group(leaves, Form.LINEAR, "each leaf interacts with itself only, and its channels fill a GPU")
    entries = () if own is ONE else _closed({(j, i) for i, j in jacobian if i in group and j in group})
    if not entries and own is not ONE:
        return Group(leaves, Form.NONE, "no time depends on an earlier one")
    return Group(leaves, *_in_levels([some] * (len(entries) + len(group))), entries)


def _in_levels(xs: Sequence[Tensor]) -> tuple[Form, str]:
    if long_and_few(xs):
        return Form.TWO_LEVELS, "whole rows would leave most of a GPU idle, because they are long and few"
    return Form.ONE_LEVEL, "there is no kernel of gradfuse for this device, combine_fn or layout, or stock's is as fast"


def record_forward(plan: ScanPlan) -> ScanPlan:
    """Record the form of the forward, once for each traced scan, and return the plan with the user's line."""
    where = traced_line()
    if where is not None:
        record(NAME, "associative_scan", plan.forward.value, plan.why, where)
    return replace(plan, where=where)


def record_backward(plan: ScanPlan) -> None:
    """Record the forms of the backward. The user's line is that of the forward."""
    if plan.where is not None and traced_line() is not None:
        forms = {group.form.value: group.why for group in plan.backward}
        record(NAME, "associative_scan_backward", "; ".join(forms), "; ".join(forms.values()), plan.where)


def _reached(jacobian: Jacobian, grads: Sequence[Tensor | None]) -> set[int]:
    """The leaves that have a lambda: those with a gradient, and those on which such a leaf depends."""
    reached = {i for i, g in enumerate(grads) if g is not None}
    while more := {j for i, j in jacobian if i in reached} - reached:
        reached |= more
    return reached


def _groups(leaves: set[int], jacobian: Jacobian) -> list[list[int]]:
    """The leaves in groups. Leaves that interact are in one group."""
    groups: list[set[int]] = [{i} for i in sorted(leaves)]
    for i, j in jacobian:
        if i in leaves and j in leaves:
            first, second = (next(g for g in groups if n in g) for n in (i, j))
            if first is not second:
                first |= second
                groups.remove(second)
    return [sorted(g) for g in groups]


def _closed(entries: set[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The entries that can be nonzero in a power of a matrix whose nonzero entries are ``entries``."""
    closed = set(entries)
    while more := {(i, last) for i, j in closed for k, last in closed if j == k} - closed:
        closed |= more
    return tuple(sorted(closed))
