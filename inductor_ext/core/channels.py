"""The layout that the kernels over channels read.

A channel is one independent recurrence: a scan [T, ...] along dim 0 has as many channels as there are elements at one time.
The kernels read the scan as P slices of T times and L channels each, [P, T, L]; the L channels of a slice lie next to each
other in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ..torch_api.config import uses_triton_on_cpu

#: Fewer channels do not fill a GPU, because a program or a thread computes all times of the channels that it owns.
FEWEST_CHANNELS = 2048
#: At least this many channels must lie next to each other in memory.
FEWEST_NEIGHBOURS = 16


def runs_kernels(x: Tensor) -> bool:
    """Whether Inductor emits Triton for ``x``."""
    return x.is_cuda or uses_triton_on_cpu()


def enough_channels(xs: Sequence[Tensor]) -> bool:
    """Whether ``xs`` [T, ...], all of one shape, have enough channels for a kernel over channels.

    The channels must also lie next to each other in memory, or be the same element (stride 0).
    """
    x = xs[0]
    if x.dim() < 2 or any(t.stride(0) == 1 or t.stride(-1) not in (0, 1) for t in xs):
        return False
    return x.shape[-1] >= FEWEST_NEIGHBOURS and x[0].numel() >= FEWEST_CHANNELS


def innermost(xs: Sequence[Tensor]) -> int:
    """The first of the innermost dims of ``xs`` [T, ...] that lie next to each other within one time.

    This is the rank of ``xs`` where time is the innermost dim.
    """
    return max(map(_innermost, xs))


def _innermost(x: Tensor) -> int:
    split = x.dim()
    if x.stride(0) != 1:
        split -= 1
        while split > 1 and x.stride(split - 1) == x.stride(split) * x.shape[split]:
            split -= 1
    return split


def slices(x: Tensor, split: int) -> Tensor:
    """``x`` [T, ...] as slices [P, T, L]: P joins the dims 1 to ``split - 1``, and L joins the dims from ``split`` on."""
    times, *rest = x.shape
    before, behind = (math.prod(rest[part]) for part in (slice(split - 1), slice(split - 1, None)))
    return x.reshape(times, before, behind).transpose(0, 1)


def unfolded(x: Tensor, split: int) -> list[int]:
    """The shape of ``x`` [T, ...] with T moved behind the dims before ``split``.

    The result of an op on slices has this shape.
    """
    times, *rest = x.shape
    return [*rest[: split - 1], times, *rest[split - 1 :]]
