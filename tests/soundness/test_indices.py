"""Index programs for which a proof was wrong once: shapes that broadcast, ranges that wrap, narrow dtypes."""

import pytest
import torch

from tests.attention.case import relative_error
from tests.support.eager_graphs import eager_graphs
from tests.support.targets import on_target

from .check import check_matches_eager

HALF = 4e-3


def rows(n, c, dtype=torch.float32):
    return torch.randn(n, c, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("shape", [(8, 8), (5, 8)])
def test_a_gather_whose_index_has_a_new_leading_dim(shape):
    """``expand`` aligns on the right: ``index[r][c]`` is ``i[c]``, no row index."""
    check_matches_eager(lambda x, key: x.gather(0, key.argsort().expand(*shape)), rows(8, 8), torch.randn(8))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("shape", [(8, 8), (5, 8)])
@pytest.mark.parametrize("unique", [True, False])
def test_a_scatter_whose_index_has_a_new_leading_dim(shape, unique):
    index = torch.randperm(8) if unique else torch.randint(0, 8, (8,))

    def function(x, i):
        return x.new_zeros(10, 8).scatter_add(0, i.expand(*shape), x)

    check_matches_eager(function, rows(*shape, torch.bfloat16), index, tolerance=HALF, exact=True)
    check_matches_eager(
        lambda x, key: x.new_zeros(10, 8).scatter_add(0, key.argsort().expand(*shape), x), rows(*shape), torch.randn(8)
    )


def test_a_scatter_whose_index_is_expanded_along_its_own_dim():
    index = torch.tensor([[2]])
    check_matches_eager(lambda x, i: x.new_zeros(10, 8).scatter_add(0, i.expand(5, 8), x), rows(5, 8), index)


@pytest.mark.breadth(3)
@pytest.mark.parametrize("shape", [(7, 1), (1, 4), (1, 1), (4,), ()])
@pytest.mark.parametrize("unique", [True, False])
def test_values_that_broadcast_are_expanded(shape, unique):
    def function(v, key):
        index = key.argsort() if unique else key.argsort() // 3
        return torch.zeros(7, 4, dtype=v.dtype).index_put((index,), v, accumulate=True)

    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, HALF)):
        check_matches_eager(
            function, torch.randn(shape, dtype=dtype).requires_grad_(), torch.randn(7), tolerance=tolerance, exact=True
        )


@pytest.mark.parametrize("shape", [(5, 1, 3), (7, 3), (1, 7, 1), (1, 1, 3), ()])
def test_values_that_broadcast_around_an_index_of_a_middle_dim(shape):
    def function(v, key):
        return torch.ops.aten.index_put(torch.zeros(5, 7, 3), [None, key.argsort()], v, True)

    check_matches_eager(function, torch.randn(shape).requires_grad_(), torch.randn(7))


def test_topk_indices_that_wrap_in_a_narrow_dtype():
    def function(x, key):
        return x[key.topk(60).indices.to(torch.int8).long()]

    check_matches_eager(function, rows(1000, 4), torch.arange(1000.0))


