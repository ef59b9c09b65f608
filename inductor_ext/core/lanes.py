"""The layout that kernels over lanes read: a scan [T, ...] along dim 0 as planes [P, T, L] of L lanes next to each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ..torch_api.config import uses_triton_on_cpu

#: Fewer lanes do not fill a GPU, where a program or a thread owns some of them for all time.
FEWEST_LANES = 2048
#: Lanes that lie next to each other in memory, at least.
FEWEST_NEIGHBOURS = 16


def runs_kernels(x: Tensor) -> bool:
    """Whether Inductor emits Triton for ``x``."""
    return x.is_cuda or uses_triton_on_cpu()


def many(xs: Sequence[Tensor]) -> bool:
    """Whether ``xs`` [T, ...], of one shape, are many lanes, next to each other (or the same) in memory."""
    x = xs[0]
    if x.dim() < 2 or any(t.stride(0) == 1 or t.stride(-1) not in (0, 1) for t in xs):
        return False
    return x.shape[-1] >= FEWEST_NEIGHBOURS and x[0].numel() >= FEWEST_LANES


def innermost(xs: Sequence[Tensor]) -> int:
    """The first of the dims of ``xs`` [T, ...] that lie within one time; their number where time is innermost."""
    return max(map(_innermost, xs))


def _innermost(x: Tensor) -> int:
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


def unfolded(x: Tensor, split: int) -> list[int]:
    """The shape of ``x`` [T, ...] with T moved behind the dims before ``split``: that of the result of an op on planes."""
    times, *rest = x.shape
    return [*rest[: split - 1], times, *rest[split - 1 :]]
