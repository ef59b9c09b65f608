"""Small tables by an index that is read for each pair: ``t[index[b, q, k], h]``, whose gradient is added for all heads."""

import dataclasses

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from inductor_ext.attention import deterministic, hoisting, pair_entries
from inductor_ext.core.report import collect
from tests.support.interpreter import triton_on_cpu

from . import comparison
from .case import Case, relative_error
from .comparison import BATCH, DIM, HEADS

LENGTH, ENTRIES = 72, 9
STORED, ADDED = "partial sums in a fixed order", "one fp32 add for each score"


@pytest.fixture(autouse=True)
def as_for_long_sequences(monkeypatch):
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)
    monkeypatch.setattr(pair_entries, "FEWEST_SCORES", 0)


def index(low=-ENTRIES, high=ENTRIES, shape=(BATCH, LENGTH, LENGTH)):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0))


def table(*shape):
    return comparison.draw(*shape, seed=2)


#: The shape of a table, and its index from b, h and entries of pairs: one for each of (b, q, k) and one for each of (q, k).
CASES = {
    "heads_last": ((ENTRIES, HEADS), lambda b, h, each, shared: (each, h)),
    "heads_first": ((HEADS, ENTRIES), lambda b, h, each, shared: (h, shared)),
    "heads_between": ((ENTRIES, HEADS + 1, 4), lambda b, h, each, shared: (each, h, shared % 4)),
    "a_constant": ((2, ENTRIES, HEADS), lambda b, h, each, shared: (1, each, h)),
    "by_batch": ((BATCH, HEADS, ENTRIES), lambda b, h, each, shared: (b, h, shared)),
}


def bias_of(name, pairs):
    def bias(t):
        indices = CASES[name][1]
        return lambda s, b, h, q, k: s * 2 + t[indices(b, h, pairs[b, q, k], pairs[0, q, k])] * s

    return bias


@pytest.mark.breadth(2)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["default", "deterministic"])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, options):
    with collect() as report:
        comparison.assert_matches_float64(bias_of(name, index()), table(*CASES[name][0]), (LENGTH, LENGTH), compiler=options)
    assert STORED in how(report)


def test_two_lookups_one_pass_and_a_mask():
    pairs = index()
    bias = lambda t: lambda s, b, h, q, k: s + t[pairs[b, q, k], h] + t[pairs[b, k, q], h]  # noqa: E731
    mask = lambda b, h, q, k: (q // 16 == k // 16) | (k < 3)  # noqa: E731
    comparison.assert_matches_float64(
        bias, table(ENTRIES, HEADS), (LENGTH, LENGTH), mask=mask, kv_heads=1, bwd_ONE_PASS=True
    )


def test_the_workspace_is_zero_where_the_kernel_stores_nothing(monkeypatch):
    """The mask hides whole blocks. Without zeros the workspace would be allocated by ``empty_strided``."""
    pairs = index()
    monkeypatch.setattr(deterministic, "empty_strided", None)
    mask = lambda b, h, q, k: q // 16 == k // 16  # noqa: E731
    blocks = create_block_mask(mask, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    bias = lambda t: lambda s, b, h, q, k: s + t[pairs[b, q, k], h]  # noqa: E731
    comparison.assert_matches_float64(bias, table(ENTRIES, HEADS), (LENGTH, LENGTH), mask=mask, block_mask=blocks)


def test_entries_out_of_bounds_that_the_mask_hides():
    """They have no entry. The workspace is zero there, but a number that is no entry would be an error."""
    inside = index(0)
    pairs = torch.where(torch.arange(LENGTH) < 50, inside, 1000)

    def bias(t):
        chosen = inside if t.dtype is torch.float64 else pairs
        return lambda s, b, h, q, k: s + t[chosen[b, q, k], h]

    comparison.assert_matches_float64(bias, table(ENTRIES, HEADS), (LENGTH, LENGTH), mask=lambda b, h, q, k: k < 50)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["default", "deterministic"])
def test_a_table_in_float64_keeps_the_precision_of_the_sums(options):
    pairs = index()
    exact, found = table(ENTRIES, HEADS).double().requires_grad_(), {}
    inputs = comparison.heads(LENGTH)
    for fewest in (0, 2**40):
        pair_entries.FEWEST_SCORES = fewest
        torch._dynamo.reset()
        attend = lambda q, k, v, t: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + t[pairs[b, i, j], h])  # noqa: E731
        with triton_on_cpu():
            out = torch.compile(attend, backend="gradfuse", dynamic=False, options=options)(*inputs, exact)
            (found[fewest],) = torch.autograd.grad(out.square().sum(), exact)
    assert relative_error(found[0], found[2**40]) < 1e-6


