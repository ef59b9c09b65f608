"""Relative shifts, whose elements are a matrix of queries and descending keys in memory, moved by TMA (interpreted)."""

import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from inductor_ext.attention import hoisting
from inductor_ext.attention.affine import address
from inductor_ext.attention.blocks import Block, block
from tests.support.emitted import triton_sources
from tests.support.interpreter import triton_on_cpu

from .test_writers import AFFINE, EXTENTS, traced

BATCH, HEADS, DIM = 2, 2, 16


@pytest.fixture(autouse=True)
def no_table_of_pairs(monkeypatch):
    """As for long sequences."""
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)


def contiguous(shape):
    return torch.empty(shape, device="meta").stride()


@settings(deadline=None, max_examples=150)
@given(AFFINE)
def test_the_address_is_that_of_the_element(factors):
    def function(b, h, q, k):
        return [x * b + y * h + z * q + w * k + c for x, y, z, w, c in factors]

    shape = (40,) * len(factors)
    indices, inputs = traced(function)
    found = address(indices, shape, contiguous(shape), inputs, EXTENTS)
    grid = torch.meshgrid(*[torch.arange(n) for n in EXTENTS], indexing="ij")
    values = [torch.as_tensor(i).expand(EXTENTS) for i in function(*grid)]
    inside = all((i >= 0).all() and (i < 40).all() for i in values)
    assert (found is not None) == inside
    if inside:
        offset = sum(i * n for i, n in zip(values, contiguous(shape), strict=True))
        want = sum(f * p for f, p in zip(found.factors, grid, strict=True)) + found.constant
        assert torch.equal(offset, want.expand(EXTENTS))


def matrices(function, shape):
    indices, inputs = traced(function)
    return block(indices, shape, contiguous(shape), inputs, EXTENTS)


def test_which_tensors_are_blocks():
    b, h, q, k = EXTENTS
    shift = lambda b_, h_, q_, k_: [b_, h_, q_, q_ - k_ + k - 1]  # noqa: E731
    columns = q + k - 1
    want = Block((h * q * columns, q * columns, columns + 1), 0)
    assert matrices(shift, (b, h, q, columns)) == want
    assert matrices(lambda b, h, q_, k_: [q_, q_ - k_ + k], (q, columns + 1)) == Block((0, 0, columns + 2), 1)
    # An index that may be out of bounds or count from the end, and keys in ascending order.
    assert matrices(shift, (b, h, q, columns - 1)) is None
    assert matrices(lambda b, h, q_, k_: [q_, q_ - k_], (q, columns)) is None
    assert matrices(lambda b, h, q_, k_: [q_, k_], (q, columns)) is None


def shifted(r, keys, rest=lambda b, h, q, k: 0.0):
    axes = {4: lambda b, h: (b, h), 3: lambda b, h: (h,), 2: lambda b, h: ()}[r.dim()]
    return lambda s, b, h, q, k: s + r[(*axes(b, h), q, q - k + keys - 1)] + rest(b, h, q, k)


CASES = {
    # name: queries, keys, the leading dims of r, whether a causal mask is there, kernel_options
    "one_writer": (64, 128, (BATCH, HEADS), False, {}),
    "one_pass": (64, 256, (BATCH, HEADS), False, {"bwd_ONE_PASS": True}),
    "queries_end_in_a_tile": (52, 128, (BATCH, HEADS), False, {}),
    "queries_end_in_a_tile_one_pass": (52, 128, (BATCH, HEADS), False, {"bwd_ONE_PASS": True}),
    "causal": (128, 128, (BATCH, HEADS), True, {}),
    "shared_by_the_batch": (52, 128, (HEADS,), False, {"bwd_ONE_PASS": True}),
    "shared_by_all": (52, 128, (), True, {}),
}


