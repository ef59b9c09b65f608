"""The emitted Triton kernels, run by Triton's interpreter on CPU tensors: every case against float64."""

import json
from unittest import mock

import pytest
import torch
from torch._inductor import select_algorithm
from torch._inductor.utils import fresh_cache
from torch.nn.attention.flex_attention import flex_attention

from inductor_ext.attention import backward, hoisting
from tests.support.interpreter import triton_on_cpu

from .case import relative_error
from .cases import BIASES, FEATURES, REFUSED

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"),
]


#: The kernels of these cases are the same as those of others; test_cpu.py tests what is decided before the kernels.
SLOW = {"gqa_one_kv_head", "longer_queries", "head_dim_128", "negative_index", "alibi", "softcap", "nested_four_deep"}
SLOW |= {"never_used", "whole_table_transformed", "constant_and_variable_index", "output_without_score", "expanded_view"}


def cases(names=None, slow=()):
    """The cases of these names (all without), those in ``slow`` marked so."""
    chosen = [c for c in FEATURES + BIASES + REFUSED if names is None or c.name in names]
    return [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.name in slow else []) for c in chosen]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("case", cases(slow=SLOW))
def test_matches_float64(case):
    with triton_on_cpu():
        case.check("cpu")


#: Cases for every reduction of captured gradients, with shapes that end inside a tile.
ONE_PASS = {"odd_length", "longer_keys", "head_dim_40", "gqa", "kv_batch_1", "causal_small_blocks", "head_scale", "key_bias"}
ONE_PASS |= {"query_scale", "pair", "pair_batch", "twice", "diagonals_merged"}


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "case", cases(ONE_PASS, slow={"longer_keys", "head_dim_40", "kv_batch_1", "query_scale", "pair_batch", "twice"})
)
def test_one_pass_matches_float64(case):
    """The form of the backward kernel that half precision takes on a GPU, with atomic adds in place of TMA's."""
    with triton_on_cpu():
        case.check("cpu", kernel_options={"bwd_ONE_PASS": True})


#: Cases in which tiles are read, stored or added by TMA, with masks and lengths that end within a tile.
BY_TMA = {"odd_length", "causal_small_blocks", "gqa", "antidiagonal", "diagonals_merged", "buckets", "pair", "pair_batch"}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("one_pass", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", cases(BY_TMA, slow={"antidiagonal", "pair_batch", "buckets"}))
def test_by_tma_matches_float64(case, one_pass):
    with triton_on_cpu(tma=True):
        case.check("cpu", kernel_options={"bwd_ONE_PASS": one_pass})


LATE = {"odd_length", "causal_small_blocks", "gqa", "key_bias", "antidiagonal", "head_dim_40"}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("case", cases(LATE, slow={"antidiagonal", "head_dim_40", "key_bias"}))
def test_dq_that_is_added_late_matches_float64(case):
    late, transposed = (mock.patch.object(backward, f, return_value=True) for f in ("_may_add_late", "_may_transpose_dq"))
    with triton_on_cpu(tma=True), late as may_add_late, transposed:
        case.check("cpu", kernel_options={"bwd_ONE_PASS": True})
    assert may_add_late.called


#: Scores of a tile share entries of a table, in each way that duplicates.jinja tells apart.
SHARING = {
    "detached_in_one_of_two_reads",
    "very_many_entries",
    "sums_at_coordinates",
    "clamped_distance",
    "packed_buckets",
    "segments",
    "rows_and_columns_of_an_image",
    "shared_and_out_of_bounds",
}
#: Every element has at most one writer, or seems to.
ONE_WRITER = {"relative_shift", "relative_shift_of_keys", "larger_pair", "relative_shift_that_wraps", "half_of_the_distance"}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("case", cases(SHARING | ONE_WRITER))
def test_shared_entries_match_float64(case, one_pass, monkeypatch):
    # These lengths stand for long ones, whose lookups by query and key are not made into tables.
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)
    with triton_on_cpu():
        case.check("cpu", kernel_options={"bwd_ONE_PASS": one_pass})


#: Every shape of workspace, with masks and lengths that end within a tile.
IN_ORDER = {"causal", "odd_length", "gqa", "head_scale", "key_bias", "query_scale", "pair", "pair_batch", "antidiagonal"}
IN_ORDER |= {"thrice", "constant_and_variable_index", "diagonals_merged", "window_reads_out_of_range"}
IN_ORDER |= {"swin", "odd_strides_above_1024", "data_dependent_pair"}


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "case",
    cases(
        IN_ORDER,
        slow={
            "causal",
            "gqa",
            "query_scale",
            "pair_batch",
            "antidiagonal",
            "swin",
            "thrice",
            "odd_strides_above_1024",
            "window_reads_out_of_range",
        },
    ),
)
def test_deterministic_matches_float64(case):
    with triton_on_cpu():
        case.check("cpu", options={"deterministic": True})


#: Lookups by query and key together, which are hoisted when they are small; left in the kernel they are gathers and scatters.
IN_THE_KERNEL = {"swin", "odd_strides_above_1024", "data_dependent_pair"}


@pytest.mark.breadth(1)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["atomics", "deterministic"])
@pytest.mark.parametrize("case", cases(IN_THE_KERNEL, slow={"swin"}))
def test_lookups_in_the_kernel_match_float64(case, options):
    with triton_on_cpu():
        case.check("cpu", options={"disable": ["hoisting"], **options})


