"""Biases that stay in the kernel, as in real models, whose pairs are too many for a table: on a GPU, against float64."""

import dataclasses

import pytest
import torch

from inductor_ext.attention import hoisting

from .case import Case

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_table_of_pairs(monkeypatch):
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)


def relative_shift(length, leading):
    """Transformer-XL's and Conformer's bias, computed from the query and shared by the axes that are not in ``leading``."""

    def bias(t):
        def score_mod(s, b, h, q, k):
            axes = (b, h)[2 - len(leading) :]
            return s + t["r"][(*axes, q, q - k + length - 1)]

        return score_mod

    return Case("relative_shift", {"r": (*leading, length, 2 * length - 1)}, bias, bias)


#: Length, head dim, leading axes. TMA moves blocks only if the length is a multiple of 128.
LENGTHS = ((97, 64, (2, 2)), (1000, 128, (2, 2)), (256, 32, (2,)), (640, 64, (2, 2)), (384, 128, (2, 2)), (384, 80, (2,)))
SHIFTS = [
    dataclasses.replace(relative_shift(length, leading), length=length, dim=dim, dtype=dtype)
    for length, dim, leading in LENGTHS
    for dtype in (torch.float32, torch.bfloat16)
]


def described(case):
    return f"{case.length}_{case.dim}_{str(case.dtype)[6:]}_{len(case.tables['r'])}"


@pytest.mark.parametrize("case", SHIFTS, ids=described)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "causal"])
def test_relative_shift(case, masked):
    dataclasses.replace(case, mask=(lambda b, h, q, k: q >= k) if masked else None).check("cuda")


def test_relative_shift_is_the_same_in_every_deterministic_run():
    case = dataclasses.replace(relative_shift(256, (2,)), length=256, dim=64, dtype=torch.bfloat16)
    case.check("cuda", options={"deterministic": True})
