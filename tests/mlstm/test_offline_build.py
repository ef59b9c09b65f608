"""Build the kernels of mLSTM for GPUs that are not here: they build, and do not spill where a tile avoids it."""

import re

import pytest
import torch

from tests.mlstm.test_compiled import emitted
from tests.support.offline import OFFLINE, builds
from tests.support.targets import on_target

pytestmark = OFFLINE


#: Bytes of stack a thread by (width, dtype, arch, direction): what no tile that was tried avoids.
MLSTM_SPILLS = {
    (256, torch.bfloat16, 90, "forward"): 8,
    (256, torch.float32, 80, "backward"): 312,
    (256, torch.float32, 90, "backward"): 264,
    (256, torch.float32, 100, "backward"): 264,
    (256, torch.float32, 120, "backward"): 224,
}


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.breadth(0)
@pytest.mark.parametrize(
    "width, dtype, arch",
    builds(
        [(w, BF16) for w in (64, 128, 256, 512)] + [(w, FP32) for w in (64, 256)],
        {(128, BF16, 90), (512, BF16, 100), (256, BF16, 120), (512, BF16, 120)},
    ),
)
def test_mlstm_builds_without_spills(width, dtype, arch, builder):
    with on_target(architecture=arch):
        sources = emitted(width, width, dtype, length=16)
    for direction, source in zip(("forward", "backward"), sources, strict=True):
        warps, stages = (int(re.search(rf"{name}=(\d+)", source).group(1)) for name in ("num_warps", "num_stages"))
        built = builder.build(source, arch, warps, stages)
        built.check(MLSTM_SPILLS.get((width, dtype, arch, direction), 0))


@pytest.mark.breadth(0)
@pytest.mark.parametrize("width, dtype, spills", [(128, BF16, 16), (256, BF16, 64), (64, FP32, 0)])
def test_mlstm_with_states_builds(width, dtype, spills, builder):
    """The widest heads in chunks, and more than one chunk. Only the backward may spill, by ``spills`` bytes."""
    with on_target(architecture=90):
        sources = emitted(width, width, dtype, length=512, first=True, last=True)
    for source, most in zip(sources, (0, 0, 0, spills), strict=True):
        warps, stages = (int(re.search(rf"{name}=(\d+)", source).group(1)) for name in ("num_warps", "num_stages"))
        builder.build(source, 90, warps, stages).check(most)
