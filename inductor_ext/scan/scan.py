"""``scan(combine, xs)``: associative_scan along dim 0, with a gradient that is itself an associative scan, run backwards.

The scan is ``y_t = c(y_{t-1}, x_t)`` for k leaves, element by element, with ``y_0 = x_0``. J_t is the k x k matrix dc/dy at
``(y_{t-1}, x_t)``. The gradient of y_t through all later elements is

    lambda_t = g_t + J_{t+1}^T lambda_{t+1},          dx_t = (dc/dx)^T lambda_t,          dx_0 = lambda_0

This is a linear recurrence: a reverse scan over pairs ``(A, b)`` with ``(A1, b1) o (A2, b2) = (A2 A1, A2 b1 + b2)``. An
entry of J that is zero for all values (its two leaves do not interact) is not a leaf of that scan, and groups of leaves that
do not interact are scanned separately. Tensors are joined along time by padding and ``where``, never by concatenation. These
ops are pointwise, so Inductor fuses them into the scan.

Over many channels there are special kernels. ``scan_forward.py`` runs the forward, and the core's linear_scan the forward
of a gated recurrence. The latter also runs the gradient of a group of one leaf, and ``scan_backward.py`` the
gradient of leaves that interact, or whose coefficients are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.depend import depend
from ..core.fx import working_dtype
from ..core.linear_scan import scanned
from ..torch_api.graph import pytree
from . import scan_backward, scan_forward
from .associative import associative, backwards, cast, first_of_all, in_memory_order, padded, runs_triton
from .captured import Captured, unrounded_gradients
from .plan import ONE, Form, Jacobian, ScanPlan, plan_backward, plan_forward, record_backward, record_forward
from .recurrences import gated, reads
from .store_flipped import store_flipped


class _Scan(torch.autograd.Function):
    """The scan with its gradient.

    combine: takes the k leaves of the result so far, and then the k leaves of the next element. recurrence: see ``gated``.
    xs: k tensors [T, ...] of one shape.
    """

    @staticmethod
    def forward(
        ctx: Any, combine: Callable[..., Any], recurrence: tuple[int, int] | None, reverse: bool, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        plan = record_forward(plan_forward(combine, recurrence, xs))
        ys = _scanned_forward(plan, combine, reverse, xs)
        ctx.plan, ctx.combine, ctx.reverse = plan, combine, reverse
        ctx.save_for_backward(*xs, *ys)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y in ys if not y.is_floating_point()))
        return ys

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        given = [g for g in grads if g is not None]
        # Make the saved tensors depend on the given gradients. Otherwise the forward would compute what depends on the
        # saved tensors only, and save that in their place.
        saved = [depend(x, given) for x in ctx.saved_tensors]
        xs, ys = saved[: len(grads)], saved[len(grads) :]
        return None, None, None, *scan_gradients(ctx.plan, ctx.combine, xs, ys, grads, ctx.reverse)


def _scanned_forward(plan: ScanPlan, combine: Callable[..., Any], reverse: bool, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if plan.forward is Form.LINEAR:
        gate, state = plan.recurrence
        a, x = xs[gate], xs[state]
        (products,) = _scanned_forward(plan_forward(_product, None, [a]), _product, reverse, [a])
        ys = {gate: products, state: scanned(_later(a, reverse), x, reverse, x.dtype)}
        return ys[0], ys[1]
    if plan.forward is Form.CHANNELS:
        return tuple(scan_forward.scanned(plan.source, xs, reverse))
    two_levels = plan.forward is Form.TWO_LEVELS
    if reverse:
        return tuple(backwards(y) for y in associative(combine, [backwards(x) for x in xs], two_levels))
    return associative(combine, xs, two_levels)


def _later(x: Tensor, reverse: bool) -> Tensor:
    """``x`` [T, ...] without the element that a scan reads first: [T - 1, ...]."""
    return x[:-1] if reverse else x[1:]


def scan(
    combine: Callable[..., Any], xs: Sequence[Tensor], additional: Sequence[Any] = (), reverse: bool = False
) -> tuple[Tensor, ...]:
    """The associative scan of the leaves ``xs`` [T, ...] along dim 0, one tensor for each leaf and of its shape.

    The shapes of the leaves must broadcast behind dim 0. additional: the further operands of ``combine``: numbers, sizes, or
    tensors that broadcast to [...]. Tensors have a gradient. Tensors, and sizes that ``combine`` reads, become leaves whose
    elements are all the same, because Inductor's scan takes no further operands. reverse: scan from the end,
    ``y_t = c(y_{t+1}, x_t)``.
    """
    if any(x.shape != xs[0].shape for x in xs):
        return _scan_of_one_shape(combine, xs, additional, reverse)
    device, shape, count = xs[0].device, xs[0].shape, len(xs)
    additional = [
        torch.full((), x, dtype=torch.int64, device=device) if isinstance(x, torch.SymInt) and read else x
        for x, read in zip(additional, reads(combine, 2 * count, len(additional)), strict=True)
    ]
    captured = [x for x in additional if isinstance(x, Tensor)]
    if not captured:
        return _Scan.apply(lambda *flat: combine(*flat, *additional), gated(combine), reverse, *xs)
    whole = Captured(combine, count, additional)
    return _Scan.apply(whole, None, reverse, *xs, *whole.leaves(captured, shape))[:count]


def _scan_of_one_shape(
    combine: Callable[..., Any], xs: Sequence[Tensor], additional: Sequence[Any], reverse: bool
) -> tuple[Tensor, ...]:
    """``scan`` of the leaves, expanded to their common shape.

    Along an expanded dim all parts of a result are equal, and the first one is returned.
    """
    channels = torch.broadcast_shapes(*(x.shape[1:] for x in xs))
    aligned = [x.reshape(x.shape[0], *[1] * (len(channels) - x.dim() + 1), *x.shape[1:]) for x in xs]
    ys = scan(combine, [x.expand(x.shape[0], *channels) for x in aligned], additional, reverse)
    parts = []
    for y, x, given in zip(ys, aligned, xs, strict=True):
        for dim in range(1, x.dim()):
            y = y.narrow(dim, 0, 1) if x.shape[dim] != y.shape[dim] else y
        parts.append(y.reshape(given.shape))
    return tuple(parts)


def scan_gradients(
    plan: ScanPlan,
    combine: Callable[..., Any],
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    reverse: bool,
) -> list[Tensor | None]:
    """The gradients of ``xs``, given ``grads``, the gradients of ``ys = scan(combine, xs, reverse=reverse)``.

    plan: that of the forward. xs, ys: tensors [T, ...] of one shape. A gradient is None where there is none, in ``grads``
    and in the result.
    """
    if xs[0].shape[0] <= 1:
        return list(grads)
    with torch.enable_grad():
        steps = _Steps.of(combine, xs, ys, reverse)
        plan = plan_backward(plan, combine, steps.jacobian, xs, grads)
        record_backward(plan)
        if plan.backward[0].product is not None:
            return scan_backward.gradients(plan.backward[0].product, ys, xs, grads, reverse)
        # The gradient of a captured tensor is summed where it is computed, so it is not stored in either order.
        of_stock = all(group.form is Form.ONE_LEVEL for group in plan.backward)
        if reverse or not of_stock or not runs_triton(xs) or isinstance(combine, Captured):
            return _gradients(plan, combine, steps, xs, grads, reverse)
        # Inductor scans from the start only. In the order of that scan, its kernel computes the gradients too. (Scans in two
        # levels have several kernels, and were slower in this order.)
        xs, ys, grads = ([x if x is None else backwards(x) for x in tensors] for tensors in (xs, ys, grads))
        results = _gradients(plan, combine, _Steps.of(combine, xs, ys, True), xs, grads, True)
        return [x if x is None else in_memory_order(x, store_flipped) for x in results]


@dataclass(frozen=True)
class _Steps:
    """The steps ``after = combine(before, now)`` of a scan, from its second element on: leaves [T - 1, ...].

    floating: the numbers of the leaves that are differentiated; these leaves of ``before`` and ``now`` require gradients.
    """

    before: list[Tensor]
    now: list[Tensor]
    after: list[Tensor]
    floating: list[int]
    jacobian: Jacobian

    @staticmethod
    def of(combine: Callable[..., Any], xs: Sequence[Tensor], ys: Sequence[Tensor], reverse: bool) -> _Steps:
        """The steps of the scan of ``xs``, whose result is ``ys``."""
        floating = [i for i, x in enumerate(xs) if x.is_floating_point()]
        before, now = [_later(y, not reverse).detach() for y in ys], [_later(x, reverse).detach() for x in xs]
        for i in floating:
            before[i].requires_grad_()
            now[i].requires_grad_()
        after = pytree.tree_leaves(combine(*before, *now))
        return _Steps(before, now, after, floating, _jacobian(after, before, floating))


def _gradients(
    plan: ScanPlan,
    combine: Callable[..., Any],
    steps: _Steps,
    xs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    reverse: bool,
) -> list[Tensor | None]:
    """The gradients of ``scan_gradients`` by scans, one for each group of leaves in ``plan``."""
    adjoint = _adjoint(steps.jacobian, plan, grads, reverse)
    through = [i for i in adjoint if steps.after[i].requires_grad]
    outgoing = {i: _later(adjoint[i], reverse).to(steps.after[i].dtype) for i in through}
    parts = torch.autograd.grad(
        [steps.after[i] for i in through],
        [steps.now[i] for i in steps.floating],
        list(outgoing.values()),
        allow_unused=True,
    )
    unrounded = unrounded_gradients(combine, steps.before, steps.now, {i: _later(adjoint[i], reverse) for i in through})
    parts = [unrounded.get(i, part) for i, part in zip(steps.floating, parts, strict=True)]
    result: list[Tensor | None] = [None] * len(xs)
    for i, rest in zip(steps.floating, parts, strict=True):
        if i in outgoing and rest is outgoing[i]:
            # dc/dx is 1, for example for a leaf that is only added. The first element need not be put before the others.
            result[i] = cast(adjoint[i], xs[i].dtype)
            continue
        if rest is not None:
            result[i] = padded(rest, 0, 1) if reverse else padded(rest, 1, 0)
        if i in adjoint:
            later = torch.zeros_like(xs[i]) if rest is None else result[i]
            result[i] = torch.where(first_of_all(xs[i], reverse), adjoint[i].to(xs[i].dtype), later)
    return result


def _jacobian(after: Sequence[Tensor], before: Sequence[Tensor], floating: Sequence[int]) -> Jacobian:
    """∂after_i/∂before_j for all pairs of floating leaves, element by element, detached."""
    found = {}
    for i in floating:
        if not after[i].requires_grad:
            continue
        # ones and not ones_like: Inductor's joint passes remove the products with a filled tensor, which saves a kernel.
        ones = torch.ones(after[i].shape, dtype=after[i].dtype, device=after[i].device)
        columns = torch.autograd.grad(after[i], [before[j] for j in floating], ones, retain_graph=True, allow_unused=True)
        for j, column in zip(floating, columns, strict=True):
            if column is not None:
                # Through an addition, autograd returns the same tensor object.
                found[i, j] = ONE if column is ones else column.detach()
    return found


def _column(entry: Tensor | int | None, like: Tensor) -> Tensor:
    """An entry of the Jacobian ([T - 1, ...], or one, or None for zero) as a tensor of the shape of ``like[1:]``."""
    if isinstance(entry, Tensor):
        return entry.expand(like[1:].shape)
    return torch.full_like(like[1:], 0 if entry is None else 1)


def _sum(b1: Tensor, b2: Tensor) -> tuple[Tensor]:
    return (b1 + b2,)


def _product(a1: Tensor, a2: Tensor) -> tuple[Tensor]:
    return (a1 * a2,)


def _adjoint(jacobian: Jacobian, plan: ScanPlan, grads: Sequence[Tensor | None], reverse: bool) -> dict[int, Tensor]:
    """lambda [T, ...] of every leaf that the plan's backward has, in fp32 or float64.

    It is computed from the element that the scan reads last to the one that it reads first.
    """
    turned = (lambda x: x) if reverse else backwards
    (some, *_) = (g for g in grads if g is not None)
    found: dict[int, Tensor] = {}
    for group in plan.backward:
        leaves, entries = group.leaves, group.entries
        wide = {i: working_dtype((some if grads[i] is None else grads[i]).dtype) for i in leaves}
        if group.form is Form.LINEAR:
            (i,) = leaves
            given = torch.zeros_like(some) if grads[i] is None else grads[i]
            entry = jacobian[i, i]
            found[i] = scanned(None if entry is ONE else _column(entry, some), given, not reverse, wide[i])
            continue
        b = [turned((torch.zeros_like(some) if grads[i] is None else grads[i]).to(wide[i])) for i in leaves]
        if group.form is not Form.NONE:
            # The last element has no Jacobian of a later element.
            columns = [_column(jacobian.get((i, j)), some) for j, i in entries]
            whole = (padded(x, 1, 0) if reverse else padded(x, 0, 1) for x in columns)
            coefficients = [turned(x).to(wide[i]) for x, (_, i) in zip(whole, entries, strict=True)]
            combine = _linear(entries, leaves) if entries else _sum
            b = list(associative(combine, [*coefficients, *b], group.form is Form.TWO_LEVELS)[len(entries) :])
        found.update({i: turned(total) for i, total in zip(leaves, b, strict=True)})
    return found


def _linear(entries: Sequence[tuple[int, int]], group: Sequence[int]) -> Callable[..., list[Tensor]]:
    """The combine_fn ``(A1, b1) o (A2, b2) = (A2 A1, A2 b1 + b2)`` on flat leaves.

    The leaves are the entries of A at ``entries``, and then b for each leaf of ``group``.
    """
    count = len(entries) + len(group)

    def combine(*flat: Tensor) -> list[Tensor]:
        (a1, b1), (a2, b2) = (
            (dict(zip(entries, half, strict=False)), dict(zip(group, half[len(entries) :], strict=True)))
            for half in (flat[:count], flat[count:])
        )
        products = []
        for i, last in entries:
            terms = [a2[i, j] * a1[j, last] for j in group if (i, j) in a2 and (j, last) in a1]
            products.append(sum(terms[1:], terms[0]) if terms else torch.zeros_like(a1[i, last]))
        return [*products, *(sum((a2[i, j] * b1[j] for j in group if (i, j) in a2), b2[i]) for i in group)]

    return combine
