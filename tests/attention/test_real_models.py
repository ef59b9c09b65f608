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


def packed(length, dim, dtype, kind):
    """T5's buckets of positions that restart in each document of 200, or that do not follow each other in half of the keys."""
    generator = torch.Generator().manual_seed(0)
    position = torch.arange(length) % 200
    if kind == "scattered":
        position[length // 2 :] = torch.randint(0, 200, (length - length // 2,), generator=generator)

    def bias(t):
        on_device = position.to(t["t"].device)

        def score_mod(s, b, h, q, k):
            return s + t["t"][(on_device[k] - on_device[q]).abs().clamp(1).log().long(), h]

        return score_mod

    mask = (lambda b, h, q, k: q // 200 == k // 200) if kind == "documents" else None
    return Case("packed", {"t": (8, 4)}, bias, bias, mask=mask, heads=4, kv_heads=2, length=length, dim=dim, dtype=dtype)


@pytest.mark.parametrize("kind", ["documents", "plain", "scattered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("length, dim", [(97, 64), (1000, 64), (640, 64), (384, 128), (1000, 32)])
def test_packed_documents(length, dim, dtype, kind):
    packed(length, dim, dtype, kind).check("cuda")


def test_packed_documents_are_the_same_in_every_deterministic_run():
    packed(640, 64, torch.bfloat16, "scattered").check("cuda", options={"deterministic": True})
