"""flex_attention on CPU tensors: every case against float64."""

import dataclasses

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from inductor_ext.rewrites import dense_attention_loops

from .cases import BIASES, FEATURES, REFUSED


@pytest.mark.parametrize("case", FEATURES + BIASES + REFUSED, ids=lambda c: c.name)
def test_matches_float64(case):
    case.check("cpu")


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(dense_attention_loops, "QUERY_BLOCK", 32)
    monkeypatch.setattr(dense_attention_loops, "KEY_SEGMENT", 32)


@pytest.mark.parametrize("name", ["causal_small_blocks", "window_reads_out_of_range", "empty_row", "pair_batch"])
def test_several_segments_of_keys_match_float64(name, small_blocks):
    (case,) = (c for c in FEATURES + BIASES if c.name == name)
    dataclasses.replace(case, block_size=16).check("cpu")


def test_masked_blocks_are_not_computed(small_blocks):
    """Keys and values of blocks that no query sees are NaN, which any arithmetic with them would spread."""
    length, seen = 128, 64
    mask = create_block_mask(lambda b, h, q, k: k < seen, None, None, length, length, device="cpu", BLOCK_SIZE=32)
    query, key, value = (torch.randn(1, 2, length, 16) for _ in range(3))
    key[:, :, seen:] = value[:, :, seen:] = torch.nan
    inputs = [x.requires_grad_() for x in (query, key, value)]
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), backend="gradfuse", fullgraph=True)
    out = compiled(*inputs)
    grads = torch.autograd.grad(out, inputs, torch.randn_like(out))
    assert all(x.isfinite().all() for x in (out, *grads))
    assert all(g[:, :, :seen].abs().sum() > 0 and g[:, :, seen:].abs().sum() == 0 for g in grads[1:])
