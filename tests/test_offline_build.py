"""Build the emitted kernels for GPUs that are not here: they build, fit into shared memory, do not spill, add in fp32."""

import dataclasses
import math
import re

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from inductor_ext.attention.captured import CapturedGradients
from inductor_ext.attention.captured_grads import Contribution
from inductor_ext.attention.kinds import PAIR, Reduction
from inductor_ext.attention.plans import Plan
from inductor_ext.attention.tile_tables import TileTable
from inductor_ext.attention.tiles import backward_config, forward_config
from inductor_ext.attention.writers import Writers
from inductor_ext.core.target import SHARED_MEMORY, Target
from tests.attention.attention_kernels import ATTENTIONS, sources, sources_of_windows
from tests.support.emitted import triton_sources
from tests.support.offline import OFFLINE, QUICK_ARCHITECTURES, builds

pytestmark = OFFLINE


@dataclasses.dataclass(frozen=True)
class Forward:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Backward:
    block_m1: int
    block_n1: int
    block_m2: int
    block_n2: int
    num_warps: int
    num_stages: int


#: What Inductor's tables choose at head dim 64 in bf16, before attention/tiles.py.
STOCK = {
    80: (Forward(128, 64, 4, 3), Backward(64, 64, 64, 64, 4, 2)),
    90: (Forward(128, 128, 4, 3), Backward(64, 128, 128, 64, 8, 3)),
    100: (Forward(128, 128, 4, 3), Backward(64, 128, 128, 64, 4, 3)),
    120: (Forward(128, 64, 4, 2), Backward(64, 64, 64, 64, 4, 2)),
}


def gradients(*kinds, condition=None):
    """Captured gradients of these kinds, as far as the choice of tiles looks at them."""
    axes = {Reduction.SUM: (False, True, False, False)}

    def contribution(axes):
        return Contribution(None, (None,), (1,), (None,), axes, (True,), (True,), False, condition)

    def plan(owner, kind):
        made = contribution(axes.get(kind, (True,) * 4))
        table = TileTable(0, owner, PAIR, True, True) if kind is Reduction.STORE else None
        return Plan(
            owner,
            made,
            Writers((False,) * 4, 0, 0, keys_repeat=False, coarse=False),
            None,
            kind,
            False,
            False,
            table,
            wide=False,
        )

    return CapturedGradients([], plans=[plan(i, kind) for i, kind in enumerate(kinds)])


CAPTURED = {
    "unmasked": gradients(),
    "causal": gradients(),
    "relative": gradients(Reduction.STRIP),
    "scaled_and_gathered": gradients(Reduction.SUM, Reduction.SCATTER),
    "with_dropout": gradients(Reduction.SUM),
    "rows_and_columns_of_an_image": gradients(Reduction.SCATTER, Reduction.SCATTER),
    "relative_shift": gradients(Reduction.STORE),
    "pairs_of_segments": gradients(Reduction.BY_ENTRY),
    "packed_documents": gradients(Reduction.SCATTER, Reduction.STRIP, condition=(None, True)),
}


def kernel_options(direction, config):
    tiles = {n: size for n, size in dataclasses.asdict(config).items() if n.startswith("block")}
    return {f"{direction}_{name.upper()}": size for name, size in tiles.items()}


#: Bytes of stack a thread, where every tile without any was measured to be slower (benchmarks/NOTES.md).
SPILLS = {("relative", 90, "backward"): 376, ("scaled_and_gathered", 90, "backward"): 32}
#: Nobody has timed a smaller tile here.
SPILLS |= {("with_dropout", 80, "backward"): 16, ("with_dropout", 90, "backward"): 8}
#: 48 bytes when its tile was chosen. The cause of the rest is not known (456 with Triton 3.7, 776 with 3.6).
SPILLS |= {("packed_documents", 90, "backward"): 776}
SPILLS |= {("packed_documents", 100, "forward"): 48, ("packed_documents", 100, "backward"): 16}


def takes_one_pass(name, arch):
    """Whether the backward adds dQ in memory. Tiles that repeat are summed in registers, in two passes."""
    return Target.absent(arch).adds_tiles and name != "rows_and_columns_of_an_image"


