"""What the tests themselves rely on: the shares of the suite, and the fast reductions and scans of Triton's interpreter."""

import itertools
import math

import numpy as np
import pytest
import torch

from tests.attention.case import relative_error
from tests.conftest import pytest_runtest_setup, share_of
from tests.support.emitted import segment_kernels
from tests.support.interpreter import INTERPRETED, triton_on_cpu
from tests.support.offline import OFFLINE, loops_and_spills
from tests.support.whole_tiles import _reduce, _scan

if not torch.cuda.is_available():
    from triton.runtime.interpreter import ReduceOps, ScanOps

    GENERIC_REDUCE, GENERIC_SCAN = ReduceOps.generic_reduce, ScanOps.generic_scan


def test_the_shares_are_all_tests_and_share_none():
    items = list(range(1004))
    shares = [share_of(items, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(itertools.chain(*shares)) == items
    for wrong in ("0/3", "4/3"):
        with pytest.raises(pytest.UsageError, match="numbered from 1 to 3"):
            share_of(items, wrong)


def test_no_test_begins_when_the_seconds_are_over(request, monkeypatch):
    monkeypatch.setattr(request.config.option, "seconds", 3600)
    pytest_runtest_setup(request.node)
    monkeypatch.setattr(request.config.option, "seconds", 0)
    with pytest.raises(pytest.skip.Exception, match="seconds are over"):
        pytest_runtest_setup(request.node)


def test_an_error_that_is_not_a_number_fails():
    """It is smaller than every bound, if it is not the first of those that ``max`` gets."""
    assert max([0.0, math.nan]) < 1e-5
    for got, want in ((math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf)):
        with pytest.raises(AssertionError, match="not a number"):
            relative_error(torch.tensor([got, 1.0]), torch.tensor([want, 1.0]))


@INTERPRETED
@pytest.mark.parametrize("shape", [(1,), (8,), (4, 8), (2, 4, 8)])
@pytest.mark.parametrize("keep_dims", [False, True])
def test_whole_tiles_are_combined_as_their_elements_are(shape, keep_dims):
    """The affine maps of a recurrence, whose order matters, against the interpreter's own loops over elements."""
    import triton.language as tl
    from triton.runtime import interpreter

    class Affine:
        @staticmethod
        def fn(a1, b1, a2, b2):
            return a1 * a2, b1 * a2 + b2

    rng = np.random.default_rng(0)
    axes = range(len(shape))
    with triton_on_cpu():
        patched = interpreter._patch_lang(type("Kernel", (), {"__globals__": {"tl": tl}}))
        try:
            make = interpreter.ReduceScanOpInterface(0, Affine).to_tensor
            inputs = tuple(make(rng.standard_normal(shape).astype(np.float32), tl.float32) for _ in range(2))
            # Over all axes only for vectors, because of several operands the interpreter flattens the first one alone.
            for axis in (*axes, *([None] if len(shape) == 1 else [])):
                operation = interpreter.ReduceOps(axis, Affine, keep_dims)
                _assert_agreement(_reduce(operation, inputs), GENERIC_REDUCE(operation, inputs))
            for axis in axes:
                operation = interpreter.ScanOps(axis, Affine, False)
                _assert_agreement(_scan(operation, inputs), GENERIC_SCAN(operation, inputs))
        finally:
            patched.restore()


def _assert_agreement(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.type == b.type and np.shape(a.handle.data) == np.shape(b.handle.data)
        np.testing.assert_allclose(a.handle.data, b.handle.data, rtol=1e-5, atol=1e-6)


@INTERPRETED
def test_the_language_is_as_before_after_a_kernel():
    import triton.language as tl

    load = tl.load
    with triton_on_cpu():
        x = torch.randn(300)
        assert torch.equal(torch.compile(lambda x: x.cummax(0).values)(x), x.cummax(0).values)
    assert tl.load is load


def test_spills_in_loops_are_told_from_those_around_them():
    """A branch forward is no loop, and a branch to itself, which ends every kernel, is none either."""
    sass = """
        /*0000*/                   STL [R1+0x4], R4 ;     /* 0x0000040401007387 */
        /*0010*/              @!P0 BRA 0x0030 ;
        /*0020*/                   STL [R1+0x8], R4 ;
        /*0030*/                   LDL R2, [R1+0x8] ;
        /*0040*/               @P1 BRA 0x0060
        /*0050*/                   LDL.LU R3, [R1+0xc] ;
        /*0060*/              @!P0 BRA 0x0030 ;
        /*0070*/                   LDL.LU R4, [R1+0x4] ;
        /*0080*/                   BRA 0x0080;
    """
    assert loops_and_spills(sass) == ([(0x30, 0x60)], ["LDL R2, [R1+0x8]", "LDL.LU R3, [R1+0xc]"])


BROKEN = """
def triton_broken(arg_A):
    pass
{how}
# 'signature': {{'arg_A': '*fp32'}}
"""


@OFFLINE
@pytest.mark.breadth(0)
@pytest.mark.parametrize("how", ["raise ValueError('of the kernel')", "import os; os._exit(3)"])
def test_a_failed_build_names_its_kernel_and_is_the_only_one_to_fail(how, builder):
    with pytest.raises(AssertionError, match=r"triton_broken for sm_90 was not built(.|\n)*(of the kernel|ended with 3)"):
        builder.build(BROKEN.format(how=how), 90, 4, 1)
    (source, num_warps), *_ = segment_kernels()
    builder.build(source, 90, num_warps, 1).check()