def how(report):
    return next(d.why for d in report.decisions if d.op == "flex_attention_backward")


def planned(score_mod, **options):
    torch._dynamo.reset()
    inputs = [torch.zeros(BATCH, HEADS, LENGTH, DIM, requires_grad=True) for _ in range(3)]
    with triton_on_cpu(), collect() as report:
        out = torch.compile(lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod), backend="gradfuse", **options)(
            *inputs
        )
        torch.autograd.grad(out.sum(), inputs)
    return how(report)


@pytest.mark.breadth(0)
def test_which_gradients_are_stored(monkeypatch):
    pairs, of_heads, position = index(0), index(0, shape=(HEADS, LENGTH, LENGTH)), torch.arange(LENGTH).flip(0) % 7
    t = table(ENTRIES, HEADS).requires_grad_()
    read = lambda s, b, h, q, k: s + t[pairs[b, q, k], h]  # noqa: E731
    assert STORED in planned(read)
    for other in (
        lambda s, b, h, q, k: s + t[of_heads[h, q, k], h],
        lambda s, b, h, q, k: s + t[position[q] - position[k], h],
        lambda s, b, h, q, k: s + t[pairs[b, q, k], 1],
        lambda s, b, h, q, k: s + t[pairs[b, q, k], h] + t[position[q] - position[k], h],
        lambda s, b, h, q, k: s + t[(pairs[b, q, k] + s.long()).clamp(0, 8), h],
    ):
        assert ADDED in planned(other)
    assert ADDED in planned(read, dynamic=True)
    # Each of several contributions has a workspace.
    both = lambda s, b, h, q, k: s + t[pairs[b, q, k], h] + t[pairs[b, k, q], h]  # noqa: E731
    monkeypatch.setattr(pair_entries, "MOST_SCORES", 2 * BATCH * HEADS * LENGTH**2)
    assert STORED in planned(both)
    monkeypatch.setattr(pair_entries, "MOST_SCORES", 2 * BATCH * HEADS * LENGTH**2 - 1)
    assert ADDED in planned(both) and STORED in planned(read)
    # The sums of a table with more entries than pairs would be larger than the workspace.
    large = table(LENGTH**2 + 1, HEADS).requires_grad_()
    monkeypatch.setattr(pair_entries, "MOST_ENTRIES_OF_A_HEAD", 2**20)
    assert ADDED in planned(lambda s, b, h, q, k: s + large[pairs[b, q, k], h])
    monkeypatch.setattr(pair_entries, "MOST_SCORES", BATCH * HEADS * LENGTH**2 - 1)
    assert ADDED in planned(read)


def graphormer(length, heads, dim, dtype):
    pairs = torch.randint(-100, 100, (2, length, length), generator=torch.Generator().manual_seed(0))

    def bias(t):
        chosen = pairs.to(t["t"].device)
        return lambda s, b, h, q, k: s + t["t"][chosen[b, q, k], h]

    sizes = {"length": length, "heads": heads, "dim": dim, "dtype": dtype}
    return dataclasses.replace(Case("graphormer", {"t": (100, heads)}, bias, bias), **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length, heads, dim", [(97, 32, 32), (1000, 4, 64), (384, 16, 128)])
def test_on_a_gpu(length, heads, dim, dtype, masked):
    case = graphormer(length, heads, dim, dtype)
    dataclasses.replace(case, mask=(lambda b, h, q, k: q >= k) if masked else None).check("cuda")


@pytest.mark.gpu
def test_every_run_is_the_same():
    case = dataclasses.replace(graphormer(256, 16, 64, torch.bfloat16), dtypes={"t": torch.float32})
    inputs, tables = case.make("cuda")
    run = torch.compile(case.function(tables, "cuda"), backend="gradfuse")
    out = run(*inputs)
    grads = [torch.autograd.grad(out.sum(), tables["t"], retain_graph=True)[0] for _ in range(5)]
    assert all(torch.equal(grads[0], other) for other in grads[1:])
