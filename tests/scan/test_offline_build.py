"""Build the kernels of scans for GPUs that are not here: they build and do not spill."""

import re

import pytest
import torch

from tests.scan import test_linear_scan, test_scan_backward, test_scan_forward
from tests.support.offline import OFFLINE, builds

pytestmark = OFFLINE


SCANS = {
    "lanes": lambda dtype: test_linear_scan.emitted(20, dtype),
    "rows": lambda dtype: test_linear_scan.emitted(1, dtype),
    "backward": lambda dtype: test_scan_backward.emitted(test_scan_backward.matrix_product, dtype),
    "apart": lambda dtype: test_scan_backward.emitted(test_scan_backward.log_space, dtype),
    "forward": lambda dtype: test_scan_forward.emitted(test_scan_forward.matrix_product, dtype),
    "constants": lambda dtype: test_scan_forward.emitted(test_scan_forward.segmented, dtype),
    "conditions": lambda dtype: test_scan_forward.emitted(test_scan_forward.either_and_sum, dtype),
}
#: Bytes of stack a thread: the tile was the fastest all the same.
SCAN_SPILLS = {("lanes", torch.bfloat16, 90): 16}


@pytest.mark.breadth(0)
@pytest.mark.parametrize(
    "name, dtype, arch",
    builds(
        [(name, dtype) for name in SCANS for dtype in (torch.float32, torch.bfloat16)],
        {
            ("lanes", torch.float32, 90),
            ("backward", torch.float32, 90),
            ("apart", torch.float32, 90),
            ("constants", torch.float32, 90),
        },
    ),
)
def test_scans_build_without_spills(name, dtype, arch, builder):
    source = SCANS[name](dtype)
    num_warps = int(re.search(r"num_warps=(\d+)", source).group(1))
    builder.build(source, arch, num_warps, 1).check(SCAN_SPILLS.get((name, dtype, arch), 0))