@pytest.mark.breadth(1)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_relative_shift(name, deterministic):
    queries, keys, leading, masked, options = CASES[name]
    generator = torch.Generator().manual_seed(0)
    columns = queries + keys - 1
    shapes = [(BATCH, HEADS, n, DIM) for n in (queries, keys, keys)] + [(*leading, queries, columns)]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    grad = torch.randn(shapes[0], generator=generator)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, queries, keys, device="cpu") if masked else None

    def attend(query, key, value, r):
        return flex_attention(query, key, value, score_mod=shifted(r, keys), block_mask=mask, kernel_options=options)

    with triton_on_cpu(tma=True):
        compiled = torch.compile(attend, backend="gradfuse", options={"deterministic": deterministic}, fullgraph=True)
        out = compiled(*inputs)
        got = [out, *torch.autograd.grad(out, inputs, grad)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    q, k = torch.arange(queries)[:, None], torch.arange(keys)
    scores = exact[0] @ exact[1].mT / DIM**0.5 + exact[3][..., q, q - k + keys - 1]
    if masked:
        scores = scores.masked_fill(q < k, -torch.inf)
    out = scores.softmax(-1) @ exact[2]
    want = [out, *torch.autograd.grad(out, exact, grad.double())]
    for x, y in zip(got, want, strict=True):
        assert (x - y).norm() < 1e-5 * y.norm()


def sources(r, score_mod, keys=128):
    inputs = [torch.zeros(BATCH, HEADS, n, DIM, requires_grad=True) for n in (64, keys, keys)]
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod), backend="gradfuse")
    return triton_sources(compiled, *inputs, tma=True)


def shift_to(keys):
    """A relative shift for 64 queries, with aligned rows."""
    return torch.zeros(BATCH, HEADS, 64, 64 + keys - 1, requires_grad=True)


def test_blocks_are_read_and_stored_whole():
    forward, backward = sources(shift_to(128), shifted(shift_to(128), 128))
    assert "blocks_of_table_0.load" in forward and "BLOCK_N - 1 - tl.arange" in forward
    assert "blocks_of_table_0.load" in backward and "blocks_of_grad_0.store" in backward


def test_other_tables_keep_keys_in_ascending_order():
    t = torch.zeros(HEADS, 64, 128, requires_grad=True)
    forward, _ = sources(shift_to(128), shifted(shift_to(128), 128, lambda b, h, q, k: t[h, q, k]))
    assert "blocks_of_table_0.load" in forward and "BLOCK_N - 1 - tl.arange" not in forward


def test_the_last_key_is_the_last_of_a_tile():
    """Otherwise blocks would be at columns that TMA does not take: an illegal instruction on an H200.

    Then the shift is a table outside of the kernel, whose keys are in ascending order (shifts.py).
    """
    for kernel in sources(shift_to(96), shifted(shift_to(96), 96), keys=96):
        assert "blocks_of_table_0" in kernel and "- 1 - tl.arange" not in kernel


@pytest.mark.breadth(0)
def test_coordinates_of_descending_keys():
    generator = torch.Generator().manual_seed(0)
    r = torch.randn(BATCH, HEADS, 64, 191, generator=generator, requires_grad=True)
    rows = torch.randn(HEADS, 64, 8, generator=generator, requires_grad=True)
    columns = torch.randn(HEADS, 64, 16, generator=generator, requires_grad=True)
    q, k, v = (torch.randn(BATCH, HEADS, n, DIM, generator=generator, requires_grad=True) for n in (64, 128, 128))
    inputs = [q, k, v, r, rows, columns]

    def attend(q, k, v, r, rows, columns):
        image = lambda b, h, i, j: rows[h, i, j // 16] + columns[h, i, j % 16]  # noqa: E731
        return flex_attention(q, k, v, score_mod=shifted(r, 128, image))

    with triton_on_cpu(tma=True):
        out = torch.compile(attend, backend="gradfuse", fullgraph=True)(*inputs)
        got = [out, *torch.autograd.grad(out.square().sum(), inputs)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    i, j = torch.arange(64)[:, None], torch.arange(128)
    bias = exact[3][..., i, i - j + 127] + exact[4][:, i, j // 16] + exact[5][:, i, j % 16]
    out = (exact[0] @ exact[1].mT / DIM**0.5 + bias).softmax(-1) @ exact[2]
    want = [out, *torch.autograd.grad(out.square().sum(), exact)]
    for x, y in zip(got, want, strict=True):
        assert (x - y).norm() < 1e-5 * y.norm()
