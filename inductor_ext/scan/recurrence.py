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
    x = torch.where(first_of_all(x, reverse), a * before + x, x).to(dtype)
    a = a.to(dtype) if isinstance(a, Tensor) else x.new_full((), a)
    return _Recurrence.apply(a.expand(x.shape), x, reverse)


class _Recurrence(torch.autograd.Function):
    """The recurrence from zeros. a, x: [T, ...], of one shape and dtype."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor, reverse: bool) -> Tensor:
        y = scanned(_after_the_first(a, reverse), x, reverse, x.dtype)
        ctx.reverse = reverse
        ctx.save_for_backward(a, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        # Otherwise the partitioner would compute what depends on the saved tensors only in the forward, and save that.
        a, y = (depend(x, [grad]) for x in ctx.saved_tensors)
        total = scanned(_after_the_first(a, ctx.reverse), grad, not ctx.reverse, working_dtype(grad.dtype))
        da = None
        if ctx.needs_input_grad[0]:
            products = _after_the_first(total, ctx.reverse) * _after_the_first(y, not ctx.reverse)
            da = padded(cast(products, a.dtype), *((0, 1) if ctx.reverse else (1, 0)))
        return da, cast(total, grad.dtype), None


def _after_the_first(x: Tensor, reverse: bool) -> Tensor:
    """``x`` [T, ...] without the time that a recurrence in this direction computes first: [T - 1, ...]."""
    return x[:-1] if reverse else x[1:]
