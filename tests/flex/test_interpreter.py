"""The emitted Triton kernels, run by Triton's interpreter on CPU tensors: every case against float64."""

import pytest
import torch

from tests.interpreter import triton_on_cpu

from .cases import BIASES, FEATURES, REFUSED

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")


@pytest.mark.parametrize("case", FEATURES + BIASES + REFUSED, ids=lambda c: c.name)
def test_matches_float64(case):
    with triton_on_cpu():
        case.check("cpu")


#: Cases whose captured gradients take every way to memory, and shapes that end within a tile.
ONE_PASS = {"odd_length", "longer_keys", "head_dim_40", "gqa", "kv_batch_1", "causal_small_blocks", "head_scale", "key_bias"}
ONE_PASS |= {"query_scale", "pair", "pair_batch", "twice", "diagonals_merged"}


@pytest.mark.parametrize("case", [c for c in FEATURES + BIASES + REFUSED if c.name in ONE_PASS], ids=lambda c: c.name)
def test_one_pass_matches_float64(case):
    """The form of the backward kernel that half precision takes on a GPU, with atomic adds in place of TMA's."""
    with triton_on_cpu():
        case.check("cpu", kernel_options={"bwd_ONE_PASS": True})


#: Cases in which tiles are read, stored or added by TMA, with masks and lengths that end within a tile.
BY_TMA = {"odd_length", "causal_small_blocks", "gqa", "antidiagonal", "diagonals_merged", "buckets", "pair", "pair_batch"}


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("case", [c for c in FEATURES + BIASES + REFUSED if c.name in BY_TMA], ids=lambda c: c.name)
def test_by_tma_matches_float64(case, one_pass):
    with triton_on_cpu(tma=True):
        case.check("cpu", kernel_options={"bwd_ONE_PASS": one_pass})


#: Every shape of workspace, with masks and lengths that end within a tile.
IN_ORDER = {"causal", "odd_length", "gqa", "head_scale", "key_bias", "query_scale", "pair", "pair_batch", "antidiagonal"}
IN_ORDER |= {"thrice", "constant_and_variable_index", "diagonals_merged", "window_reads_out_of_range"}
IN_ORDER |= {"swin", "odd_strides_above_1024", "data_dependent_pair"}


@pytest.mark.parametrize("case", [c for c in FEATURES + BIASES + REFUSED if c.name in IN_ORDER], ids=lambda c: c.name)
def test_deterministic_matches_float64(case):
    with triton_on_cpu():
        case.check("cpu", options={"deterministic": True})


#: Lookups by query and key together, which are hoisted when they are small; left in the kernel they are gathers and scatters.
IN_THE_KERNEL = {"swin", "odd_strides_above_1024", "data_dependent_pair"}


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["atomics", "deterministic"])
@pytest.mark.parametrize("case", [c for c in BIASES + REFUSED if c.name in IN_THE_KERNEL], ids=lambda c: c.name)
def test_lookups_in_the_kernel_match_float64(case, options):
    with triton_on_cpu():
        case.check("cpu", options={"disable": ["hoisting"], **options})
