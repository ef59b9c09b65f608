"""Inner products of captured rows that are added to the score become columns of the query and the key."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from inductor_ext.attention import columns, hoisting
from inductor_ext.core.report import collect
from tests.support.eager_graphs import eager_graphs
from tests.support.interpreter import DEVICES, triton_on_cpu

from .case import Case, relative_error

B, H, S, W = 2, 2, 80, 8
ROWS, OF_THE_BATCH, OF_ALL = (B, H, S, W), (B, 1, S, W), (S, W)


def product(rows, columns):
    return torch.einsum("bhqd,bhkd->bhqk", rows, columns)


#: score_mods whose products become columns, and the same for all scores.
TAKEN = {
    "dot": Case(
        "dot",
        {"a": ROWS, "c": ROWS},
        lambda t: lambda s, b, h, q, k: s + torch.dot(t["a"][b, h, q], t["c"][b, h, k]),
        lambda t: lambda s, b, h, q, k: s + product(t["a"], t["c"]),
    ),
    "sum_of_products": Case(
        "sum_of_products",
        {"a": ROWS, "c": ROWS, "t": (H, S)},
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k] - (t["c"][b, h, k] * t["a"][b, h, q]).sum(-1) * 0.5,
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k] - product(t["a"], t["c"]) * 0.5,
    ),
    "two_products": Case(
        "two_products",
        {"a": ROWS, "c": ROWS, "e": (B, H, S, 3)},
        lambda t: (
            lambda s, b, h, q, k: (
                2.0 * torch.dot(t["a"][b, h, q], t["c"][b, h, k]) + s - torch.dot(t["e"][b, h, q], t["e"][b, h, k])
            )
        ),
        lambda t: lambda s, b, h, q, k: 2.0 * product(t["a"], t["c"]) + s - product(t["e"], t["e"]),
    ),
    "then_capped": Case(
        "then_capped",
        {"a": ROWS, "c": ROWS},
        lambda t: lambda s, b, h, q, k: torch.tanh((s + torch.dot(t["a"][b, h, q], t["c"][b, h, k])) / 8) * 8,
        lambda t: lambda s, b, h, q, k: torch.tanh((s + product(t["a"], t["c"])) / 8) * 8,
    ),
    "used_twice": Case(
        "used_twice",
        {"a": ROWS, "c": ROWS, "t": (H,)},
        lambda t: lambda s, b, h, q, k: (x := s + torch.dot(t["a"][b, h, q], t["c"][b, h, k])) * x.sigmoid() * t["t"][h],
        lambda t: lambda s, b, h, q, k: (x := s + product(t["a"], t["c"])) * x.sigmoid() * t["t"][:, None, None],
    ),
    "computed_rows": Case(
        "computed_rows",
        {"a": ROWS, "c": ROWS, "t": (H, S)},
        lambda t: lambda s, b, h, q, k: s + torch.dot(t["a"][b, h, q].tanh() * t["t"][h, q], t["c"][b, h, k // 2]),
        lambda t: lambda s, b, h, q, k: s + product(t["a"].tanh() * t["t"][..., None], t["c"][:, :, torch.arange(S) // 2]),
    ),
    "sum_used_twice": Case(
        "sum_used_twice",
        {"a": ROWS, "c": ROWS},
        lambda t: lambda s, b, h, q, k: (x := s + torch.dot(t["a"][b, h, q], t["c"][b, h, k])) + x,
        lambda t: lambda s, b, h, q, k: 2 * (s + product(t["a"], t["c"])),
    ),
    "shared_rows": Case(
        "shared_rows",
        {"a": ROWS, "c": OF_THE_BATCH, "e": OF_ALL},
        lambda t: (
            lambda s, b, h, q, k: s + torch.dot(t["a"][b, h, q], t["c"][b, 0, k]) + torch.dot(t["e"][q], t["c"][b, 0, k])
        ),
        lambda t: lambda s, b, h, q, k: s + product(t["a"] + t["e"], t["c"].expand(ROWS)),
    ),
}
#: Cases that only differ in what is not the score_mod.
OTHERS = [
    replace(TAKEN["dot"], name="causal", mask=lambda b, h, q, k: q >= k),
    replace(TAKEN["dot"], name="transposed", layout="transposed"),
    replace(TAKEN["dot"], name="expanded", layout="expanded"),
    replace(TAKEN["dot"], name="other_width_of_values", v_dim=32),
    replace(TAKEN["dot"], name="rows_learn_alone", inputs_need_grad=False),
    replace(TAKEN["dot"], name="bfloat16", dtype=torch.bfloat16),
    replace(TAKEN["two_products"], name="wide", dim=64, dtype=torch.bfloat16),
]
CASES = {c.name: c for c in (*TAKEN.values(), *OTHERS)}


def paths(report):
    return [d.path for d in report.decisions if d.pass_name == "hoisting"]


def check(case, device, **how):
    with collect() as report:
        case.check(device, **how)
    return paths(report)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", CASES)
def test_gradients_on_a_cpu(name):
    assert "columns" in check(CASES[name], "cpu")


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_kernels(name, device):
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu():
        found = check(CASES[name], "cuda" if device == "cuda" else "cpu")
    assert "columns" in found and "table" not in found


def attention(q, k, v, a, c):
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + 1e-3 * torch.dot(a[b, h, i], 1e3 * c[b, h, j]))


def compared(lengths, dtype=torch.float32, **how):
    """The largest error of the output and of any gradient for attention of these lengths, and the decisions."""
    errors = []
    with collect() as report:
        compiled = torch.compile(attention, backend="gradfuse", fullgraph=True, **how)
        for n in lengths:
            operands = [torch.randn(B, H, n, w, dtype=dtype, requires_grad=True) for w in (16, 16, 16, W, W)]
            exact = [x.detach().double().requires_grad_() for x in operands]
            q, k, v, a, c = exact
            out, want = compiled(*operands), (q @ k.mT / 4 + product(a, c)).softmax(-1) @ v
            weight = torch.randn_like(out)
            got = torch.autograd.grad(out, operands, weight)
            wanted = torch.autograd.grad(want, exact, weight.double())
            errors += [relative_error(g, w) for g, w in zip((out, *got), (want, *wanted), strict=True)]
    return max(errors), paths(report)


@pytest.mark.breadth(0)
def test_lengths_that_change():
    error, found = compared((97, 64, 33))
    assert error < 1e-5 and found == ["columns"] * 2


@pytest.mark.breadth(0)
def test_a_width_that_changes_keeps_its_table():
    error, found = compared((97, 64), dynamic=True)
    assert error < 1e-5 and set(found) == {"table"}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("scale", [0.0, 1e-30, -0.5])
def test_a_scale_of_the_user(scale):
    operands = [torch.randn(B, H, 20, n, requires_grad=True) for n in (16, 16, 16, W, W)]

    def function(q, k, v, a, c):
        score_mod = lambda s, b, h, i, j: s + torch.dot(a[b, h, i], c[b, h, j])  # noqa: E731
        return flex_attention(q, k, v, score_mod=score_mod, scale=scale)

    with eager_graphs(), collect() as report:
        out = torch.compile(function, backend="gradfuse", fullgraph=True)(*operands)
        got = torch.autograd.grad(out.sin().sum(), operands[2:])
    q, k, v, a, c = exact = [x.detach().double().requires_grad_() for x in operands]
    want = (q @ k.mT * scale + product(a, c)).softmax(-1) @ v
    wanted = torch.autograd.grad(want.sin().sum(), exact[2:])
    assert all(relative_error(g, w) < 1e-5 for g, w in zip((out, *got), (want, *wanted), strict=True))
    assert paths(report) == ["columns" if scale == -0.5 else "table"]


@pytest.mark.breadth(0)
def test_float64():
    """The columns have the precision of the query: 1e-3 is no power of two."""
    error, found = compared((20,), torch.float64)
    assert error < 1e-12 and found == ["columns"]


DOT = TAKEN["dot"]
#: Integers whose products wrap.
NARROW = torch.arange(B * H * S * W).mul(37).remainder(200).sub(100).view(ROWS).to(torch.int8)
PRODUCTS = NARROW[:, :, :, None] * NARROW[:, :, None]
#: What keeps its table of pairs.
KEPT = {
    # Columns of half precision would round 1 / scale, or the gradients of rows that are shared.
    "no_power_of_two": replace(DOT, dim=40, dtype=torch.bfloat16),
    "factor_of_three": replace(
        DOT,
        score_mod=lambda t: lambda s, b, h, q, k: s + 3.0 * torch.dot(t["a"][b, h, q], t["c"][b, h, k]),
        dense=lambda t: lambda s, b, h, q, k: s + 3.0 * product(t["a"], t["c"]),
        dtype=torch.bfloat16,
    ),
    "shared_in_half_precision": replace(
        DOT,
        tables={"a": ROWS, "c": OF_THE_BATCH},
        score_mod=lambda t: lambda s, b, h, q, k: s + torch.dot(t["a"][b, h, q], t["c"][b, 0, k]),
        dense=lambda t: lambda s, b, h, q, k: s + product(t["a"], t["c"].expand(ROWS)),
        dtype=torch.bfloat16,
    ),
    "fp16": replace(DOT, dtype=torch.float16),
    "wider_rows": replace(DOT, dtype=torch.bfloat16, dtypes={"a": torch.float32, "c": torch.float32}),
    # A group of heads of the query would need its own columns of the key.
    "grouped_heads": replace(DOT, heads=4, kv_heads=2, tables={"a": (B, 4, S, W), "c": (B, 4, S, W)}),
    "too_wide": replace(DOT, dim=256, batch=1, tables={"a": (1, H, S, W), "c": (1, H, S, W)}),
    # The score is not a term of the sum, or the product is no term of it.
    "multiplied_by_the_score": replace(
        DOT,
        score_mod=lambda t: lambda s, b, h, q, k: s * torch.dot(t["a"][b, h, q], t["c"][b, h, k]),
        dense=lambda t: lambda s, b, h, q, k: s * product(t["a"], t["c"]),
    ),
    "subtracted_score": replace(
        DOT,
        score_mod=lambda t: lambda s, b, h, q, k: torch.dot(t["a"][b, h, q], t["c"][b, h, k]) - s,
        dense=lambda t: lambda s, b, h, q, k: product(t["a"], t["c"]) - s,
    ),
    "scaled_score": replace(
        DOT,
        score_mod=lambda t: lambda s, b, h, q, k: 0.5 * s + torch.dot(t["a"][b, h, q], t["c"][b, h, k]),
        dense=lambda t: lambda s, b, h, q, k: 0.5 * s + product(t["a"], t["c"]),
    ),
    "score_twice": replace(
        DOT,
        score_mod=lambda t: lambda s, b, h, q, k: s + s + torch.dot(t["a"][b, h, q], t["c"][b, h, k]),
        dense=lambda t: lambda s, b, h, q, k: s + s + product(t["a"], t["c"]),
    ),
    "factor_that_varies": replace(
        DOT,
        tables={"a": ROWS, "c": ROWS, "t": (H, S)},
        score_mod=lambda t: lambda s, b, h, q, k: s + t["t"][h, k] * torch.dot(t["a"][b, h, q], t["c"][b, h, k]),
        dense=lambda t: lambda s, b, h, q, k: s + t["t"][:, None] * product(t["a"], t["c"]),
    ),
}


@pytest.mark.breadth(0)
@pytest.mark.parametrize("name", KEPT)
def test_what_keeps_its_table(name):
    found = check(KEPT[name], "cpu")
    assert "columns" not in found and "table" in found


#: Inner products of narrow integers, which wrap.
INTEGERS = {
    "of_pairs": replace(
        DOT,
        tables={"t": (H, S)},
        score_mod=lambda t: lambda s, b, h, q, k: s + t["t"][h, k] + 0.1 * torch.dot(NARROW[b, h, q], NARROW[b, h, k]),
        dense=lambda t: lambda s, b, h, q, k: s + t["t"][:, None] + 0.1 * PRODUCTS.sum(-1).to(torch.int8),
    ),
    "sums_of_products_that_wrap": replace(
        DOT,
        tables={"t": (H, S)},
        score_mod=lambda t: lambda s, b, h, q, k: s + t["t"][h, k] + 0.1 * (NARROW[b, h, q] * NARROW[b, h, k]).sum(-1),
        dense=lambda t: lambda s, b, h, q, k: s + t["t"][:, None] + 0.1 * PRODUCTS.sum(-1),
    ),
    "of_keys": replace(
        DOT,
        tables={"t": (H, S)},
        score_mod=lambda t: lambda s, b, h, q, k: s + t["t"][h, k] + 0.1 * torch.dot(NARROW[b, h, k], NARROW[b, h, k]),
        dense=lambda t: (
            lambda s, b, h, q, k: s + t["t"][:, None] + 0.1 * (NARROW * NARROW).sum(-1).to(torch.int8)[:, :, None]
        ),
    ),
}


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", INTEGERS)
def test_products_of_integers(name):
    """No matmul wraps as they do, so that those of pairs are neither columns nor a table."""
    assert check(INTEGERS[name], "cpu") == (["table"] if name == "of_keys" else [])


@pytest.mark.breadth(0)
def test_shared_rows_whose_table_is_too_large(monkeypatch):
    """Then their gradients are rounded for each head before they are added, as those of a tensor that is expanded are."""
    monkeypatch.setattr(columns, "LARGEST_TABLE", 0)
    assert "columns" in check(KEPT["shared_in_half_precision"], "cpu")


def test_a_score_that_is_not_learned(monkeypatch):
    """Without gradients no kernel of ours runs, but stock's cannot sum over rows either."""
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)
    operands = [torch.randn(B, H, S, n) for n in (16, 16, 16, W, W)]
    with collect() as report:
        out = torch.compile(attention, backend="gradfuse")(*operands)
    q, k, v, a, c = (x.double() for x in operands)
    assert relative_error(out, (q @ k.mT / 4 + product(a, c)).softmax(-1) @ v) < 1e-5
    assert paths(report) == ["columns"]
