"""The tiles that compete under max-autotune."""

import dataclasses
from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from inductor_ext.attention import backward, forward
from inductor_ext.attention.tiles import MOST_COMPETITORS, competitors
from tests.support.interpreter import INTERPRETED, triton_on_cpu
from tests.support.targets import on_target


@dataclasses.dataclass(frozen=True)
class Forward:
    block_m: int
    block_n: int
    num_stages: int = 3
    num_warps: int = 4


@dataclasses.dataclass(frozen=True)
class Backward:
    block_m1: int
    block_n1: int
    block_m2: int
    block_n2: int
    num_stages: int = 3
    num_warps: int = 4


H200 = 227 * 1024


def test_ours_is_first_and_only_once():
    ours = Forward(128, 64)
    assert competitors(ours, [Forward(64, 64), ours], 64, 2, H200) == [ours, Forward(64, 64)]


def test_the_nearest_compete():
    ours = Forward(64, 64)
    others = [Forward(64, 64, stages) for stages in (1, 2, 4, 5)] + [Forward(32, 64), Forward(64, 32), Forward(16, 16)]
    assert competitors(ours, others, 64, 2, H200) == [ours, *(others[i] for i in (4, 5, 1, 2, 0, 3))]


@pytest.mark.parametrize(
    "config, head_dim, shared_memory, fits",
    [
        (Forward(128, 64), 64, H200, True),
        # 256 registers of each thread for the output, and 128 for the scores.
        (Forward(128, 128), 256, H200, False),
        (Forward(128, 128, num_warps=8), 128, H200, True),
        # 128 + 2 x 3 x 64 rows of 256 channels are 256 KB.
        (Forward(128, 64, num_warps=8), 256, H200, False),
        (Forward(64, 64), 128, 99 * 1024, False),
        (Backward(64, 128, 128, 64, num_warps=8), 128, H200, True),
        (Backward(64, 64, 64, 64), 64, H200, True),
        (Backward(64, 128, 128, 64), 64, H200, False),
    ],
)
def test_what_does_not_fit_does_not_compete(config, head_dim, shared_memory, fits):
    ours = dataclasses.replace(config, num_warps=16)
    assert (config in competitors(ours, [config], head_dim, 2, shared_memory)) == fits


@INTERPRETED
def test_the_choices_of_both_kernels():
    """The first choice is that without max-autotune."""
    choices = {}

    def spied(module, mode):
        own = module.autotune

        def autotune(name, made, *rest):
            choices[module.__name__.rpartition(".")[2], mode] = [choice.description for choice in made]
            return own(name, made[:1], *rest)

        return mock.patch.object(module, "autotune", autotune)

    for mode in ("default", "max-autotune-no-cudagraphs"):
        torch._dynamo.reset()
        query = torch.randn(1, 2, 128, 64, requires_grad=True)
        with triton_on_cpu(), on_target(architecture=90), spied(forward, mode), spied(backward, mode):
            attention = torch.compile(flex_attention, backend="gradfuse", mode=mode)
            attention(query, query, query, score_mod=lambda s, b, h, q, k: s * 2).sum().backward()
    for kernel in ("forward", "backward"):
        (alone,), several = choices[kernel, "default"], choices[kernel, "max-autotune-no-cudagraphs"]
        assert several[0] == alone and 1 < len(set(several)) <= 1 + MOST_COMPETITORS
