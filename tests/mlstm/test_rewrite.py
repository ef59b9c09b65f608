"""mLSTM in its plain form becomes the op. Code that only looks like it is left alone, and the report says why."""

import contextlib
import re
from unittest import mock

import pytest
import torch

from inductor_ext.core.report import STOCK, collect
from inductor_ext.core.terms import terms
from inductor_ext.mlstm import rewrite as mlstm
from tests.attention.case import relative_error
from tests.support import snapshots
from tests.support.dynamo_graphs import Stop, dynamo_graph
from tests.support.eager_graphs import eager_graphs

from . import plain_forms
from .plain_forms import NEAR_MISSES, PLAIN

REASONS = {
    "normaliser_of_one": "the normaliser is not",
    "normaliser_signed": "the normaliser is not",
    "normaliser_of_other_floor": "floor is not exp(-m)",
    "banded_mask": "not the lower triangle",
    "strict_mask": "not the lower triangle",
    "gate_on_rows": "not F_t - F_s + i_s",
    "anti_causal": "moved after it was applied",
    "written_at_a_position": "leaky_relu",
    "written_mask": "changed in place",
    "mask_of_three_dims": "not the lower triangle",
    "range_with_an_end": "not the lower triangle",
    "flipped_bits": "not the lower triangle",
    "halved_in_place": "changed in place",
    "without_gradient": "some of its parts are computed without gradients",
    "integer_sums": "is of integers",
    "gate_of_other_heads": "not F_t - F_s + i_s",
    "gate_twice": "4 terms",
    "reversed_decay": "not F_t - F_s + i_s",
    "side_output": "also used by mean",
    "in_place": "also used by mul_",
    "normaliser_doubled": "the normaliser is not",
    "quotient_rounded": "does not sum C",
}


def operands(dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(2, 3, 33, 16), (2, 3, 33, 16), (2, 3, 33, 24), (2, 3, 33), (2, 3, 33), (72,)]
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes]


