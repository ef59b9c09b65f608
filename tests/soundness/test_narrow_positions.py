"""score_mods in which a cast to a narrow dtype or to bool changes the number that a position is."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention, noop_mask

from inductor_ext.attention import hoisting
from tests.support.interpreter import INTERPRETED, triton_on_cpu

pytestmark = INTERPRETED
BATCH, HEADS, DIM = 2, 2, 16


def assert_matches_float64(score_mod, shape, length=24, *, mask=None, visible=None, tiles=None, zero=(), **flags):
    """Output and gradients against float64. ``score_mod``: from a learned tensor of ``shape`` to a function of a score.

    mask: makes a block mask, and visible: a function of (q, k) that says what it shows. tiles: kernel options. zero: an index
    at which the tensor is 0. flags: those of torch.compile.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(BATCH, HEADS, length, DIM, generator=generator) for _ in range(3)]
    inputs.append(torch.rand(shape, generator=generator) + 0.5)
    if zero:
        inputs[3][zero] = 0.0
    inputs = [x.requires_grad_() for x in inputs]
    grad = torch.randn(BATCH, HEADS, length, DIM, generator=generator)

    def attend(q, k, v, t):
        return flex_attention(q, k, v, score_mod=score_mod(t), block_mask=mask() if mask else None, kernel_options=tiles)

    torch._dynamo.reset()
    out = torch.compile(attend, backend="gradfuse", fullgraph=True, **flags)(*inputs)
    got = [out, *torch.autograd.grad(out, inputs, grad)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    sizes = (BATCH, HEADS, length, length)
    b, h, i, j = (torch.arange(n).view([-1 if a == d else 1 for a in range(4)]) for d, n in enumerate(sizes))
    scores = score_mod(exact[3])(exact[0] @ exact[1].mT / DIM**0.5, b, h, i, j)
    if visible is not None:
        scores = scores.masked_fill(~visible(i, j), -torch.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ exact[2]
    for x, y in zip(got, [out, *torch.autograd.grad(out, exact, grad.double())], strict=True):
        assert torch.equal(x.isnan(), y.isnan()), "other elements are NaN"
        x, y = x.nan_to_num(0.0, 0.0, 0.0), y.nan_to_num(0.0, 0.0, 0.0)
        assert (x - y).norm() <= 1e-5 * y.norm() + 1e-12


BOOLS = {
    "factor": (lambda t: lambda s, b, h, q, k: s + t[h] * k.bool(), (HEADS,)),
    "factor_as_int": (lambda t: lambda s, b, h, q, k: s + t[h] * k.bool().int(), (HEADS,)),
    "index_of_key": (lambda t: lambda s, b, h, q, k: s + t[h, k.bool().long()], (HEADS, 2)),
    "index_of_query": (lambda t: lambda s, b, h, q, k: s * t[h, q.to(torch.bool).int()], (HEADS, 2)),
    "by_type": (lambda t: lambda s, b, h, q, k: s + t[h, k.type(torch.bool).type(torch.int32)], (HEADS, 2)),
    "beside_a_position": (lambda t: lambda s, b, h, q, k: s + t[q.bool().long(), k], (2, 24)),
    "condition": (lambda t: lambda s, b, h, q, k: s + torch.where(k.bool(), t[h], 0.0), (HEADS,)),
    "two": (lambda t: lambda s, b, h, q, k: s + t[h] * (k % 2).bool() + t[h] * torch.logical_not(k), (HEADS,)),
}


@pytest.mark.breadth(0)
@pytest.mark.parametrize("kernels", [pytest.param(False, id="cpp"), pytest.param(True, id="triton")])
@pytest.mark.parametrize("name", BOOLS)
def test_a_position_as_a_bool(name, kernels):
    score_mod, shape = BOOLS[name]
    if not kernels:
        return assert_matches_float64(score_mod, shape)
    with triton_on_cpu(tma=True):
        assert_matches_float64(score_mod, shape)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("index", "shape", "length"),
    [
        pytest.param(lambda b, h, q, k: (b, h, q.bool().long(), k), (BATCH, HEADS, 2, 32), 32, id="bool"),
        pytest.param(lambda b, h, q, k: (b, h, q.to(torch.int8).long(), k), (BATCH, HEADS, 144, 144), 144, id="query"),
        pytest.param(lambda b, h, q, k: (b, h, q, k.to(torch.int8).int()), (BATCH, HEADS, 144, 144), 144, id="key"),
    ],
)
def test_a_narrow_index_is_no_tile_of_pairs(index, shape, length, deterministic, monkeypatch):
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)
    with triton_on_cpu(tma=True):
        score_mod = lambda t: lambda s, b, h, q, k: s + t[index(b, h, q, k)]  # noqa: E731
        assert_matches_float64(score_mod, shape, length, options={"deterministic": deterministic})


