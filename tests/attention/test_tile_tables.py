"""Which captured tensors the kernels read a tile at a time, and how."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.support.emitted import triton_sources
from tests.support.interpreter import triton_on_cpu

S = 32


def forward_source(table, score_mod, tma=True):
    inputs = [torch.zeros(1, 2, S, 16, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod(table)), backend="gradfuse")
    return triton_sources(compiled, *inputs, tma=tma)[0]


def pair(t):
    return lambda s, b, h, q, k: s + t[h, q, k]


def storage(elements):
    return torch.zeros(elements, requires_grad=True)


BY_ELEMENT = {
    "odd_rows": (lambda: storage(2 * S * (S + 1)).view(2, S, S + 1), pair),
    "transposed": (lambda: storage(2 * S * S).view(2, S, S).mT, pair),
    "negated": (lambda: storage(2 * S * S).view(2, S, S), lambda t: lambda s, b, h, q, k: s + t[h, q, -k]),
    "swapped": (lambda: storage(2 * S * S).view(2, S, S), lambda t: lambda s, b, h, q, k: s + t[h, k, q]),
}


def test_an_aligned_pair_is_moved_by_tma():
    table = storage(2 * S * S).view(2, S, S)
    assert "blocks_of_table_0.load" in forward_source(table, pair)
    assert "blocks_of_table_0" not in forward_source(table, pair, tma=False)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", BY_ELEMENT)
def test_other_pairs_are_read_by_element(name, monkeypatch):
    monkeypatch.setattr("inductor_ext.attention.hoisting.LARGEST_PAIR_TABLE", 0)
    make, score_mod = BY_ELEMENT[name]
    assert "blocks_of_table_0" not in forward_source(make(), score_mod)


@pytest.mark.parametrize("shared", [False, True], ids=["one writer", "several writers"])
def test_a_gradient_without_the_padding_of_its_table(shared):
    """A row of 36 elements is aligned, and a row of 33 is not: TMA reads this table, and cannot write its gradient."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(*([2, S, 36] if shared else [2, 2, S, 36]), generator=generator)
    q, k, v = (torch.randn(2, 2, n, 16, generator=generator, requires_grad=True) for n in (S, 33, 33))

    def bias(t):
        return lambda s, b, h, i, j: s + (t[h, i, j] if shared else t[b, h, i, j])

    def attend(q, k, v, rows):
        return flex_attention(q, k, v, score_mod=bias(rows[..., :33]), kernel_options={"bwd_ONE_PASS": True})

    table = rows.clone().requires_grad_()
    with triton_on_cpu(tma=True):
        (got,) = torch.autograd.grad(torch.compile(attend, backend="gradfuse")(q, k, v, table).square().sum(), table)
    exact = rows.double().requires_grad_()
    q, k, v = (x.detach().double() for x in (q, k, v))
    out = (q @ k.mT / 4 + exact[..., :33]).softmax(-1) @ v
    (want,) = torch.autograd.grad(out.square().sum(), exact)
    assert (got - want).norm() < 1e-5 * want.norm()


def test_a_table_of_pairs_for_an_odd_number_of_keys():
    """BEiT has 197 tokens: the rows of the table are padded, so that TMA reads and adds blocks of it."""
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(9, 2, generator=generator)
    index = torch.randint(0, 9, (S, 33), generator=generator)
    q, k, v = (torch.randn(2, 2, n, 16, generator=generator, requires_grad=True) for n in (S, 33, 33))
    table = t.clone().requires_grad_()

    def attend(q, k, v, t):
        bias = lambda s, b, h, i, j: s + t[index[i, j], h]  # noqa: E731
        return flex_attention(q, k, v, score_mod=bias, kernel_options={"bwd_ONE_PASS": True})

    compiled = torch.compile(attend, backend="gradfuse", fullgraph=True)
    with triton_on_cpu(tma=True):
        got = torch.autograd.grad(compiled(q, k, v, table).square().sum(), (table, k))
    exact = [x.detach().double().requires_grad_() for x in (t, k)]
    out = (q.double() @ exact[1].mT / 4 + exact[0][index].permute(2, 0, 1)).softmax(-1) @ v.double()
    for x, y in zip(got, torch.autograd.grad(out.square().sum(), exact), strict=True):
        assert (x - y).norm() < 1e-5 * y.norm()
    forward, backward = triton_sources(torch.compile(attend, backend="gradfuse"), q, k, v, table, tma=True)
    assert "blocks_of_table_0.load" in forward and "blocks_of_grad_0.atomic_add" in backward


def test_a_diagonal_is_spread_over_the_tile():
    source = forward_source(storage(4 * S).view(2, 2 * S), lambda t: lambda s, b, h, q, k: s + t[h, q - k + S], tma=False)
    assert "tl.gather(line" in source
