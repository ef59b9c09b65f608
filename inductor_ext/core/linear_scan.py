"""The linear recurrence ``y_t = x_t + c_t y_{t-1}``.

The gradient of every scan is such a recurrence, a gated recurrence is one itself, and so are the states of mLSTM in chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import channels
from .fx import working_dtype

#: Fewer rows along time do not fill a GPU, because each row is scanned by one warp.
FEWEST_ROWS = 512


def accumulator(coefficients: Any, inputs: Any) -> torch.dtype:
    """The dtype that the op computes in. The operands are tensors, or Inductor's IR: anything that has a ``dtype``."""
    wide = working_dtype(inputs.dtype)
    return wide if coefficients is None else torch.promote_types(wide, coefficients.dtype)


@torch.library.custom_op("gradfuse::linear_scan", mutates_args=())
def linear_scan(
    coefficients: Tensor | None, inputs: Tensor, shape: list[int], dim: int, reverse: bool, dtype: torch.dtype
) -> Tensor:
    """``y_t = inputs_t + coefficients_{t-1} y_{t-1}``; if ``reverse``, ``y_t = inputs_t + coefficients_t y_{t+1}``.

    inputs: [P, T, L]. coefficients: [P, T - 1, L], or None for ones. Both have floating dtypes. The op computes in fp32
    (in float64 if one of them is float64) and rounds to ``dtype``. The result is contiguous and has the shape ``shape``: T
    is at ``dim``, and P and L are one dim or several dims before and behind it. So the result has the dims of the ops that
    use it, and Inductor puts these ops into the same kernel.
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


def supported(x: Tensor) -> bool:
    """Whether the op's kernel should scan ``x`` [T, ...] along dim 0.

    It should if there are enough channels that lie next to each other in memory, or, where time is innermost, enough rows.
    """
    if not channels.runs_kernels(x) or not x.is_floating_point() or x.dim() < 2 or x.shape[0] < 2:
        return False
    return x[0].numel() >= FEWEST_ROWS if x.stride(0) == 1 else channels.enough_channels([x])


def scanned(coefficients: Tensor | None, inputs: Tensor, reverse: bool, dtype: torch.dtype) -> Tensor:
    """``linear_scan`` of tensors of any rank: ``coefficients`` [T - 1, ...] and ``inputs`` [T, ...].

    Their other dims have the same sizes. The result has the shape of ``inputs``.
    """
    split = channels.innermost([inputs])
    factors = None if coefficients is None else channels.slices(coefficients, split)
    shape = channels.unfolded(inputs, split)
    result = linear_scan(factors, channels.slices(inputs, split), shape, split - 1, reverse, dtype)
    return result.movedim(split - 1, 0)
