"""flex_attention on CPU tensors: every case against float64."""

import pytest

from .cases import BIASES, FEATURES, REFUSED


@pytest.mark.parametrize("case", FEATURES + BIASES + REFUSED, ids=lambda c: c.name)
def test_matches_float64(case):
    case.check("cpu")
