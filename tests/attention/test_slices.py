"""Where all queries and keys are in one tile, as in Swin's windows, a program computes several batch elements (interpreted)."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.attention.case import Case
from tests.support.emitted import triton_sources
from tests.support.interpreter import DEVICES, triton_on_cpu
from tests.support.targets import on_target

#: On a GPU of one multiprocessor, four programs are one round: two heads have two programs each, of five and of four windows.
SIZES = {"batch": 9, "heads": 2, "length": 33, "kv_length": 49, "dim": 32}


def same(score_mod):
    """The score_mod also works on grids of positions."""
    return {"score_mod": score_mod, "dense": score_mod}


CASES = [
    Case("windows", {"t": (169, 2)}, **same(lambda t: lambda s, b, h, q, k: s + t["t"][(7 * q + k) % 169, h]), **SIZES),
    Case("pair_of_a_batch", {"t": (9, 2, 33, 56)}, **same(lambda t: lambda s, b, h, q, k: s + t["t"][b, h, q, k]), **SIZES),
    Case(
        "both_and_a_scale",
        {"t": (33, 56), "u": (9, 33, 56), "w": (2,)},
        **same(lambda t: lambda s, b, h, q, k: s * t["w"][h] + t["t"][q, k] + t["u"][b, q, k]),
        **SIZES,
    ),
    Case("diagonal", {"t": (2, 90)}, **same(lambda t: lambda s, b, h, q, k: s + t["t"][h, q - k + 48]), **SIZES),
    Case(
        "rows",
        {"t": (9, 33), "u": (2, 49)},
        **same(lambda t: lambda s, b, h, q, k: s * t["t"][b, q] + t["u"][h, k]),
        **SIZES,
    ),
    Case(
        "shifted_windows",
        {"t": (2, 33, 56), "m": (3, 33, 49)},
        **same(lambda t: lambda s, b, h, q, k: s + t["t"][h, q, k] + t["m"][b % 3, q, k]),
        frozen=("m",),
        **SIZES,
    ),
    # What the kernel reads under a condition of blocks depends on the batch, although the table does not.
    Case(
        "chosen_by_batch",
        {"t": (2, 33, 56), "f": (9,)},
        **same(lambda t: lambda s, b, h, q, k: s + torch.where(t["f"][b] > 0, t["t"][h, q, k], 0.0)),
        frozen=("f",),
        **SIZES,
    ),
    Case(
        "chosen_by_block",
        {"t": (2, 33, 56), "f": (9, 1, 1)},
        **same(lambda t: lambda s, b, h, q, k: s + torch.where(t["f"][b, q // 128, k // 128] > 0, t["t"][h, q, k], 0.0)),
        frozen=("f",),
        **SIZES,
    ),
    Case(
        "narrow_values",
        {"t": (2, 33, 56)},
        **same(lambda t: lambda s, b, h, q, k: s + t["t"][h, q, k]),
        **SIZES,
        v_dim=24,
    ),
    Case(
        "bf16",
        {"t": (2, 33, 56)},
        **same(lambda t: lambda s, b, h, q, k: s + t["t"][h, q, k]),
        **SIZES,
        dtype=torch.bfloat16,
    ),
]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.mark.breadth(10)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tma", [True, False])
@each_case
def test_matches_float64(case, tma, device):
    place, context = ("cuda", on_target(tma=tma)) if device == "cuda" else ("cpu", triton_on_cpu(tma=tma))
    with on_target(multiprocessors=1), context:
        case.check(place, kernel_options={"bwd_ONE_PASS": True})


def attention(mask=None, gqa=False, logsumexp=False):
    def attend(q, k, v, t):
        options = {
            "score_mod": lambda s, b, h, i, j: s + t[h, i, j],
            "block_mask": mask,
            "kernel_options": {"bwd_ONE_PASS": True},
        }
        if not logsumexp:
            return flex_attention(q, k, v, enable_gqa=gqa, **options)
        out, lse = flex_attention(q, k, v, return_lse=True, **options)
        return out * lse[..., None]

    return torch.compile(attend, backend="gradfuse", fullgraph=True)


CAUSAL = create_block_mask(lambda b, h, q, k: q >= k, None, None, 49, 49, device="cpu")


@pytest.mark.parametrize(
    ("options", "multiprocessors", "slices", "sums_delta"),
    [
        pytest.param({}, 1, True, True, id="windows"),
        pytest.param({}, 132, False, True, id="as many programs as the GPU runs at a time"),
        pytest.param({"mask": CAUSAL}, 1, False, False, id="masked"),
        pytest.param({"gqa": True}, 1, False, True, id="grouped heads"),
        pytest.param({"logsumexp": True}, 1, True, False, id="gradient of the logsumexp"),
    ],
)
def test_kernels(options, multiprocessors, slices, sums_delta):
    inputs = [torch.randn(8, n, 49, 32, requires_grad=True) for n in (2, 1 if "gqa" in options else 2)]
    table = torch.randn(2, 49, 52, requires_grad=True)
    with on_target(multiprocessors=multiprocessors):
        forward, backward = triton_sources(attention(**options), inputs[0], inputs[1], inputs[1], table, tma=True)
    assert [("for number in range" in kernel) for kernel in (forward, backward)] == [slices] * 2
    assert ("delta = tl.sum(probs * dprobs, 0)" in backward) == sums_delta
    # The tile of the table is read before the loop, and the sum over the windows is added after it.
    if slices:
        before, loop = forward.split("for number in range")
        assert "blocks_of_table_0.load" in before and "blocks_of_table_0.load" not in loop
        loop, after = backward.split("slice_sum_0 += addend")
        assert "atomic_add" in after and "atomic_add" not in loop
