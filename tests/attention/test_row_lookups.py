"""Lookups in rows of learned tensors (DeBERTa's scores) are made into a table of pairs by gathers."""

import contextlib

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from inductor_ext.attention import hoisting, row_lookups
from inductor_ext.core.report import collect
from tests.attention.case import relative_error
from tests.support.interpreter import DEVICES, triton_on_cpu

B, H, D, BINS = 2, 8, 32, 40


@pytest.fixture(autouse=True)
def as_if_large(monkeypatch):
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)


def distance(q, k):
    return (q - k).clamp(-20, 19) + 20


#: score_mods of two tensors [B, H, S, BINS], and the sum of their lookups for all positions.
MODS = {
    "both": (
        lambda x, y: lambda s, b, h, q, k: s + x[b, h, q, distance(q, k)] + y[b, h, k, distance(q, k)],
        lambda x, y, q, k: at(x, distance(q, k)) + at(y, distance(q, k).mT).mT,
    ),
    "negative": (
        lambda x, y: lambda s, b, h, q, k: s + x[b, h, q, (q - k).clamp(-20, 19)] * y[b, h, k, (k - q).clamp(-20, 19)],
        lambda x, y, q, k: at(x, (q - k).clamp(-20, 19)) * at(y, (k - q).clamp(-20, 19).mT).mT,
    ),
    "chosen": (
        lambda x, y: lambda s, b, h, q, k: torch.where(q >= k, s + x[b, h, q, distance(q, k)], s - y[b, h, k, (q + k) % 7]),
        lambda x, y, q, k: torch.where(q >= k, at(x, distance(q, k)), -at(y, ((q + k) % 7).mT).mT),
    ),
}


def at(x, index):
    return torch.gather(x, -1, (index % BINS).expand(B, H, *index.shape))


def run(mod, length, dtype, device, mask=None, tensors=None, options=None):
    """The output, the gradients of both tensors, the report, and the operands in float64."""
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()  # noqa: E731
    q, k, v = (make(B, H, length, D) for _ in range(3))
    x, y = tensors or (make(B, H, length, BINS) for _ in range(2))

    def function(q, k, v, x, y):
        return flex_attention(q, k, v, score_mod=mod(x, y), block_mask=mask)

    torch._dynamo.reset()
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu(), collect() as report:
        out = torch.compile(function, backend="gradfuse", dynamic=False, options=options)(q, k, v, x, y)
        weight = torch.randn(out.shape, generator=generator).to(device, dtype)
        got = torch.autograd.grad(out, (q, k, v, x, y), weight)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v, x, y)]
    return out, got, report.decisions, exact, weight.double()


def hoisted(decisions):
    return any(d.path == "table" and "batch+head+pair" in d.why for d in decisions)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [64, 97])
@pytest.mark.parametrize("name", MODS)
def test_gradients(name, length, masked, dtype, device):
    mod, dense = MODS[name]
    device = "cuda" if device == "cuda" else "cpu"
    causal = lambda b, h, q, k: q >= k  # noqa: E731
    mask = create_block_mask(causal, 1, 1, length, length, device, _compile=False) if masked else None
    out, got, decisions, (q, k, v, x, y), weight = run(mod, length, dtype, device, mask)
    assert hoisted(decisions) and [d.path for d in decisions if d.pass_name == "scatters"] == ["bins"] * 2
    rows, columns = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)
    scores = q @ k.mT * D**-0.5 + dense(x, y, rows, columns)
    if masked:
        scores = scores.masked_fill(rows < columns, -torch.inf)
    exact = scores.softmax(-1) @ v
    want = torch.autograd.grad(exact, (q, k, v, x, y), weight)
    bound = 1e-5 if dtype is torch.float32 else 8e-3
    assert all(relative_error(g, w) < bound for g, w in zip((out, *got), (exact, *want), strict=True))


def learned(*shape):
    return torch.randn(shape, requires_grad=True)


#: What stays in the kernel: a sum of positions, a table for all batch elements, and indices that differ between heads.
KEPT = {
    "a_relative_shift": (
        lambda x, y: lambda s, b, h, q, k: s + x[b, h, q, q - k + 31] + y[b, h, k, q - k + 31],
        [(B, H, 32, 63), (B, H, 32, 63)],
    ),
    "one_table_for_the_batch": (
        lambda x, y: lambda s, b, h, q, k: s + x[h, q, distance(q, k)] + y[h, k, distance(q, k)],
        [(H, 32, BINS), (H, 32, BINS)],
    ),
    "an_index_for_each_head": (
        lambda x, y: lambda s, b, h, q, k: s + x[b, h, q, distance(q, k) // (h + 1)] + y[b, h, k, distance(q, k) // (h + 1)],
        [(B, H, 32, BINS), (B, H, 32, BINS)],
    ),
}


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", KEPT)
def test_what_stays_in_the_kernel(name):
    mod, shapes = KEPT[name]
    *_, decisions, _, _ = run(mod, 32, torch.float32, "cpu", tensors=[learned(*shape) for shape in shapes])
    assert not hoisted(decisions) and not any(d.path == "bins" for d in decisions)


@pytest.mark.breadth(0)
@pytest.mark.parametrize(
    "module, name, number", [(hoisting, "LARGEST_TABLE", B * H * 32 * 32 - 1), (row_lookups, "FEWEST_SLICES", B * H + 1)]
)
def test_sizes(module, name, number, monkeypatch):
    mod, _ = MODS["both"]
    *_, decisions, _, _ = run(mod, 32, torch.float32, "cpu")
    assert hoisted(decisions)
    monkeypatch.setattr(module, name, number)
    *_, decisions, _, _ = run(mod, 32, torch.float32, "cpu")
    assert not hoisted(decisions)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", ["scatters", "entry_sums"])
def test_without_the_passes_for_the_gradient(name):
    mod, _ = MODS["both"]
    *_, decisions, _, _ = run(mod, 32, torch.float32, "cpu", options={"disable": [name]})
    assert not hoisted(decisions)


@pytest.mark.breadth(0)
def test_other_lengths_of_queries_and_keys():
    mod, dense = MODS["both"]
    queries, keys = 33, 50
    make = lambda *shape: torch.randn(shape, requires_grad=True)  # noqa: E731
    operands = (
        make(B, H, queries, D),
        make(B, H, keys, D),
        make(B, H, keys, D),
        make(B, H, queries, BINS),
        make(B, H, keys, BINS),
    )
    torch._dynamo.reset()
    with triton_on_cpu(), collect() as report:
        function = lambda q, k, v, x, y: flex_attention(q, k, v, score_mod=mod(x, y))  # noqa: E731
        out = torch.compile(function, backend="gradfuse", dynamic=False)(*operands)
        got = torch.autograd.grad(out.square().sum(), operands)
    assert hoisted(report.decisions)
    q, k, v, x, y = exact = [t.detach().double().requires_grad_() for t in operands]
    scores = q @ k.mT * D**-0.5 + dense(x, y, torch.arange(queries)[:, None], torch.arange(keys))
    want = torch.autograd.grad((scores.softmax(-1) @ v).square().sum(), exact)
    assert all(relative_error(g, w) < 1e-5 for g, w in zip(got, want, strict=True))
