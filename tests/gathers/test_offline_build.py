"""Build the kernels of gathers for GPUs that are not here: they build and do not spill."""

import contextlib
from unittest import mock

import pytest
import torch
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_ext.gathers.row_sums import bin_sums
from tests.support.emitted import (
    bin_sums_kernel,
    counting_kernels,
    entry_sums_kernel,
    kernels_of,
    segment_kernels,
)
from tests.support.interpreter import triton_on_cpu
from tests.support.offline import OFFLINE, QUICK_ARCHITECTURES

pytestmark = OFFLINE


@pytest.mark.breadth(0)
@pytest.mark.parametrize("arch", QUICK_ARCHITECTURES)
def test_sorted_segments_build_without_spills(arch, builder):
    for source, num_warps in segment_kernels():
        builder.build(source, arch, num_warps, 1).check()


@pytest.mark.breadth(0)
@pytest.mark.parametrize("arch", QUICK_ARCHITECTURES)
@pytest.mark.parametrize(
    "heads, entries, parts, warps",
    [(32, 512, 2, 8), (32, 512, 3, 8), (64, 512, 1, 4), (64, 512, 3, 8), (32, 256, 2, 4), (64, 64, 3, 4)],
)
def test_sums_of_entries_build_without_spills(heads, entries, parts, warps, arch, builder):
    builder.build(entry_sums_kernel(heads, entries, parts), arch, warps, 3).check()


@pytest.mark.parametrize("arch", QUICK_ARCHITECTURES)
def test_sorts_by_counting_build_without_spills(arch, builder):
    for source, num_warps in counting_kernels().values():
        builder.build(source, arch, num_warps, 1).check()


@pytest.mark.breadth(0)
@pytest.mark.parametrize("arch", QUICK_ARCHITECTURES)
@pytest.mark.parametrize("slices, parts", [((16, 12), 3), ((64,), 1)])
def test_sums_of_bins_build_without_spills(slices, parts, arch, builder):
    builder.build(bin_sums_kernel(slices, 512, parts), arch, 4, 1).check()


def test_sums_of_bins_build_with_positions_of_64_bits(builder):
    """The sums have 2.25e9 elements."""
    codes = []
    index = torch.zeros(1100, 50, dtype=torch.int64)
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, contextlib.ExitStack() as scope:
        scope.enter_context(triton_on_cpu())
        scope.enter_context(mock.patch.object(GraphLowering, "save_output_code", codes.append))
        # The kernel cannot run with fake tensors.
        scope.enter_context(contextlib.suppress(Exception))
        run = torch.compile(lambda v, i: bin_sums(v, i, 32000, 3), backend="gradfuse", dynamic=False)
        run(torch.empty(64, 1100, 50), fake.from_tensor(index))
    (kernel,) = [k for code in codes for k in kernels_of(code) if "BLOCK_E" in k]
    assert "INDEX_DTYPE : tl.constexpr = tl.int64" in kernel
    builder.build(kernel, 90, 4, 1)
