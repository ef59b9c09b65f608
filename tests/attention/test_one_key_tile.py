"""If all keys are in one tile, one pass stores dQ: it neither adds it in memory nor casts it afterwards (interpreted)."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.support.emitted import triton_sources
from tests.support.interpreter import triton_on_cpu

WINDOW, HEADS, DIM = 49, 4, 32


def attention(mask=None, **options):
    """Swin's windows with grouped heads, and a mask."""

    def attend(q, k, v, t, index):
        options_of_call = {"bwd_ONE_PASS": True, **options}
        bias = lambda s, b, h, i, j: s + t[index[i, j], h]  # noqa: E731
        return flex_attention(q, k, v, score_mod=bias, block_mask=mask, enable_gqa=True, kernel_options=options_of_call)

    return torch.compile(attend, backend="gradfuse", fullgraph=True)


def inputs():
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, HEADS // 2, HEADS // 2)
    tensors = [torch.randn(3, n, WINDOW, DIM, generator=generator, requires_grad=True) for n in heads]
    table = torch.randn(169, HEADS, generator=generator, requires_grad=True)
    return [*tensors, table, torch.randint(0, 169, (WINDOW, WINDOW), generator=generator)]


def test_gradients():
    *leaves, index = inputs()
    with triton_on_cpu(tma=True):
        got = torch.autograd.grad(attention()(*leaves, index).square().sum(), leaves)
    q, k, v, t = exact = [x.detach().double().requires_grad_() for x in leaves]
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    out = (q @ k.mT / DIM**0.5 + t[index].permute(2, 0, 1)).softmax(-1) @ v
    for x, y in zip(got, torch.autograd.grad(out.square().sum(), exact), strict=True):
        assert (x - y).norm() < 1e-5 * y.norm()


CAUSAL = create_block_mask(lambda b, h, q, k: q >= k, None, None, WINDOW, WINDOW, device="cpu")


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("mask", "options", "stored"),
    [
        pytest.param(None, {}, True, id="one tile"),
        pytest.param(None, {"bwd_BLOCK_N1": 32}, False, id="two tiles"),
        # A block of queries that the mask hides from all keys is not visited.
        pytest.param(CAUSAL, {}, False, id="masked"),
    ],
)
def test_when_dq_is_stored(mask, options, stored):
    source = triton_sources(attention(mask, **options), *inputs(), tma=True)[1]
    assert ("tl.store(dq_rows" in source) == stored
    assert ("dq_tiles.atomic_add" in source) != stored
