"""The tiles that are timed under max-autotune."""

import dataclasses
from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from inductor_ext.attention import backward, forward
from inductor_ext.attention.max_autotune import timed
from inductor_ext.attention.tiles import forward_config
from inductor_ext.torch_api.config import inductor_config
from tests.support.interpreter import INTERPRETED, triton_on_cpu
from tests.support.targets import on_target

H200 = 227 * 1024


def of_forward(queries, keys, stages=3, warps=4, dim=64, value_dim=None):
    tile = {"BLOCK_M": queries, "BLOCK_N": keys, "num_stages": stages, "num_warps": warps}
    return tile | {"QK_HEAD_DIM_ROUNDED": dim, "V_HEAD_DIM_ROUNDED": value_dim or dim}


def of_backward(queries, keys, stages=3, warps=4, dim=64):
    tile = {"BLOCK_M1": queries, "BLOCK_N1": keys, "BLOCK_M2": keys, "BLOCK_N2": queries}
    return tile | {"num_stages": stages, "num_warps": warps, "QK_HEAD_DIM_ROUNDED": dim, "V_HEAD_DIM_ROUNDED": dim}


def test_ours_is_first_and_only_once():
    ours, other = of_forward(128, 64), of_forward(64, 64)
    assert timed([ours, other, ours, other], "forward", 2, H200) == [ours, other]


def test_one_number_of_stages_for_each_tile():
    ours = of_forward(64, 64, stages=2)
    others = [of_forward(64, 64, stages) for stages in (1, 4, 3, 5)] + [
        of_forward(32, 64, 5),
        of_forward(64, 64, 4, warps=8),
    ]
    assert timed([ours, *others], "forward", 2, H200) == [ours, others[2], others[5], others[4]]


def test_an_exhaustive_search_is_one():
    choices = [of_backward(64, 64)] + [of_backward(64, 128, stages) for stages in (1, 2, 3, 4, 5, 5)]
    with inductor_config.patch(max_autotune_flex_search_space="EXHAUSTIVE"):
        assert timed(choices, "backward", 2, H200) == choices[:-1]


@pytest.mark.parametrize(
    "choice, shared_memory, fits",
    [
        (of_forward(128, 64), H200, True),
        # 256 registers of each thread for the output, and 128 for the scores.
        (of_forward(128, 128, dim=256, stages=1), H200, False),
        (of_forward(128, 128, value_dim=256, stages=1), H200, False),
        (of_forward(128, 128, warps=8, dim=128), H200, True),
        # 128 + 2 x 3 x 64 rows of 256 channels are 256 KB.
        (of_forward(128, 64, warps=8, dim=256), H200, False),
        (of_forward(64, 64, dim=128), 99 * 1024, False),
        (of_backward(64, 128, warps=8, dim=128), H200, True),
        (of_backward(64, 64), H200, True),
        (of_backward(64, 128), H200, False),
    ],
)
def test_what_does_not_fit_is_not_timed(choice, shared_memory, fits):
    small = {name: 16 for name in choice if name.startswith("BLOCK_")}
    direction = "forward" if "BLOCK_M" in choice else "backward"
    assert (choice in timed([choice | small, choice], direction, 2, shared_memory)) == fits


def test_as_much_as_ours_fits():
    """Our tile of 256 channels needs more registers than a thread has, and is the fastest all the same."""
    ours, other = of_backward(64, 64, 2, dim=256), of_backward(64, 64, 1, dim=256)
    assert timed([ours, other], "backward", 2, H200) == [ours, other]


def choices_of(mode, length, dtype, options=None, score_mod=lambda s, b, h, q, k: s * 2, dim=64, block_mask=None):
    """The descriptions of the choices of both kernels. The first one is taken."""
    choices = {}

    def spied(module):
        own = module.autotune

        def autotune(name, made, *rest):
            choices[module] = [choice.description for choice in made]
            return own(name, made[:1], *rest)

        return mock.patch.object(module, "autotune", autotune)

    torch._dynamo.reset()
    query = torch.randn(1 if length > 128 else 16, 2, length, dim, requires_grad=True, dtype=dtype)
    target = on_target(architecture=90, multiprocessors=1, gluon=False)
    with triton_on_cpu(tma=True), target, spied(forward), spied(backward):
        attention = torch.compile(flex_attention, backend="gradfuse", mode=mode, dynamic=False)
        out = attention(query, query, query, score_mod, block_mask, kernel_options=options)
        out.sum().backward()
    return choices


