"""Where all queries and keys are in one tile, as in Swin's windows, a program computes several batch elements (interpreted)."""

import contextlib

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.attention.case import Case, relative_error
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


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tma", [True, False])
@each_case
def test_matches_float64(case, tma, device):
    place, context = ("cuda", on_target(tma=tma)) if device == "cuda" else ("cpu", triton_on_cpu(tma=tma))
    with on_target(multiprocessors=1), context:
        case.check(place, kernel_options={"bwd_ONE_PASS": True})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_block", [False, True])
def test_a_table_that_some_batch_elements_do_not_read(by_block, device):
    """Whether the kernel reads its tile is a condition of blocks, which depends on the batch although the table does not."""
    place, context = ("cuda", contextlib.nullcontext()) if device == "cuda" else ("cpu", triton_on_cpu(tma=True))
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(shape, generator=generator).to(place).requires_grad_()  # noqa: E731
    q, k, v, t = make(9, 2, 33, 32), make(9, 2, 49, 32), make(9, 2, 49, 32), make(2, 33, 56)
    reads = torch.arange(9, device=place) % 3 == 1
    blocks = reads[:, None, None].clone()

    def attend(q, k, v, t):
        def score_mod(s, b, h, i, j):
            return s + torch.where(blocks[b, i // 128, j // 128] if by_block else reads[b], t[h, i, j], 0.0)

        return flex_attention(q, k, v, score_mod=score_mod, kernel_options={"bwd_ONE_PASS": True})

    with on_target(multiprocessors=1), context:
        out = torch.compile(attend, backend="gradfuse", fullgraph=True)(q, k, v, t)
        got = [out, *torch.autograd.grad(out.square().sum(), [q, k, v, t])]
    q, k, v, t = exact = [x.detach().double().requires_grad_() for x in (q, k, v, t)]
    out = (q @ k.mT * 32**-0.5 + reads[:, None, None, None] * t[:, :, :49]).softmax(-1) @ v
    want = [out, *torch.autograd.grad(out.square().sum(), exact)]
    assert all(relative_error(g, w) < 1e-5 for g, w in zip(got, want, strict=True))


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


@pytest.mark.breadth(3)
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
    # The tile of the table is read before the loop, and the sum over the windows is added after it, without descriptors.
    if slices:
        before, loop = forward.split("for number in range")
        assert "tl.load(pointers, mask=inside_table" in before and "inside_table" not in loop
        assert "descriptor" not in forward + backward
        loop, after = backward.split("slice_sum_0 += addend")
        assert "atomic_add" in after and "atomic_add" not in loop