def tiled(name, arch, stock, dtype=torch.bfloat16, dim=64):
    """Both kernels of an attention, with the tiles that Target and tiles.py choose: (source, config) by direction."""
    family = Target.absent(arch).family
    mask_mod, one_pass = name in ("causal", "packed_documents"), takes_one_pass(name, arch)
    has = {
        "a mod": name != "unmasked",
        "reads": name in ("scaled_and_gathered", "rows_and_columns_of_an_image", "pairs_of_segments", "packed_documents"),
        "chained reads": name in ("scaled_and_gathered", "pairs_of_segments"),
        "only a mask": name == "causal" and dtype is not torch.float32,
        "only a diagonal": name == "relative" and dtype is not torch.float32,
        "fp32": dtype is torch.float32,
        "dropout": name == "with_dropout",
    }
    forward = forward_config(stock[0], family, {feature for feature, there in has.items() if there}, head_dim=dim)
    backward = backward_config(
        stock[1], family, CAPTURED[name], one_pass=one_pass, mask_mod=mask_mod, head_dim=dim, dropout=has["dropout"]
    )
    tiles = {**kernel_options("fwd", forward), **kernel_options("bwd", backward)}
    emitted = sources(name, dtype, arch=arch, dim=dim, **tiles)
    return {"forward": (emitted["forward"], forward), "backward": (emitted["backward"], backward)}


@pytest.mark.breadth(1)
@pytest.mark.parametrize(
    "name, arch",
    builds(ATTENTIONS, {("relative", 90), ("causal", 100), ("scaled_and_gathered", 120)}),
)
def test_builds_without_spills_and_adds_in_fp32(name, arch, builder):
    kernels = tiled(name, arch, STOCK[arch])
    one_pass = takes_one_pass(name, arch)
    assert one_pass == ("dq_tiles.atomic_add" in kernels["backward"][0])
    for direction, (source, config) in kernels.items():
        built = builder.build(source, arch, config.num_warps, config.num_stages)
        built.check(SPILLS.get((name, arch, direction), 0))
        if arch == 90 and (name, direction) != ("unmasked", "forward"):
            built.check_matmuls()
    adds = re.findall(r"(?:red|atom)[\w.]*global[\w.]*add[\w.]*", built.ptx)
    adds_to_tables = name not in ("unmasked", "causal", "relative_shift")
    assert bool(adds or "cp.reduce.async.bulk" in built.ptx) == (adds_to_tables or one_pass)
    assert all("f32" in add for add in adds)


def test_stocks_largest_tile_waits_for_each_matmul(builder):
    """A forward without a score_mod and a mask takes it. No smaller tile has been timed there."""
    source, config = tiled("unmasked", 90, STOCK[90])["forward"]
    with pytest.raises(AssertionError, match=r"waits for each matmul.*insufficient register resources"):
        builder.build(source, 90, config.num_warps, config.num_stages).check_matmuls()


@pytest.mark.parametrize("arch", QUICK_ARCHITECTURES)
@pytest.mark.parametrize("name", ["causal", "relative", "relative_shift"])
def test_narrow_heads_build_without_spills(name, arch, builder):
    """The product with the values is by itself there (flex_forward.py.jinja). For sm_120 no tile has been timed."""
    source, config = tiled(name, arch, STOCK[arch], dim=32)["forward"]
    assert "acc = acc * rescale[:, None] + added" in source
    builder.build(source, arch, config.num_warps, config.num_stages).check(16 if (name, arch) == ("causal", 120) else 0)


@pytest.mark.parametrize("name", [pytest.param("unmasked", marks=pytest.mark.slow), "causal"])
def test_one_pass_at_head_dim_128_fits_into_shared_memory(name, builder):
    """It takes 1.41 ms on an H200 although it spills; in two stages it takes 1.53, and two passes take 1.63."""
    source, config = tiled(name, 90, STOCK[90], dim=128)["backward"]
    assert "late_tile" in source
    builder.build(source, 90, config.num_warps, config.num_stages).check(32)


@pytest.mark.parametrize("name", ["causal", "relative"])
def test_narrow_heads_in_fp32_build_without_spills(name, builder):
    """With Inductor's tile for them."""
    config = Forward(64, 64, 4, 3)
    source = sources(name, torch.float32, dim=32, **kernel_options("fwd", config))["forward"]
    builder.build(source, 90, config.num_warps, config.num_stages).check()


@pytest.mark.breadth(1)
@pytest.mark.parametrize(("arch", "stages"), [(90, 3), (100, 1)])
def test_windows_build(builder, arch, stages):
    """Several programs at a time are what hides their latency, so four must fit into a multiprocessor's shared memory.

    In three stages up to eight registers that are needed after the loop over windows are spilled before it: none with Triton
    3.7, three with 3.9, and two or eight with 3.6. Inside of the loop each would be moved once for every window.
    """
    for source in sources_of_windows(arch=arch).values():
        assert "for number in range" in source
        built = builder.build(source, arch, 4, stages)
        built.check(spills=32 if stages == 3 else 0)
        built.check_loops()
        assert 4 * built.shared_memory <= SHARED_MEMORY[arch]


