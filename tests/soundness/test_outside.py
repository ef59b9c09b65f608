"""What the caller writes to between forward and backward, where eager mode has kept nothing of it for the backward."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from inductor_ext.attention.recognition import rewrite
from inductor_ext.core.report import collect
from tests.attention.case import relative_error
from tests.mlstm import plain_forms
from tests.scan.test_compiled import pointwise_scan
from tests.support.eager_graphs import eager_graphs

B, H, S, D = 2, 3, 20, 16
REPLACED_BY = {"attention_pattern": "flex_attention", "mlstm_pattern": "gradfuse::mlstm"}


@pytest.fixture(autouse=True)
def few_scores_are_enough(monkeypatch):
    monkeypatch.setattr(rewrite, "FEWEST_ON_CPU", 0)


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), requires_grad=True)


def gradients(function, inputs, write):
    """The gradients of the inputs that need one, if ``write`` changes the result, or what it finds among the inputs."""
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    out = function(*inputs)
    written = out if write is None else inputs[write]
    with torch.no_grad():
        written.mul_(3)
    tangent = torch.arange(out.numel()).reshape(out.shape) % 7 - 2.0
    return torch.autograd.grad(out, [x for x in inputs if x.requires_grad], tangent.to(out))


def check(function, inputs, write, pass_name, compiled=False):
    torch._dynamo.reset()
    with contextlib.nullcontext() if compiled else eager_graphs(), collect() as report:
        got = gradients(torch.compile(function, backend="gradfuse", fullgraph=True), inputs, write)
    assert [d.path for d in report.decisions if d.pass_name == pass_name] == [REPLACED_BY[pass_name]]
    for x, y in zip(got, gradients(function, [x.double() for x in inputs], write), strict=True):
        assert relative_error(x, y) < 1e-5


def biased(q, k, v, bias):
    return (q @ k.mT * 0.25 + bias).softmax(-1) @ v


def merged(out):
    return out.transpose(1, 2).reshape(B, S, -1)


def assigned(out):
    other = torch.zeros_like(out)
    other[:] = out
    return other


#: What is done to the result of an attention before it is returned.
RETURNED = {
    "as_it_is": lambda out: out,
    "merged": merged,
    "copied": lambda out: out.clone(),
    "copied_heads": lambda out: out.transpose(1, 2).contiguous(),
    "times_one": lambda out: merged(out) * 1.0,
    "plus_nothing": lambda out: out + torch.zeros(()),
    "dropped": lambda out: F.dropout(merged(out), 0.0, training=True),
    "cast": lambda out: out.float().view(B, H, S * D),
    "concatenated": lambda out: torch.cat([out]),
    "stacked": lambda out: torch.hstack([out]),
    "written_into_another": lambda out: torch.empty_like(out).copy_(out),
    "assigned": lambda out: assigned(merged(out)),
    "split": lambda out: out.tensor_split(1, 1)[0].clone(),
    "tiled": lambda out: merged(out).tile(1, 1, 1),
    "conjugated": lambda out: out.conj().clone(),
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", RETURNED)
def test_the_result_of_an_attention(name):
    function = lambda q, k, v, b: RETURNED[name](biased(q, k, v, b))  # noqa: E731
    check(function, [randn(B, H, S, D) for _ in range(3)] + [randn(H, S, S)], None, "attention_pattern")


@pytest.mark.parametrize("heads", [1, 3])
def test_the_result_of_an_attention_whose_heads_are_beside_positions_in_memory(heads):
    """The kernel's result then has the layout that the program's copy would have."""

    def function(q, k, v, b):
        return merged(F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=b))

    check(function, [randn(B, S, heads, D) for _ in range(3)] + [randn(heads, S, S)], None, "attention_pattern")


def packed(qkv, bias):
    q, k, v = qkv.view(B, S, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    return biased(q, k, v, bias)


def turned(function):
    return lambda q, k, v, b: function(*(x.view(B, S, H, D).transpose(1, 2) for x in (q, k, v)), b)


#: Operands that eager mode copies before the product, and which of them is written to.
GIVEN = {
    **{f"turned {i}": (turned(biased), i) for i in range(3)},
    **{f"sdpa {i}": (lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, attn_mask=b), i) for i in range(2)},
    "sdpa turned 2": (turned(lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, attn_mask=b)), 2),
    "a copy": (lambda q, k, v, b: biased(q, k.clone(), v, b), 1),
    "scaled": (lambda q, k, v, b: biased(q, k / 4, v, b), 1),
    "packed": (packed, 0),
}


@pytest.mark.breadth(3)
@pytest.mark.parametrize("name", GIVEN)
def test_the_operands_of_an_attention(name):
    function, write = GIVEN[name]
    operands = [randn(B, S, 3 * H * D)] if name == "packed" else [randn(B, H, S, D) for _ in range(3)]
    check(function, [*operands, randn(H, S, S)], write, "attention_pattern")


def cell(q, k, v, i, f, norm=False):
    mask = lambda length: torch.ones(length, length, dtype=torch.bool, device=q.device).tril()  # noqa: E731
    hidden = plain_forms._with(norm=False, mask=mask)(q, k, v, i, f, None)
    return F.layer_norm(hidden, (D,)) if norm else hidden


def operands(key=True):
    tensors = [randn(B, H, S, D) + n for n in range(3)] + [randn(B, H, S), randn(B, H, S) + 2.0]
    return [x.detach().requires_grad_(n != 1 or key) for n, x in enumerate(tensors)]


#: mLSTM, and what is written to: its result (None) or an operand.
MLSTM = {
    "result": (cell, None),
    "result_of_the_norm": (lambda *x: cell(*x, norm=True), None),
    "result_whose_heads_are_merged": (lambda *x: merged(cell(*x)), None),
    "input_gate": (cell, 3),
    "input_gate_beside_positions": (lambda q, k, v, i, f: cell(q, k, v, i[:, :, None, :].squeeze(2), f), 3),
    "scaled_key": (lambda q, k, v, i, f: cell(q, k / 4, v, i, f), 1),
    "scaled_key_of_a_view": (lambda q, k, v, i, f: cell(q, k.flip(2).mT.mT * 2.0 / 4, v, i, f), 1),
    "scaled_key_that_is_turned": (lambda q, k, v, i, f: cell(q, k.mT.contiguous().mT / 4, v, i, f), 1),
    "scaled_copy": (lambda q, k, v, i, f: cell(q, k.clone() / 4, v, i, f), 1),
    "input_gate_behind_nothing": (lambda q, k, v, i, f: cell(q, k, v, torch.cat([i + torch.zeros(())]), f), 3),
    "scaled_view": (lambda q, k, v, i, f: cell(q, k.view(B, H, 1, S, D)[:, :, 0] / 4, v, i, f), 1),
}


@pytest.mark.breadth(4)
@pytest.mark.parametrize("name", MLSTM)
def test_mlstm(name):
    function, write = MLSTM[name]
    check(function, operands(key=write != 1), write, "mlstm_pattern")


@pytest.mark.breadth(0)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["attention", "mlstm"])
def test_after_code_generation(name, device):
    if name == "attention":
        function, inputs = lambda q, k, v, b: merged(biased(q, k, v, b)), [randn(B, 1, S, D)] * 3 + [randn(1, S, S)]
    else:
        function, inputs = MLSTM["result_of_the_norm"][0], operands()
    inputs = [x.detach().to(device).requires_grad_() for x in inputs]
    check(function, inputs, None, f"{name}_pattern", compiled=True)


def scanned(x, dim):
    """A scan from the end, for which torch flips copies of its leaves and of its results."""
    return pointwise_scan(lambda left, right: [torch.logaddexp(left, right)], [x], dim, reverse=True)[0]


def scanned_exactly(x, dim):
    return x.flip(dim).logcumsumexp(dim).flip(dim)


#: Functions of a scan and its leaf, and what is written to.
REVERSED = {
    "result": (lambda scan, x: scan(x, 1), None),
    "result_along_the_first_dim": (lambda scan, x: scan(x, 0), None),
    "result_that_is_moved": (lambda scan, x: scan(x, 1).mT, None),
    "leaf": (lambda scan, x: scan(x, 1), 0),
    "leaf_that_is_moved": (lambda scan, x: scan(x.mT, 2), 0),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", REVERSED)
def test_a_scan_from_the_end(name):
    function, write = REVERSED[name]
    x = randn(3, 17, 4)
    torch._dynamo.reset()
    with eager_graphs() as graphs:
        compiled = torch.compile(lambda x: function(scanned, x), backend="gradfuse", fullgraph=True)
        (got,) = gradients(compiled, [x], write)
    assert "associative_scan" in graphs[0].code and "flip" not in graphs[0].code
    (want,) = gradients(lambda x: function(scanned_exactly, x), [x.double()], write)
    assert relative_error(got, want) < 1e-5


#: Programs of which eager mode keeps what the kernels keep, or in which nothing is kept; and whether they have gradients.
UNCOPIED = {
    "a_product": (lambda q, k, v, b: biased(q, k, v, b) * b[..., :1], True),
    "a_layer": (lambda q, k, v, b: merged(biased(q, k, v, b)) @ torch.eye(H * D), True),
    "mlstm_in_inference": (lambda q, k, v, b: cell(q, k / 4, v, b.sum(-1), v.sum(-1)), False),
    "a_scan_in_inference": (lambda q, k, v, b: scanned(q, 1), False),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", UNCOPIED)
def test_nothing_is_copied(name):
    function, learned = UNCOPIED[name]
    inputs = [x.detach().clone().requires_grad_(learned) for x in (*[randn(B, H, S, D)] * 3, randn(B, H, S, S))]
    torch._dynamo.reset()
    with eager_graphs() as graphs, collect() as report:
        torch.compile(function, backend="gradfuse", fullgraph=True)(*inputs)
    decisions = [(d.pass_name, d.path, d.why) for d in report.decisions]
    assert {*REPLACED_BY.items(), ("scans", "scan")} & {d[:2] for d in decisions}, decisions
    assert graphs and not any("gradfuse.copied" in graph.code for graph in graphs)