def test_a_narrow_arange_that_wraps():
    check_matches_eager(lambda x: x[torch.arange(200).to(torch.int8).long()], rows(200, 3))
    check_matches_eager(lambda x: x[(torch.arange(200).to(torch.int8) // 2).long()], rows(200, 3))


def test_a_divisor_that_wraps_in_a_narrow_dtype():
    check_matches_eager(lambda x: x[(torch.arange(100, dtype=torch.int8) % 50 // 200).long()], rows(200, 3))


def test_an_arange_of_one_element_expanded_along_both_dims():
    check_matches_eager(lambda x: x[torch.arange(1)[:, None].expand(3, 5)], rows(15, 3))
    check_matches_eager(lambda x: x[torch.arange(1)[:, None].expand(3, 5).reshape(-1)], rows(5, 3))


def test_aranges_expanded_along_one_dim():
    for make in (
        lambda: torch.arange(5)[:, None].expand(5, 3),
        lambda: torch.arange(5)[None].expand(3, 5),
        lambda: torch.arange(5).expand(3, 5),
    ):
        check_matches_eager(lambda x, make=make: x[make().reshape(-1)], rows(5, 3))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.uint8, torch.int32])
def test_a_permutation_of_a_narrow_dtype_reaches_an_index(dtype):
    check_matches_eager(lambda x: x[torch.arange(50, dtype=dtype).flip(0).argsort()], rows(50, 3))
    check_matches_eager(lambda x: x[torch.arange(50, dtype=dtype).flip(0).argsort() // 2], rows(25, 3))


def test_a_permutation_that_is_rounded_on_the_way():
    """bfloat16 represents integers up to 256, so the result is no permutation."""
    check_matches_eager(
        lambda x, key: x[key.argsort().to(torch.bfloat16).to(torch.int64).clamp(max=999)], rows(1000, 3), torch.randn(1000)
    )


def test_index_add_with_a_factor_is_rounded_once():
    def function(b, i, s):
        return b.index_add(1, i, s, alpha=-0.5)

    b, i, s = torch.randn(40, 9).bfloat16(), torch.randint(0, 9, (300,)), torch.randn(40, 300).bfloat16()
    exact = function(b.double(), i, s.double())
    with eager_graphs():
        got = torch.compile(function, backend="gradfuse", fullgraph=True)(b, i, s)
    assert relative_error(got, exact) <= 1.2 * relative_error(exact.bfloat16(), exact)


def test_a_scatter_whose_narrow_index_is_widened():
    def function(x, key):
        return torch.zeros(12, 5).scatter_add(0, key.topk(1).indices.to(torch.int8).long()[:, None].expand(-1, 5), x)

    check_matches_eager(function, rows(1, 5), torch.randn(12))


def test_a_scatter_of_as_many_rows_as_the_data_has():
    def function(x, mask):
        return torch.zeros(11, 1).scatter_add(0, torch.where(mask)[0][:1].expand(4, -1), x)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_matches_eager(function, rows(4, 1), torch.rand(12) > 0.4)


def test_a_random_permutation_that_its_dtype_rounds():
    """bf16 has only 258 different numbers among 0 .. 258, so the sorted indices are the inverse of nothing."""

    def function(x):
        order = torch.randperm(259, dtype=torch.bfloat16).argsort()
        return x[order], order

    x = rows(259, 4)
    with eager_graphs():
        out, order = torch.compile(function, backend="gradfuse", fullgraph=True)(x)
    weight = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, x, weight)
    torch.testing.assert_close(got, torch.zeros_like(x).index_add(0, order, weight))


def masked_columns(x, i, m):
    return torch.where(m, 0.0, x[i])


def masked_columns_of_a_lookup(x, i, m):
    return torch.nn.functional.embedding(i, x).masked_fill(m, 0.0)


def masked_values(x, i, m):
    return x.new_zeros(4, 8).index_add(0, i, torch.where(m, 0.0, x[i]))


def masked_values_that_broadcast(x, i, m):
    return x.new_zeros(4, 8).index_put((i,), torch.where(m, 0.0, x[0]), accumulate=True)


def masked_planes(x, i, m):
    return torch.where(torch.outer(m, m), 0.0, x[:, :, None].expand(-1, -1, 8)[i[:, None].expand(-1, 8)])


@pytest.mark.parametrize(
    "function",
    [masked_columns, masked_columns_of_a_lookup, masked_values, masked_values_that_broadcast, masked_planes],
    ids=lambda f: f.__name__,
)
def test_a_mask_of_columns_is_none_of_rows(function):
    """``where`` aligns a mask on the right, and here there are as many columns as rows."""
    generator = torch.Generator().manual_seed(0)
    index, mask = torch.randint(0, 4, (8,), generator=generator), torch.rand(8, generator=generator) < 0.5
    with on_target(triton=True):
        check_matches_eager(function, rows(4, 8), index, mask, options={"deterministic": True})
