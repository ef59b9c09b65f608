"""Snapshots of the joint graph after the rewrites of scatters and gathers, so that a reviewer can read the diff."""

import pytest
import torch

from inductor_ext.gathers import gathers
from tests.support import snapshots
from tests.support.joint_graphs import rewritten

TOKENS, TOPK, WIDTH = 6, 2, 4


def permute(x, chosen):
    return x[chosen.argsort(stable=True) // TOPK]


def combine(y, weight, chosen):
    zeros = torch.zeros(TOKENS, WIDTH, dtype=y.dtype)
    return zeros.index_add(0, chosen.argsort(stable=True) // TOPK, y * weight[:, None])


def two_lookups(x, chosen):
    return x[chosen] + x[chosen.flip(0)]


def part_of_a_permutation(y, chosen):
    return y[chosen.argsort(stable=True)[2:7]]


def rows(count):
    return torch.randn(count, WIDTH).bfloat16().requires_grad_()


CHOSEN = torch.zeros(TOKENS * TOPK, dtype=torch.int64)
WEIGHT = torch.ones(TOKENS * TOPK).bfloat16().requires_grad_()
GRAPHS = {
    "permute": (permute, rows(TOKENS), CHOSEN),
    "combine": (combine, rows(TOKENS * TOPK), WEIGHT, CHOSEN),
    "two_lookups": (two_lookups, rows(TOKENS), CHOSEN % TOKENS),
    "part_of_a_permutation": (part_of_a_permutation, rows(TOKENS * TOPK), CHOSEN),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_scatters(name):
    snapshots.check(__file__, f"{name}_scatters", rewritten(*GRAPHS[name]))


def test_gathers(monkeypatch):
    monkeypatch.setattr(gathers, "cache_bytes", lambda device: 0)
    snapshots.check(__file__, "combine_gathers", rewritten(*GRAPHS["combine"]))
