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