@INTERPRETED
@pytest.mark.parametrize(
    "length, dtype, options",
    [(128, torch.float32, None), (49, torch.bfloat16, None), (128, torch.bfloat16, {"BLOCK_M": 64, "num_stages": 1})],
    ids=["fp32", "one tile", "own options"],
)
def test_the_choices_of_both_kernels(length, dtype, options):
    """The first is the one without max-autotune, and all differ."""
    alone, several = (choices_of(mode, length, dtype, options) for mode in ("default", "max-autotune-no-cudagraphs"))
    for kernel in (forward, backward):
        assert [several[kernel][0]] == alone[kernel] and len(set(several[kernel])) == len(several[kernel])
    assert len(several[backward]) > 1
    # Where dQ is stored at once, each tile must have all keys.
    stores_dq = ["DQ_IN_MEMORY=False" in choice and "ONE_PASS=True" in choice for choice in several[backward]]
    assert set(stores_dq) == {length == 49}
    assert length != 49 or all("BLOCK_N1=64" in choice or "BLOCK_N1=128" in choice for choice in several[backward])


@dataclasses.dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@pytest.mark.parametrize(
    "features, head_dim, queries",
    [({"blocks"}, 32, 128), ({"blocks", "reads"}, 32, 64), ({"blocks"}, 64, 64), (set(), 32, 64)],
)
def test_pairs_of_narrow_heads_have_tall_tiles(features, head_dim, queries):
    """As in AlphaFold."""
    config = forward_config(Config(64, 64, 4, 3), "hopper", {"a mod", *features}, head_dim=head_dim)
    assert config == Config(queries, 64, 4, 3)


@pytest.mark.breadth(1)
@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pairs_are_blocks_in_half_precision(dtype):
    pairs = torch.randn(2, 384, 384, dtype=dtype, requires_grad=True)
    with mock.patch.object(forward, "forward_config", wraps=forward_config) as adapted:
        choices_of("default", 384, dtype, None, lambda s, b, h, q, k: s + pairs[h, q, k], 32)
    assert ("blocks" in adapted.call_args.args[2]) == (dtype is torch.bfloat16)


LONG = 576
DOCUMENT = torch.arange(LONG) // 100
SCORE_MODS = {
    "nothing": (None, None),
    "a mask": (None, lambda b, h, q, k: q >= k),
    "a diagonal": (lambda t: lambda s, b, h, q, k: s + t[h, q - k + LONG], None),
    "a function": (lambda t: lambda s, b, h, q, k: s * t[h, 1] + t[h, 0] * (q - k), None),
    "a value of a query": (lambda t: lambda s, b, h, q, k: s * t[h, q], None),
    "a number of a key": (lambda t: lambda s, b, h, q, k: torch.where(DOCUMENT[q] == DOCUMENT[k], s * t[h, 0], -1e9), None),
    "a mask that reads": (None, lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k]),
    "a value of a key": (lambda t: lambda s, b, h, q, k: s + t[h, k], None),
    "a diagonal and a mask": (lambda t: lambda s, b, h, q, k: s + t[h, q - k + LONG], lambda b, h, q, k: q >= k),
}


@pytest.mark.breadth(1)
@INTERPRETED
@pytest.mark.parametrize("name", SCORE_MODS)
def test_what_is_inlined_alone(name):
    """The tiles of long sequences depend on it, in half precision."""
    score_mod, mask_mod = SCORE_MODS[name]
    table = torch.randn(2, 2 * LONG, requires_grad=True)
    mask = create_block_mask(mask_mod, None, None, LONG, LONG, "cpu") if mask_mod else None
    with mock.patch.object(forward, "forward_config", wraps=forward_config) as adapted:
        choices_of("default", LONG, torch.bfloat16, None, score_mod and score_mod(table), 16, mask)
    alone = name if name in ("a mask", "a diagonal", "a function") else "more or less"
    assert {feature for feature in adapted.call_args.args[2] if feature.startswith("only")} == {f"only {alone}"}
