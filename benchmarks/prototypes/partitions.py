"""A small Gluon kernel whose warps do different work: it shows what racecheck reports of Triton's own code.

    program: two warpgroups and a warp each fill a third of a tensor

The kernel itself uses no shared memory and no barriers. Triton does: to give the other warps their work and what they need
for it (here a number that is read from memory), and for a sum over the warps of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LENGTH = 128


@gluon.jit
def _fill(out, start, number, N: gl.constexpr, WARPS: gl.constexpr):
    positions = gl.arange(0, N, gl.BlockedLayout([1], [32], [WARPS], [0]))
    for step in range(number):
        gl.store(out + start + positions, positions * step + gl.sum(positions, 0))


# Sanitizers watch kernels whose names contain "triton".
@gluon.jit
def triton_partitions(OUT, NUMBER, N: gl.constexpr):
    number = gl.load(NUMBER)
    gl.warp_specialize([
        (_fill, (OUT, 0, number, N, 4)),
        (_fill, (OUT, N, number, N, 4)),
        (_fill, (OUT, 2 * N, number, N, 1)),
    ], [4, 1], [48, 24])  # fmt: skip


def fill(number: int) -> Tensor:
    """Return three times 0 to 127, multiplied with ``number`` - 1, plus the sum of 0 to 127, in int32."""
    out = torch.empty(3, LENGTH, device="cuda", dtype=torch.int32)
    triton_partitions[(4,)](out, torch.tensor(number, device="cuda", dtype=torch.int32), LENGTH, num_warps=4)
    return out
