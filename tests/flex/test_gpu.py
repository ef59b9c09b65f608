"""The kernels on a GPU: every case against float64, and the same at sizes that fill it."""

import pytest
import torch

from .cases import BIASES, FEATURES, REFUSED

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", FEATURES + BIASES + REFUSED, ids=lambda c: c.name)
def test_matches_float64(case):
    assert torch.backends.cuda.matmul.allow_tf32 is False
    case.check("cuda")