@pytest.mark.breadth(1)
@pytest.mark.parametrize("function", [torch.sqrt, torch.log])
def test_an_infinite_gradient_of_one_entry_stays_there(function, monkeypatch):
    """``infinity * 0`` of a one-hot matmul made NaN of the gradients of other entries."""
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)
    entry = torch.arange(BATCH * 24).view(BATCH, 24) % 3
    with triton_on_cpu(tma=True):
        score_mod = lambda t: lambda s, b, h, q, k: s + function(t[h, entry[b, q], entry[b, k]])  # noqa: E731
        assert_matches_float64(score_mod, (HEADS, 3, 3), zero=(0, 0, 0))


def block_mask(numbers, indices=None, size=(1 << 30, 1 << 30)):
    """A block mask without a mask_mod, made inside of the compiled function."""

    def make():
        number = torch.tensor(numbers, dtype=torch.int32)[None, None]
        index = torch.zeros(1, 1, 1, 1, dtype=torch.int32) if indices is None else torch.tensor(indices).int()[None, None]
        return BlockMask.from_kv_blocks(number, index, BLOCK_SIZE=size, mask_mod=noop_mask)

    return make


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_gradient_of_pairs_that_no_block_shows_is_zero(deterministic):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, HEADS, 32, DIM, generator=generator, requires_grad=True) for _ in range(3))
    t = torch.randn(BATCH, HEADS, 32, 32, generator=generator, requires_grad=True)
    make = block_mask([0])

    def attend(q, k, v, t):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + t[b, h, i, j], block_mask=make())

    with triton_on_cpu(tma=True):
        out = torch.compile(attend, backend="gradfuse", fullgraph=True, options={"deterministic": deterministic})(q, k, v, t)
        gradients = torch.autograd.grad(out.sum(), [q, k, v, t])
    assert all((x == 0).all() for x in (out, *gradients))


@pytest.mark.breadth(0)
def test_a_lookup_may_be_out_of_range_where_only_the_list_of_blocks_hides():
    """Blocks on the other diagonal: ``q - k + 63`` of the others is up to 190."""
    make = block_mask([1, 1], [[0, 1], [1, 0]], (64, 64))
    visible = lambda q, k: q // 64 == k // 64  # noqa: E731
    score_mod = lambda t: lambda s, b, h, q, k: s + t[h, (q - k + 63)]  # noqa: E731

    def clamped(t):
        return score_mod(t) if t.dtype is not torch.float64 else lambda s, b, h, q, k: s + t[h, (q - k + 63).clamp(0, 126)]

    assert_matches_float64(clamped, (HEADS, 127), 128, mask=make, visible=visible)


@pytest.mark.breadth(0)
@pytest.mark.parametrize("option", ["fwd_BLOCK_N", "bwd_BLOCK_N2", "bwd_BLOCK_M1"])
def test_tiles_of_a_user_that_are_longer_than_ours(option):
    """384 is a multiple of 128, our longest tile, and not of 256."""
    with triton_on_cpu(tma=True):
        assert_matches_float64(lambda t: lambda s, b, h, q, k: s * t[h], (HEADS,), 384, tiles={option: 256})


def test_a_row_that_a_learned_infinity_hides_stays_hidden():
    """``log`` of a gate that is 0: the term does not depend on the key, but softmax does not cancel it."""
    q, k, v = (torch.randn(BATCH, HEADS, 24, DIM, requires_grad=True) for _ in range(3))
    gate = torch.rand(HEADS, 24) + 0.5
    gate[0, 3] = 0.0

    def attend(q, k, v, gate):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + gate[h, i].log())

    torch._dynamo.reset()
    out = torch.compile(attend, backend="gradfuse", fullgraph=True)(q, k, v, gate.requires_grad_())
    hidden = torch.zeros(HEADS, 24, dtype=torch.bool)
    hidden[0, 3] = True
    assert ((out == 0).all(-1) == hidden).all()


@pytest.mark.breadth(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8])
def test_positions_that_the_compiled_function_rounds(dtype):
    """A captured tensor that is made of positions only is computed again where it is read, unless it must be stored.

    Code generation computes in fp32 and does not round, so the forward hid other scores than the backward (fuzz, on a GPU).
    """
    first = 2040 if dtype is torch.float16 else 250

    def score_mod(t):
        # The reference takes the positions themselves, so they are rounded alike.
        position = (torch.arange(24, device=t.device) + first).to(dtype)
        return lambda s, b, h, q, k: s + torch.where(position[q] >= position[k], t[h], 0.0)

    with triton_on_cpu(tma=True):
        assert_matches_float64(score_mod, (HEADS,))