@pytest.mark.breadth(1)
@pytest.mark.parametrize("tma", [True, False])
def test_windows_with_a_diagonal_build(builder, tma):
    """A table that is read before the loop over windows, and a gradient that is added in it, have names of their own."""
    kernels = sources_of_windows(diagonal=True, tma=tma)
    # A strip has tiles of 32 queries, so that there are two.
    assert "for number in range" in kernels["forward"] and ("for number in range" in kernels["backward"]) != tma
    for source in kernels.values():
        builder.build(source, 90, 4, 1).check()


@pytest.mark.breadth(1)
def test_a_bias_is_not_added_to_partial_products(builder):
    """Beside a bias of -1e4 in the accumulator of a dot, every partial sum would be rounded to a multiple of 0.001.

    Found on a GPU (attentions:6100037), where fp32 had four times the error of eager mode. Triton moves the sum there if the
    scale is 1.
    """

    def far(q, k, v, bias):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, q, k: s + bias[q], scale=1.0)

    torch._dynamo.reset()
    heads = [torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3)]
    for source in triton_sources(torch.compile(far, backend="gradfuse"), *heads, torch.full((64,), -1e4)):
        scores = re.findall(r"%qk\w* = tt.dot .*", builder.build(source, 90, 4, 1).ttir)
        assert scores and all(re.match(r"%\w+ = tt.dot %\w+, %\w+, %cst", line) for line in scores), scores


def row_and_few_entries(table, **options):
    row, few = torch.zeros(2, 128, requires_grad=True), torch.zeros(32, requires_grad=True)

    def score_mod(s, b, h, q, k):
        return s * row[h, q] + few[((3 * q - k) // 4).clamp(0, 31)]

    return lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod, **options)


@pytest.mark.breadth(0)
def test_contributions_of_other_shapes_build_side_by_side(builder, monkeypatch):
    """One pass adds a total for each query and totals of entries in the same loop, and Triton wants one type for a name."""
    monkeypatch.setitem(ATTENTIONS, "row_and_few_entries", row_and_few_entries)
    source = sources("row_and_few_entries", arch=90, bwd_ONE_PASS=True)["backward"]
    assert "= tl.sum(tl.where(entry_1 == shared" in source
    assert "total = tl.sum(addend" in source
    builder.build(source, 90, 4, 3)


@pytest.mark.breadth(0)
@pytest.mark.parametrize("length", [97, 100, 200])
def test_a_condition_of_one_block_is_a_number(builder, monkeypatch, length):
    """Where there is one block only, its condition is loaded as a scalar (found on a GPU with 97 tokens)."""
    monkeypatch.setattr("tests.attention.attention_kernels.LENGTH", length)
    for source in sources("packed_documents", arch=90).values():
        assert "if tl.min(spared" in source
        builder.build(source, 90, 4, 1)


@pytest.mark.breadth(0)
def test_a_coordinate_of_a_tile_after_the_last_key_is_in_bounds(monkeypatch):
    monkeypatch.setattr("tests.attention.attention_kernels.LENGTH", 130)
    source = sources("rows_and_columns_of_an_image")["forward"]
    assert "k_div_64 = (tl.minimum(start_n, KV_LEN - 1) // 64" in source


#: What Inductor's tables choose on sm_120 by dtype and head dim.
STOCK_OF_SM_120 = {
    (torch.bfloat16, 128): (Forward(128, 64, 8, 2), Backward(64, 64, 64, 64, 4, 1)),
    (torch.bfloat16, 256): (Forward(32, 64, 4, 2), Backward(64, 64, 64, 64, 4, 1)),
    (torch.float32, 128): (Forward(128, 32, 4, 2), Backward(16, 16, 16, 16, 4, 1)),
    (torch.float32, 256): (Forward(64, 16, 4, 2), Backward(16, 16, 16, 16, 4, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("dtype, dim", STOCK_OF_SM_120)
def test_wide_heads_fit_into_the_shared_memory_of_sm_120(name, dtype, dim, builder):
    """They spill, as stock's tiles do; nobody has run them."""
    for source, config in tiled(name, 120, STOCK_OF_SM_120[dtype, dim], dtype, dim).values():
        builder.build(source, 120, config.num_warps, config.num_stages).check(spills=math.inf)