def decisions(form, inputs, **options):
    with eager_graphs(), collect() as report:
        y = torch.compile(form, backend="gradfuse", fullgraph=True, **options)(*inputs)
        grad = torch.randn_like(y)
        got = [y, *torch.autograd.grad(y, inputs, grad, allow_unused=True)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    of_exact = form(*exact)
    want = [of_exact, *torch.autograd.grad(of_exact, exact, grad.double(), allow_unused=True)]
    assert [x is None for x in got] == [x is None for x in want]
    errors = [relative_error(a, b) for a, b in zip(got, want, strict=True) if a is not None]
    return [d for d in report.decisions if d.pass_name == "mlstm_pattern"], errors


@pytest.mark.breadth(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_forms_are_recognised(name, dynamic):
    found, errors = decisions(PLAIN[name], operands(), dynamic=dynamic)
    assert found and {d.path for d in found} == {"gradfuse::mlstm"}
    assert all(("norm is included" in d.why) == (name != "compared") for d in found)
    assert max(errors) < 1e-5


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_are_left_alone(name):
    found, errors = decisions(NEAR_MISSES[name], operands())
    assert [d.path for d in found] == [STOCK] and REASONS[name] in found[0].why
    assert errors[0] < 1e-5


def test_a_gate_behind_zeros_is_another_gate():
    """Its first element is sliced off, and a zero is put in its place."""
    found, errors = decisions(plain_forms._with(exponent=plain_forms._behind_zeros), operands())
    assert [d.path for d in found] == ["gradfuse::mlstm"] and max(errors) < 1e-5


@pytest.mark.breadth(2)
@pytest.mark.parametrize(
    "shapes",
    [((1, 2), (2, 1), (2, 1)), ((1, 2), (2, 1), (1, 2)), ((2, 1), (2,), (2,))],
    ids=["over batches", "each other", "without a batch"],
)
def test_gates_that_broadcast_are_left_alone(shapes):
    heads, *gates = (torch.randn(*shape, 9, *([8] * (i == 0))) for i, shape in enumerate(shapes))

    def form(query, input_gate, forget_gate):
        return plain_forms._with()(query, query, query, input_gate, forget_gate, torch.zeros(16))

    with eager_graphs(), collect() as report:
        got = torch.compile(form, backend="gradfuse", fullgraph=True)(heads, *gates)
    want = form(heads.double(), *(gate.double() for gate in gates))
    assert got.shape == want.shape and relative_error(got, want) < 1e-5
    assert [d.path for d in report.decisions if d.pass_name == "mlstm_pattern"] == [STOCK]


def test_a_value_that_is_changed_before_the_norm():
    """The op would be computed where the norm is."""

    def form(value, *others):
        value = value * 1.0
        hidden = plain_forms._with(norm=False)(*others[:2], value, *others[2:])
        value.zero_()
        return torch.nn.functional.layer_norm(hidden, (24,))

    query, key, value, *rest = operands()
    with eager_graphs(), torch.no_grad():
        got = torch.compile(form, backend="gradfuse", fullgraph=True)(value, query, key, *rest)
        assert relative_error(got, form(value, query, key, *rest)) < 1e-5


@torch.library.custom_op("gradfuse_tests::logsigmoid", mutates_args=())
def _of_the_same_name(x: torch.Tensor) -> torch.Tensor:
    return -x.abs()


@_of_the_same_name.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_op_of_the_same_name_is_another_op():
    def exponent(log_weights, decay, input_gate):
        other = torch.ops.gradfuse_tests.logsigmoid(input_gate).cumsum(-1)
        return other[..., :, None] - other[..., None, :] + input_gate[..., None, :]

    form = plain_forms._with(exponent=exponent)
    with eager_graphs(), torch.no_grad(), collect() as report:
        got = torch.compile(form, backend="gradfuse", fullgraph=True)(*operands())
        assert relative_error(got, form(*operands())) < 1e-5
    assert ["not of torch" in d.why for d in report.decisions if d.pass_name == "mlstm_pattern"] == [True]


class Masked(torch.nn.Module):
    """A cell whose mask is a buffer, as that of xlstm's own cell is for sequences as long as its context."""

    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, *inputs):
        return plain_forms._with(mask=lambda length: self.mask)(*inputs)


def test_a_buffer_may_be_the_mask():
    cell = Masked(torch.ones(33, 33, dtype=torch.bool).tril())
    found, errors = decisions(cell, operands())
    assert [d.path for d in found] == ["gradfuse::mlstm"]
    assert max(errors) < 1e-5


@pytest.mark.breadth(1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("machine", [eager_graphs, contextlib.nullcontext], ids=["graphs", "compiled"])
def test_a_mask_that_is_changed_later_is_an_error(machine, training):
    """The compiled code is for a causal mask, and never uses another one silently."""
    cell, inputs = Masked(torch.ones(33, 33, dtype=torch.bool).tril()), operands()
    with machine(), torch.set_grad_enabled(training):
        run = torch.compile(cell, backend="gradfuse", fullgraph=True)
        assert relative_error(run(*inputs), cell(*inputs)) < 1e-5
        cell.mask[5, 6] = True
        with pytest.raises(RuntimeError, match="no causal mask any more"):
            run(*inputs)


class WritesItsMask(Masked):
    """A cell that changes its mask before it uses it."""

    def forward(self, *inputs):
        self.mask[5, 6] = True
        return super().forward(*inputs)


def test_a_mask_that_the_graph_writes_keeps_the_plain_form():
    found, errors = decisions(WritesItsMask(torch.ones(33, 33, dtype=torch.bool).tril()), operands())
    assert [d.path for d in found] == [STOCK] and "changed in place" in found[0].why and max(errors) < 1e-5


def test_other_masks_keep_the_plain_form():
    """A buffer with another value, or without assertions, and an argument, whose value may be another one in the next call."""
    lower = torch.ones(33, 33, dtype=torch.bool).tril()
    without_assertions = {"options": {"assert_indirect_indexing": False}}
    for mask, options in ((lower.triu(-5), {}), (lower, without_assertions)):
        torch._dynamo.reset()
        found, errors = decisions(Masked(mask), operands(), **options)
        assert [d.path for d in found] == [STOCK] and "not the lower triangle" in found[0].why and errors[0] < 1e-5

    def with_argument(*inputs):
        return plain_forms._with(mask=lambda length: inputs[-1])(*inputs[:-1])

    torch._dynamo.reset()
    with eager_graphs(), collect() as report:
        torch.compile(with_argument, backend="gradfuse", fullgraph=True)(*operands(), lower)
    assert [d.path for d in report.decisions if d.pass_name == "mlstm_pattern"] == [STOCK]


def test_a_returned_matrix_keeps_the_plain_form():
    def form(query, key, value, input_gate, forget_gate, weight):
        kept = {}

        def normaliser(combined, row_max):
            kept["combined"] = combined
            return torch.maximum(combined.sum(-1, keepdim=True).abs(), torch.exp(-row_max)) + 1e-6

        out = plain_forms._with(normaliser=normaliser)(query, key, value, input_gate, forget_gate, weight)
        return out, kept["combined"]

    with eager_graphs(), collect() as report:
        torch.compile(form, backend="gradfuse", fullgraph=True)(*operands())
    (found,) = (d for d in report.decisions if d.pass_name == "mlstm_pattern")
    assert found.path == STOCK and "also used by output" in found.why


def test_in_place_ops_beside_it_stay():
    """Ops without users that change a tensor are not dead code."""
    inputs = operands()

    def form(counter, *rest):
        counter.add_(1)
        return PLAIN["broadcast"](*rest)

    counter = torch.zeros(())
    with eager_graphs(), collect() as report:
        torch.compile(form, backend="gradfuse", fullgraph=True)(counter, *inputs)
    assert counter == 1
    assert [d.path for d in report.decisions if d.pass_name == "mlstm_pattern"] == ["gradfuse::mlstm"]


def test_gates_along_the_wrong_axis_are_left_alone():
    """The cumulative sum of [B, N, 1, S] is over the dim of size one."""

    def form(query, key, value, input_gate, forget_gate, weight):
        sums = torch.nn.functional.logsigmoid(forget_gate[:, :, None, :]).cumsum(-2)
        exponents = sums.mT - sums + input_gate[:, :, None, :]
        exponents = exponents.masked_fill(~torch.ones(33, 33, dtype=torch.bool).tril(), -torch.inf)
        row_max = exponents.amax(-1, keepdim=True)
        combined = query @ key.mT * torch.exp(exponents - row_max)
        normaliser = torch.maximum(combined.sum(-1, keepdim=True).abs(), torch.exp(-row_max))
        return combined / normaliser @ value + weight[:24]

    found, errors = decisions(form, operands())
    assert [d.path for d in found] == [STOCK] and "not taken over the positions" in found[0].why
    assert errors[0] < 1e-5


def test_two_layers_of_one_model():
    def two(query, key, value, input_gate, forget_gate, weight):
        first = PLAIN["broadcast"](query, key, value, input_gate, forget_gate, weight)
        again = first.unflatten(-1, (3, 24)).transpose(1, 2)
        return PLAIN["repeated"](query, key, again, input_gate, forget_gate, weight)

    found, errors = decisions(two, operands())
    assert [d.path for d in found] == ["gradfuse::mlstm"] * 2
    assert max(errors) < 2e-5


def test_disabled():
    found, _ = decisions(PLAIN["broadcast"], operands(), options={"disable": ["mlstm_pattern"]})
    assert not found


def test_autocast_is_left_alone():
    def form(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return PLAIN["broadcast"](*inputs)

    with eager_graphs(), collect() as report:
        torch.compile(form, backend="gradfuse", fullgraph=True)(*operands())
    assert [d.path for d in report.decisions if d.pass_name == "mlstm_pattern"] == [STOCK]


def test_softmax_attention_is_not_mentioned():
    def attention(query, key, value, *_):
        scores = query @ key.mT
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        return (weights / weights.sum(-1, keepdim=True)) @ value

    with eager_graphs(), collect() as report:
        torch.compile(attention, backend="gradfuse", fullgraph=True)(*operands())
    assert not [d for d in report.decisions if d.pass_name == "mlstm_pattern"]


@pytest.mark.parametrize(
    "matrix, want",
    [
        (lambda f, i: f[..., None] - f[:, :, None, :], [(1, "f", (0, 1, 2, None)), (-1, "f", (0, 1, None, 2))]),
        (lambda f, i: f.unsqueeze(-1) + i.unsqueeze(2), [(1, "f", (0, 1, 2, None)), (1, "i", (0, 1, None, 2))]),
        (
            lambda f, i: -(i[..., None].expand(2, 3, 5, 5).mT - f[..., None]),
            [(-1, "i", (0, 1, None, 2)), (1, "f", (0, 1, 2, None))],
        ),
        (lambda f, i: f[:, :, 1:, None] - i[:, :, None, 1:], [(1, "f", (0, 1, 2, None)), (-1, "i", (0, 1, None, 2))]),
    ],
)
def test_terms(matrix, want):
    graph = dynamo_graph(lambda f, i: matrix(f, i) * 1.0, torch.randn(2, 3, 5), torch.randn(2, 3, 5)).graph
    product = next(n for n in graph.nodes if n.op == "call_function" and n.target.__name__ == "mul")
    found = [(t.sign, t.base.name.strip("_").removeprefix("l_").rstrip("_"), t.dims) for t in terms(product.args[0])]
    assert [(s, n[0], d) for s, n, d in found] == want


@pytest.mark.parametrize("name", PLAIN)
def test_graph_after_the_rewrite(name):
    """Dynamo's graph after the rewrite, without the nodes that are no longer used."""
    seen = []

    def spy(gm, options):
        rewrite(gm, options)
        gm.graph.eliminate_dead_code()
        seen.append(str(gm.graph))
        raise Stop

    rewrite = mlstm.rewrite
    with mock.patch.object(mlstm, "rewrite", spy), pytest.raises(Exception, match="Stop"):
        torch.compile(PLAIN[name], backend="gradfuse", fullgraph=True, dynamic=False)(*operands())
    text = re.sub(r" : [\w.]+(?= \[)", "", seen[0]).replace("L_", "l_").replace(", kwargs = {}", "")
    text = re.sub(r"0x[0-9a-f]+", "0x", re.sub(r"target=<function (\w+) at[^>]*>", r"target=\1", text))
    snapshots.check(__file__, f"mlstm_{name}", text.strip() + "\n")
