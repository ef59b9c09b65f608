"""Without a block mask nothing computes one: the forward is one kernel, and the backward reads no mask either."""

import re

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention, noop_mask

from tests.support.emitted import triton_sources

LENGTH = 32


def kernels(block_mask=None):
    """The Triton kernels of the forward and of the backward."""
    inputs = [torch.zeros(1, 2, LENGTH, 16, requires_grad=True) for _ in range(3)]
    t = torch.zeros(2, requires_grad=True)

    def attend(q, k, v):
        mask = block_mask() if callable(block_mask) else block_mask
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * t[h], block_mask=mask)

    return triton_sources(torch.compile(attend, backend="gradfuse", fullgraph=True), *inputs)


def arguments(source):
    return set(re.findall(r"\w*NUM_BLOCKS\w*", source[source.index("def triton_") :]))


def test_nothing_computes_or_reads_a_mask():
    forward, backward = kernels()
    assert not arguments(forward) and not arguments(backward)
    assert "num_tiles = tl.cdiv" in forward and "num_tiles = tl.cdiv" in backward


def one_block(count):
    """A mask of one block, made inside of the compiled function, that lists ``count`` blocks."""

    def make():
        number = torch.full((1, 1, 1), count, dtype=torch.int32)
        index = torch.zeros((1, 1, 1, 1), dtype=torch.int32)
        return BlockMask.from_kv_blocks(number, index, BLOCK_SIZE=(1 << 30, 1 << 30), mask_mod=noop_mask)

    return make


@pytest.mark.parametrize(
    "block_mask",
    [
        pytest.param(create_block_mask(lambda b, h, q, k: q >= k, 1, 1, LENGTH, LENGTH, device="cpu"), id="causal"),
        pytest.param(one_block(0), id="nothing is visible"),
    ],
)
def test_other_masks_are_read(block_mask):
    forward, backward = kernels(block_mask)
    assert "KV_NUM_BLOCKS" in arguments(forward)
    assert {"KV_NUM_BLOCKS", "Q_NUM_BLOCKS"} <= arguments(backward)
