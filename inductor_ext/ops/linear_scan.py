"""``y_t = x_t + c_t y_{t-1}``: what the gradient of every scan is, and gated recurrences themselves."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..compat import uses_triton_on_cpu

#: Fewer lanes do not fill a GPU, where a program owns 16 neighbours, or a row along time, for all time.
FEWEST_LANES = 2048
FEWEST_ROWS = 512
#: Lanes that lie next to each other in memory, at least.
FEWEST_NEIGHBOURS = 16


def accumulator(coefficients: Any, inputs: Any) -> torch.dtype:
    """The dtype that the op computes in, for tensors (or Inductor's) with a ``dtype``."""
    wide = torch.promote_types(inputs.dtype, torch.float32)
    return wide if coefficients is None else torch.promote_types(wide, coefficients.dtype)


@torch.library.custom_op("gradfuse::linear_scan", mutates_args=())
def linear_scan(
    coefficients: Tensor | None, inputs: Tensor, shape: list[int], dim: int, reverse: bool, dtype: torch.dtype
) -> Tensor:
    """``y_t = inputs_t + coefficients_{t-1} y_{t-1}``; if ``reverse``, ``y_t = inputs_t + coefficients_t y_{t+1}``.

    inputs [P, T, L], coefficients [P, T - 1, L] (None for ones), of floating dtypes. Computed in fp32 (float64 if one of
    them is) and rounded to ``dtype``; the result is contiguous, of ``shape``: T at ``dim``, P and L in one dim or several
    before and behind. So it has the dims of what uses it, and Inductor puts that into the same kernel.
    """
    wide = accumulator(coefficients, inputs)
    out = torch.empty(inputs.shape, dtype=wide, device=inputs.device)
    steps = range(inputs.shape[1])
    before: int | None = None
    for t in reversed(steps) if reverse else steps:
        out[:, t] = inputs[:, t].to(wide)
        if before is not None:
            last = out[:, before]
            out[:, t] += last if coefficients is None else coefficients[:, t if reverse else before].to(wide) * last
        before = t
    return out.to(dtype).reshape(shape)


@linear_scan.register_fake
def _(coefficients: Tensor | None, inputs: Tensor, shape: list[int], dim: int, reverse: bool, dtype: torch.dtype) -> Tensor:
    return inputs.new_empty(shape, dtype=dtype)


def suits(x: Tensor) -> bool:
    """Whether the op's kernel is the way to scan ``x`` [T, ...] along dim 0: many lanes next to each other, or many rows."""
    if x.device.type != "cuda" and not uses_triton_on_cpu():
        return False
    if not x.is_floating_point() or x.dim() < 2 or x.shape[0] < 2:
        return False
    if x.stride(0) == 1:
        return x[0].numel() >= FEWEST_ROWS
    return x.stride(-1) == 1 and x.shape[-1] >= FEWEST_NEIGHBOURS and x[0].numel() >= FEWEST_LANES


def scanned(coefficients: Tensor | None, inputs: Tensor, reverse: bool, dtype: torch.dtype) -> Tensor:
    """``linear_scan`` of tensors of any rank, [T - 1, ...] and [T, ...] of one shape otherwise."""
    split = innermost_lanes(inputs)
    factors = None if coefficients is None else planes(coefficients, split)
    times, *rest = inputs.shape
    shape = [*rest[: split - 1], times, *rest[split - 1 :]]
    result = linear_scan(factors, planes(inputs, split), shape, split - 1, reverse, dtype)
    return result.movedim(split - 1, 0)


def innermost_lanes(x: Tensor) -> int:
    """The first of the dims of ``x`` [T, ...] that lie within one time; their number where time is innermost."""
    split = x.dim()
    if x.stride(0) != 1:
        split -= 1
        while split > 1 and x.stride(split - 1) == x.stride(split) * x.shape[split]:
            split -= 1
    return split


def planes(x: Tensor, split: int) -> Tensor:
    """``x`` [T, ...] as [P, T, L]: the dims before and from ``split`` on as one each."""
    times, *rest = x.shape
    before, behind = (math.prod(rest[part]) for part in (slice(split - 1), slice(split - 1, None)))
    return x.reshape(times, before, behind).transpose(0, 1)