def test_max_autotune_writes_the_times_of_its_choices_where_stock_does(tmp_path, monkeypatch):
    """Users name the file by TORCHINDUCTOR_FLEX_ATTENTION_LOGGING_FILE, which Inductor reads once a process."""
    written = tmp_path / "choices.json"
    times = classmethod(lambda cls, choices, *_, **__: {choice: 1.0 + i for i, choice in enumerate(choices)})
    monkeypatch.setattr(select_algorithm, "get_flex_attention_log_filename", lambda: str(written))
    monkeypatch.setattr(select_algorithm.AlgorithmSelectorCache, "benchmark_choices", times)
    query = torch.randn(1, 2, 16, 16, requires_grad=True)
    with fresh_cache(), triton_on_cpu():
        attention = torch.compile(flex_attention, backend="gradfuse", mode="max-autotune-no-cudagraphs")
        attention(query, query, query, score_mod=lambda s, b, h, q, k: s * 2).sum().backward()
    # The form of an entry differs between releases.
    forward, backward = (str(entry) for entry in json.loads(written.read_text()))
    assert "forward" in forward and "'BLOCK_M'" in forward and "num_warps" in forward
    assert "backward" in backward and "'BLOCK_M1'" in backward


def test_a_captured_number_of_symbolic_value():
    """Under ``dynamic`` a captured int is a symbol, and no tensor."""

    def attend(query, heads):
        return flex_attention(query, query, query, score_mod=lambda s, b, h, q, k: s + (k - q) * ((h + 1) / heads))

    query = torch.randn(1, 2, 16, 16, requires_grad=True)
    with triton_on_cpu():
        out = torch.compile(attend, backend="gradfuse", dynamic=True)(query, 7)
        (got,) = torch.autograd.grad(out.square().sum(), query)
    exact, at = query.detach().double().requires_grad_(), torch.arange(16)
    bias = (at - at[:, None]) * ((torch.arange(2.0).double() + 1) / 7)[:, None, None]
    (want,) = torch.autograd.grad(((exact @ exact.mT / 4 + bias).softmax(-1) @ exact).square().sum(), exact)
    assert (got - want).norm() < 1e-5 * want.norm()


FLOAT64 = {
    "number": ((), lambda t: lambda s, b, h, q, k: s * t),
    "row": ((2, 16), lambda t: lambda s, b, h, q, k: s * t[h, q]),
    "diagonal": ((2, 32), lambda t: lambda s, b, h, q, k: s + t[h, q - k + 16]),
    "pair": ((2, 16, 16), lambda t: lambda s, b, h, q, k: s + t[h, q, k]),
    "written_once": ((1, 2, 16, 16), lambda t: lambda s, b, h, q, k: s + t[b, h, q, k]),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("tma", [False, True], ids=["by element", "tma"])
@pytest.mark.parametrize("name", FLOAT64)
def test_a_float64_tensor_beside_fp32_queries(name, tma):
    shape, score_mod = FLOAT64[name]
    table = (torch.rand(shape, dtype=torch.float64) + 0.5).requires_grad_()
    query = torch.randn(1, 2, 16, 16, requires_grad=True)
    with triton_on_cpu(tma=tma):
        attend = torch.compile(lambda q, t: flex_attention(q, q, q, score_mod=score_mod(t)), backend="gradfuse")
        out = attend(query, table)
        got = torch.autograd.grad(out.square().sum(), [query, table])
    exact = query.detach().double().requires_grad_()
    b, h, q, k = (torch.arange(n).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in enumerate((1, 2, 16, 16)))
    dense = score_mod(table)(exact @ exact.mT / 4, b, h, q, k).softmax(-1) @ exact
    want = torch.autograd.grad(dense.square().sum(), [exact, table])
    assert out.dtype == torch.float32
    for mine, right in zip(got, want, strict=True):
        assert (mine - right).norm() < 1e-5 * right.norm()


def test_a_mask_is_written_into_a_captured_bias():
    """In the backward, zeros are written into the gradient of the bias. The kernel that computes it must not mistake what
    this gives for its own operand."""
    query, key, value = (torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3))
    table, hidden = torch.randn(1, 2, 32, 32, requires_grad=True), torch.rand(1, 2, 32, 32) < 0.3

    def attention(query, key, value, table):
        bias = table * 1.0
        bias[hidden] = -1e4
        # The multiplication in the backward is fused into the kernel, so that Inductor writes the kernel's code last.
        return flex_attention(query, key * 2, value, score_mod=lambda s, b, h, q, k: s + bias[b, h, q, k])

    with triton_on_cpu():
        out = torch.compile(attention, backend="gradfuse")(query, key, value, table)
        got = torch.autograd.grad(out.sin().sum(), (query, key, value, table))
    exact = [x.double() for x in (query, key, value, table)]
    scores = exact[0] @ (exact[1] * 2).mT / 4 + exact[3].masked_fill(hidden, -1e4)
    want = torch.autograd.grad((scores.softmax(-1) @ exact[2]).sin().sum(), (query, key, value, table))
    assert max(relative_error(x, y) for x, y in zip(got, want, strict=True)) < 1e-5
