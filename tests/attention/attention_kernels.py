"""The attentions whose emitted kernels are snapshotted and built offline."""

from unittest import mock

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from inductor_ext.attention import dropout, hoisting
from inductor_ext.core.target import Target
from tests.support.emitted import triton_sources
from tests.support.targets import on_target

LENGTH, DIM = 256, 64


def unmasked(table, **options):
    return lambda q, k, v: flex_attention(q, k, v, **options)


def causal(table, **options):
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cpu")
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask, **options)


def relative(table, **options):
    return lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i - j + LENGTH], **options)


def scaled_and_gathered(table, **options):
    document = torch.arange(LENGTH) // 50

    def score_mod(s, b, h, i, j):
        return s * table[h, 0] + table[h, document[i] + document[j]]

    return lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod, **options)


def rows_and_columns_of_an_image(table, **options):
    row = torch.zeros(1, 2, LENGTH, -(-LENGTH // 64), requires_grad=True)
    column = torch.zeros(1, 2, LENGTH, 64, requires_grad=True)

    def score_mod(s, b, h, i, j):
        return s + row[b, h, i, j // 64] + column[b, h, i, j % 64]

    return lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod, **options)


def relative_shift(table, **options):
    positions = torch.zeros(1, 2, LENGTH, 2 * LENGTH - 1, requires_grad=True)

    def score_mod(s, b, h, i, j):
        return s + positions[b, h, i, i - j + LENGTH - 1]

    return lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod, **options)


def pairs_of_segments(table, **options):
    pairs, segment = torch.zeros(2, 8, 8, requires_grad=True), torch.arange(LENGTH) // 50

    def score_mod(s, b, h, i, j):
        return s + pairs[h, segment[i], segment[j]]

    return lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod, **options)


def packed_documents(table, **options):
    """T5's buckets, simplified, of positions that restart in each document."""
    position, document = torch.arange(LENGTH) % 100, torch.arange(LENGTH) // 100
    mask = create_block_mask(lambda b, h, q, k: document[q] == document[k], None, None, LENGTH, LENGTH, device="cpu")

    def score_mod(s, b, h, i, j):
        return s + table[h, (position[j] - position[i]).abs().clamp(1).log().long()]

    return lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, **options)


def with_dropout(table, **options):
    options = {**(options.pop("kernel_options") or {}), **dropout(0.1)}
    return lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * table[h, 0], kernel_options=options)


_OF_MODELS = (rows_and_columns_of_an_image, relative_shift, pairs_of_segments, packed_documents)
ATTENTIONS = {f.__name__: f for f in (unmasked, causal, relative, scaled_and_gathered, with_dropout, *_OF_MODELS)}


def sources(name, dtype=torch.bfloat16, arch=90, dim=DIM, **options):
    """Triton source of the forward and the backward kernel.

    Only on data centre GPUs since 9.0 does the backward take one pass, and do tiles move by TMA.

    ``options`` are kernel_options.
    """
    table = torch.zeros(2, 2 * LENGTH, requires_grad=True)
    inputs = [torch.zeros(1, 2, LENGTH, dim, dtype=dtype, requires_grad=True) for _ in range(3)]
    # The lengths stand for long ones, whose lookups by query and key are not made into tables.
    in_the_kernel = mock.patch.object(hoisting, "LARGEST_PAIR_TABLE", 0)
    with on_target(architecture=arch), in_the_kernel:
        compiled = torch.compile(ATTENTIONS[name](table, kernel_options=options or None), backend="gradfuse", fullgraph=True)
        forward, backward = triton_sources(compiled, *inputs, tma=Target.absent(arch).adds_tiles)
    return {"forward": forward, "backward": backward}


def sources_of_windows(arch=90, diagonal=False, tma=True):
    """The same for Swin's windows, of which a program has eight. diagonal: their bias depends on the distance only."""
    table, index = torch.zeros(2, 97, requires_grad=True), torch.arange(49)[:, None] + torch.arange(49)
    inputs = [torch.zeros(16, 2, 49, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def windows(q, k, v):
        bias = lambda s, b, h, i, j: s + table[h, i - j + 48 if diagonal else index[i, j]]  # noqa: E731
        return flex_attention(q, k, v, score_mod=bias, kernel_options={"bwd_ONE_PASS": True})

    with on_target(architecture=arch, multiprocessors=1):
        compiled = torch.compile(windows, backend="gradfuse", fullgraph=True)
        forward, backward = triton_sources(compiled, *inputs, tma=tma)
    return {"forward": forward, "backward": backward}
