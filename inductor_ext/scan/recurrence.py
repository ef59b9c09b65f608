"""``recurrence(a, x, before)``: the linear recurrence that a loop over time computes, with its gradient.

The gradient of ``y_t = a_t y_{t-1} + x_t`` through all later times is a recurrence with the same factors, back in time:

    lambda_t = g_t + a_{t+1} lambda_{t+1},          dx_t = lambda_t,          da_t = lambda_t y_{t-1}
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.depend import depend
from ..core.fx import working_dtype
from ..core.linear_scan import scanned
from .associative import cast, first_of_all, padded


def recurrence(a: Tensor | float, x: Tensor, before: Tensor, reverse: bool, dtype: torch.dtype) -> Tensor:
    """``y_t = a_t y_{t-1} + x_t`` along dim 0, with y_{-1} = ``before``; if ``reverse``, ``y_t = a_t y_{t+1} + x_t``.

    x: [T, ...]. a: a number, or [T, ...], or [...]. before: [...]. They broadcast. The result has ``dtype``, a floating one.
    """
    first = slice(-1, None) if reverse else slice(0, 1)
    # Only this product is computed, because a factor at another time may be infinite, and so would be its gradient.
    start = (a[first] if isinstance(a, Tensor) and a.dim() == x.dim() else a) * before + x[first]
    others = x.shape[0] - 1
    x = torch.where(first_of_all(x, reverse), padded(start, *((others, 0) if reverse else (0, others))), x).to(dtype)
    if isinstance(a, Tensor):
        a = (a if a.is_floating_point() else a.to(working_dtype(dtype))).expand(x.shape)
    return _Recurrence.apply(a, x, reverse)


class _Recurrence(torch.autograd.Function):
    """The recurrence from zeros. a: a number, or a tensor of the shape of x, [T, ...]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor | float, x: Tensor, reverse: bool) -> Tensor:
        y = scanned(_after_the_first(_factors(a, x), reverse), x, reverse, x.dtype)
        ctx.reverse, ctx.number = reverse, None if isinstance(a, Tensor) else a
        # A number has no gradient, which is what the states are needed for.
        ctx.save_for_backward(*((a, y) if isinstance(a, Tensor) else ()))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        # Otherwise the partitioner would compute what depends on the saved tensors only in the forward, and save that.
        saved = [depend(x, [grad]) for x in ctx.saved_tensors]
        factors = saved[0] if saved else _factors(ctx.number, grad)
        total = scanned(_after_the_first(factors, ctx.reverse), grad, not ctx.reverse, working_dtype(grad.dtype))
        da = None
        if ctx.needs_input_grad[0]:
            products = _after_the_first(total, ctx.reverse) * _after_the_first(saved[1], not ctx.reverse)
            da = padded(cast(products, saved[0].dtype), *((0, 1) if ctx.reverse else (1, 0)))
        return da, cast(total, grad.dtype), None


def _factors(a: Tensor | float, x: Tensor) -> Tensor:
    """The factors as a tensor of the shape of ``x``. A number is not rounded to half precision."""
    if isinstance(a, Tensor):
        return a
    return torch.full((), a, dtype=working_dtype(x.dtype), device=x.device).expand(x.shape)


def _after_the_first(x: Tensor, reverse: bool) -> Tensor:
    """``x`` [T, ...] without the time that a recurrence in this direction computes first: [T - 1, ...]."""
    return x[:-1] if reverse else x[1:]
