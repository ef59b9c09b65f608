"""Relative shifts (Conformer, Transformer-XL) whose rows TMA cannot read are made into matrices outside of the kernel."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Interpreter
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from inductor_ext.attention import hoisting
from inductor_ext.attention.shifts import Shift, shifted
from inductor_ext.core.dynamo_graph import Inserter
from inductor_ext.core.report import collect
from tests.attention.case import relative_error
from tests.support.interpreter import DEVICES, triton_on_cpu

B, H, D = 2, 2, 32


@pytest.fixture(autouse=True)
def as_if_large(monkeypatch):
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 0)


#: The row of a tensor [B, H, rows, width] and the place in it, for Q queries and K keys; the width; the number of tables.
SHIFTS = {
    "relative_shift": (lambda q, k, Q, K: (q, q - k + K - 1), lambda Q, K: Q + K - 1, 1),
    "ascending": (lambda q, k, Q, K: (q, k - q + Q - 1), lambda Q, K: Q + K + 5, 1),
    "rows_of_the_key": (lambda q, k, Q, K: (k, q - k + K - 1), lambda Q, K: Q + K - 1, 1),
    "rows_of_the_key_descending": (lambda q, k, Q, K: (k, k - q + Q), lambda Q, K: Q + K, 1),
    "two_steps_a_row": (lambda q, k, Q, K: (q, 2 * q + k), lambda Q, K: 2 * Q + K, 1),
    # A plain slice is no shift. Indices below zero count from the end, and a step of two keys is no matrix.
    "slice": (lambda q, k, Q, K: (q, k + 3), lambda Q, K: K + 3, 0),
    "wraps": (lambda q, k, Q, K: (q, q - k), lambda Q, K: Q + K, 0),
    "two_steps_a_key": (lambda q, k, Q, K: (q, 2 * k), lambda Q, K: 2 * K, 0),
    # With one query the index is in range, and the next row would begin before this one ends.
    "rows_would_overlap": (lambda q, k, Q, K: (q, k - q), lambda Q, K: K, 0),
}


def run(name, queries, keys, dtype, device, mask=None, twice=False):
    """The output and the gradients, the same in float64, and the report. twice: the scores have two terms of each element."""
    at, width, _ = SHIFTS[name]
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()  # noqa: E731
    q, k, v = make(B, H, queries, D), make(B, H, keys, D), make(B, H, keys, D)
    rows = keys if name.startswith("rows_of") else queries
    x = make(B, H, rows, width(queries, keys))

    def bias(x, b, h, i, j):
        row, place = at(i, j, queries, keys)
        return x[b, h, row, place] + x[b, h, row, place].sin() if twice else x[b, h, row, place]

    def function(q, k, v, x):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias(x, b, h, i, j), block_mask=mask)

    torch._dynamo.reset()
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu(tma=True), collect() as report:
        out = torch.compile(function, backend="gradfuse", dynamic=False)(q, k, v, x)
        weight = torch.randn(out.shape, generator=generator).to(device, dtype)
        got = torch.autograd.grad(out, (q, k, v, x), weight)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v, x)]
    b, h = (torch.arange(n, device=device).view(shape) for n, shape in ((B, (-1, 1, 1, 1)), (H, (-1, 1, 1))))
    i, j = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    scores = exact[0] @ exact[1].mT * D**-0.5 + bias(exact[3], b, h, i, j)
    if mask is not None:
        scores = scores.masked_fill(i < j, -torch.inf)
    want = scores.softmax(-1) @ exact[2]
    return (out, *got), (want, *torch.autograd.grad(want, exact, weight.double())), report.decisions


EVERY_SHIFT = [
    Shift(by_key, row_factor, column_factor, constant, width, columns)
    for by_key in (False, True)
    for row_factor in (-2, -1, 0, 1, 2)
    for column_factor in (-1, 1)
    for constant in range(-1, 9)
    for width in (5, 9)
    for columns in (1, 4, 5)
]


@pytest.mark.parametrize("rows", [1, 3])
def test_which_shifts_are_matrices(rows):
    """Those whose places are in their rows. Their elements are those that the index says, and other rows are not read."""
    row = torch.arange(rows)[:, None]
    for shift in EVERY_SHIFT:
        place = shift.row_factor * row + shift.column_factor * torch.arange(shift.columns) + shift.constant
        in_range = bool(((place >= 0) & (place < shift.width)).all())
        assert shift.inside(rows) == (in_range and shift.columns <= shift.width + shift.row_factor), shift
        if not shift.inside(rows):
            continue
        graph, x = Graph(), torch.randn(2, 1, rows, shift.width)
        tensor = graph.placeholder("x")
        tensor.meta["example_value"] = x
        keys = rows if shift.by_key else shift.columns
        graph.output(shifted(Inserter(graph, tensor), tensor, shift, x.shape, keys + 2))
        got = Interpreter(GraphModule({}, graph)).run(x)
        want = x.gather(3, place.expand(2, 1, -1, -1))
        assert torch.equal(got, F.pad(want.mT if shift.by_key else want, (0, 2))), shift


def tables(decisions):
    return {d.why for d in decisions if d.path == "table" and "batch+head+pair" in d.why}


#: With more than one query, rows that would overlap are indexed out of range.
LENGTHS = [(name, *n) for name in SHIFTS for n in ((65, 49), (1, 50)) if n[0] == 1 or name != "rows_would_overlap"]


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "queries", "keys"), LENGTHS)
def test_gradients(name, queries, keys, masked, dtype, device):
    device = "cuda" if device == "cuda" else "cpu"
    causal = lambda b, h, q, k: q >= k  # noqa: E731
    mask = create_block_mask(causal, 1, 1, queries, keys, device, _compile=False) if masked else None
    got, want, decisions = run(name, queries, keys, dtype, device, mask)
    # With one query, q is 0.
    if queries > 1 or name == "rows_would_overlap":
        assert len(tables(decisions)) == SHIFTS[name][-1]
    bound = 1e-5 if dtype is torch.float32 else 8e-3
    assert all(relative_error(g, w) < bound for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("twice", [False, True])
def test_a_table_has_the_dtype_of_its_tensor(twice):
    got, want, decisions = run("relative_shift", 40, 50, torch.bfloat16, "cpu", twice=twice)
    (why,) = tables(decisions)
    assert f"its table is [B, H, Q, K] of {B * H * 40 * 56 * 2:,} bytes" in why
    assert all(relative_error(g, w) < 8e-3 for g, w in zip(got, want, strict=True))


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    ("width", "first", "diagonal", "tables_made"),
    [
        pytest.param(255, 127, False, 0, id="as TMA reads it"),
        pytest.param(256, 127, False, 1, id="rows are not aligned"),
        pytest.param(255 + 8, 128, False, 1, id="the first row is not aligned"),
        pytest.param(255, 127, True, 1, id="another table needs ascending keys"),
    ],
)
def test_what_stays_in_the_kernel(width, first, diagonal, tables_made):
    x, t = torch.randn(1, 1, 128, width, requires_grad=True), torch.randn(255, requires_grad=True)
    q = torch.randn(1, 1, 128, D, requires_grad=True)

    def function(q, x, t):
        def score_mod(s, b, h, i, j):
            return s + x[b, h, i, i - j + first] + (t[i - j + 127] if diagonal else 0.0)

        return flex_attention(q, q, q, score_mod=score_mod)

    with triton_on_cpu(tma=True), collect() as report:
        (got,) = torch.autograd.grad(torch.compile(function, backend="gradfuse")(q, x, t).sum(), [x])
    assert len(tables(report.decisions)) == tables_made
    exact, place = x.detach().double().requires_grad_(), torch.arange(128)[:, None] - torch.arange(128)
    bias = torch.gather(exact, 3, (place + first).expand(1, 1, -1, -1)) + (t.double()[place + 127] if diagonal else 0)
    out = (q.double() @ q.double().mT * D**-0.5 + bias).softmax(-1) @ q.double()
    assert relative_error(got, torch.autograd.grad(out.sum(), [exact])[0]) < 1e-5


def test_a_width_that_changes():
    """Only the lengths must be known."""
    x, q = torch.randn(1, 1, 40, 121, requires_grad=True), torch.randn(1, 1, 40, D, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 3)
    function = lambda q, x: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + x[b, h, i, i - j + 39])  # noqa: E731
    with triton_on_cpu(tma=True), collect() as report:
        out = torch.compile(function, backend="gradfuse", fullgraph=True)(q, x)
        torch.autograd.grad(out.sum(), [x])
    assert not tables(report.decisions)


def test_a_shift_among_small_pairs(monkeypatch):
    """The matrix is read by what else becomes a table (wav2vec2-conformer with 49 frames, whose compilation failed)."""
    monkeypatch.setattr(hoisting, "LARGEST_PAIR_TABLE", 2**22)
    x, m = torch.randn(1, 1, 40, 79, requires_grad=True), torch.randn(40, 40, requires_grad=True)
    q = torch.randn(1, 1, 40, D, requires_grad=True)

    def function(q, x, m):
        def score_mod(s, b, h, i, j):
            shifted = x[b, h, i, j - i + 39]
            return s + torch.where(shifted.abs() > 1, shifted.exp(), 0.0) + m[i, (j + i) % 40]

        return flex_attention(q, q, q, score_mod=score_mod)

    with triton_on_cpu(tma=True):
        got = torch.autograd.grad(torch.compile(function, backend="gradfuse")(q, x, m).sum(), [x, m])
    exact, i, j = [t.detach().double().requires_grad_() for t in (x, m)], torch.arange(40)[:, None], torch.arange(40)
    shifted = torch.gather(exact[0], 3, (j - i + 39).expand(1, 1, -1, -1))
    scores = q.double() @ q.double().mT * D**-0.5 + torch.where(shifted.abs() > 1, shifted.exp(), 0.0)
    out = (scores + exact[1][i, (j + i) % 40]).softmax(-1) @ q.double()
    for g, w in zip(got, torch.autograd.grad(out.sum(), exact), strict=True):
        assert relative_error(g, w) < 1e-5


def test_indices_that_a_mask_hides():
    """They are beyond the end of their rows, and would be elements of the next."""
    x, q = torch.randn(1, 1, 40, 40, requires_grad=True), torch.randn(1, 1, 40, D, requires_grad=True)
    mask = create_block_mask(lambda b, h, i, j: i + j < 40, None, None, 40, 40, "cpu", _compile=False)

    def function(q, x):
        return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + x[b, h, i, i + j], block_mask=mask)

    with triton_on_cpu(tma=True), collect() as report:
        (got,) = torch.autograd.grad(torch.compile(function, backend="gradfuse")(q, x).sum(), [x])
    assert not tables(report.decisions)
    exact, place = x.detach().double().requires_grad_(), torch.arange(40)[:, None] + torch.arange(40)
    scores = q.double() @ q.double().mT * D**-0.5 + torch.gather(exact, 3, place.clamp(max=39).expand(1, 1, -1, -1))
    out = scores.masked_fill(place > 39, -torch.inf).softmax(-1) @ q.double()
    assert relative_error(got, torch.autograd.grad(out.sum(), [exact])[0]) < 1e-5
