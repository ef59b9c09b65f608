"""The result of hoisting for a score_mod: the remaining graph, the expressions of the tables, and the dropped terms."""

import copy
import re
import unittest.mock

import pytest
import torch
from expecttest import TestCase
from hypothesis import given, settings
from torch.fx import Interpreter
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from inductor_ext import passes
from inductor_ext.core.report import collect
from inductor_ext.options import Options
from inductor_ext.torch_api.higher_order import flex_attention_hop
from tests.attention.case import relative_error
from tests.support import random_score_mods
from tests.support.dynamo_graphs import Stop, after
from tests.support.eager_graphs import eager_graphs

LENGTH = 8


def hoisted(score_mod, *, mask=None, aux=False):
    """The score_mod after hoisting, as text, the notes, and the outer graph's computation of the tables."""
    query = torch.randn(1, 2, LENGTH, 16, requires_grad=True)
    block_mask = mask and create_block_mask(mask, None, None, LENGTH, LENGTH, device="cpu")

    def attention(query):
        options = {"return_aux": AuxRequest(lse=True)} if aux else {}
        return flex_attention(query, query, query, score_mod=score_mod, block_mask=block_mask, **options)

    seen = after(passes.hoisting, attention, query)
    return seen | {"notes": "; ".join(f"{d.path}: {d.why}" for d in seen["decisions"])}


def table(*shape):
    return torch.randn(*shape, requires_grad=True)


class TestHoisting(TestCase):
    def test_a_bucketed_distance_becomes_a_diagonal(self):
        t = table(32, 2)
        bucket = lambda d: torch.where(d > 0, 16, 0) + d.abs().clamp(max=15)  # noqa: E731
        self.assertExpectedInline(
            hoisted(lambda s, b, h, q, k: s + t[bucket(k - q), h])["graph"],
            """\
graph():
    %child [num_users=1] = placeholder
    %child_1 [num_users=0] = placeholder
    %child_2 [num_users=1] = placeholder
    %child_3 [num_users=1] = placeholder
    %child_4 [num_users=1] = placeholder
    %table_0 : [num_users=1] = placeholder
    %sub_1 : [num_users=1] = call_function[target=operator.sub](args = (%child_4, %child_3))
    %getitem_1 : [num_users=1] = call_function[target=operator.getitem](args = (%table_0, (%child_2, %sub_1)))
    %add_1 : [num_users=1] = call_function[target=operator.add](args = (%child, %getitem_1))
    return add_1""",
        )

    def test_a_small_lookup_of_pairs_becomes_a_table_and_a_large_one_stays(self):
        t = table(2, 9, 9)
        window = lambda s, b, h, q, k: s + t[h, q // 3 - k // 3 + 4, q % 3 - k % 3 + 4]  # noqa: E731
        self.assertIn("[H, Q, K] of 512 bytes", hoisted(window)["notes"])
        with unittest.mock.patch("inductor_ext.attention.hoisting.LARGEST_PAIR_TABLE", 127):
            self.assertEqual(hoisted(window)["notes"], "")

    def test_a_plain_pair_is_read_where_it_is(self):
        t, u = table(2, LENGTH, LENGTH), table(1, 2, LENGTH, LENGTH)
        self.assertEqual(hoisted(lambda s, b, h, q, k: s + t[h, q, k] + u[b, h, q, k])["notes"], "")

    def test_terms_of_one_footprint_share_a_table(self):
        t, u = table(2, LENGTH), table(LENGTH)
        self.assertExpectedInline(
            hoisted(lambda s, b, h, q, k: s * u[q].exp() + t[h, k] + u[k])["graph"],
            """\
graph():
    %child [num_users=1] = placeholder
    %child_1 [num_users=0] = placeholder
    %child_2 [num_users=1] = placeholder
    %child_3 [num_users=1] = placeholder
    %child_4 [num_users=1] = placeholder
    %table_0 : [num_users=1] = placeholder
    %table_1 : [num_users=1] = placeholder
    %getitem_4 : [num_users=1] = call_function[target=operator.getitem](args = (%table_1, (%child_3,)))
    %mul : [num_users=1] = call_function[target=operator.mul](args = (%child, %getitem_4))
    %getitem_3 : [num_users=1] = call_function[target=operator.getitem](args = (%table_0, (%child_2, %child_4)))
    %add_2 : [num_users=1] = call_function[target=operator.add](args = (%mul, %getitem_3))
    return add_2""",
        )

    def test_a_slope_times_a_distance_stays_in_the_kernel(self):
        t = table(2)
        self.assertExpectedInline(
            hoisted(lambda s, b, h, q, k: s - t[h].exp() * (q - k).abs())["graph"],
            """\
graph():
    %child [num_users=1] = placeholder
    %child_1 [num_users=0] = placeholder
    %child_2 [num_users=1] = placeholder
    %child_3 [num_users=1] = placeholder
    %child_4 [num_users=1] = placeholder
    %table_0 : [num_users=1] = placeholder
    %getitem_1 : [num_users=1] = call_function[target=operator.getitem](args = (%table_0, (%child_2,)))
    %sub : [num_users=1] = call_function[target=operator.sub](args = (%child_3, %child_4))
    %abs_1 : [num_users=1] = call_method[target=abs](args = (%sub,))
    %mul : [num_users=1] = call_function[target=operator.mul](args = (%getitem_1, %abs_1))
    %sub_1 : [num_users=1] = call_function[target=operator.sub](args = (%child, %mul))
    return sub_1""",
        )


def test_a_term_without_a_key_is_dropped_and_its_gradient_is_exactly_zero():
    t = torch.nn.Parameter(table(2, LENGTH).detach())
    seen = hoisted(lambda s, b, h, q, k: s + t[h, q])
    assert "dropped" in seen["notes"] and len(seen["node"].args[7]) == 0
    assert "gradfuse.depend.default" in seen["outer"]
    query = torch.randn(1, 2, LENGTH, 16, requires_grad=True)
    attention = lambda q: flex_attention(q, q, q, score_mod=lambda s, b, h, q, k: s + t[h, q])  # noqa: E731
    with eager_graphs():
        out = torch.compile(attention, backend="gradfuse", fullgraph=True)(query)
        (grad,) = torch.autograd.grad(out.sum(), t)
    assert torch.equal(grad, torch.zeros_like(t))


def test_a_hoisted_read_that_no_gradient_reaches_is_detached():
    """score_mods:126211178: another read of the same tensor is learned."""
    t, query = table(2, LENGTH), torch.randn(1, 2, LENGTH, 16, requires_grad=True)

    def score_mod(s, b, h, q, k):
        frozen = torch.where(q >= k, t[h, q // 2], t[h, (q - k) // 3]).detach()
        return s + frozen - t[h, k % 2]

    attention = lambda q: flex_attention(q, q, q, score_mod=score_mod)  # noqa: E731
    with eager_graphs():
        out = torch.compile(attention, backend="gradfuse", fullgraph=True)(query)
        (grad,) = torch.autograd.grad(out.sum(), t)
    b, h, q, k = (
        torch.arange(n).view([-1 if a == d else 1 for a in range(4)]) for d, n in enumerate((1, 2, LENGTH, LENGTH))
    )
    want = score_mod(query @ query.mT / 4, b, h, q, k).softmax(-1) @ query
    assert relative_error(grad, *torch.autograd.grad(want.sum(), t)) < 1e-5


def test_a_gradient_reaches_tables_through_values_that_are_not_known():
    """score_mods:600000. Hoisting makes nodes of which it does not say what their values are."""
    t, u = table(5, 2), table(2, 2)

    def score_mod(s, b, h, q, k):
        x = torch.nn.functional.embedding((k / 4).floor().long(), t)[h] * b * 0.05 + ((q == 0) + (k < q))
        return (x + u[h, (4 - b * b).long() % 2]) * x

    query = torch.randn(2, 2, 2, 16, requires_grad=True)
    with eager_graphs():
        out = torch.compile(lambda q: flex_attention(q, q, q, score_mod=score_mod), backend="gradfuse", fullgraph=True)(
            query
        )
        got = torch.autograd.grad(out.square().sum(), (t, u))
    b, h, q, k = (torch.arange(n).view([-1 if a == d else 1 for a in range(4)]) for d, n in enumerate((2, 2, 2, 2)))
    rows = t[(k // 4).expand(2, 2, 2, 2), h.expand(2, 2, 2, 2)]
    x = rows * b * 0.05 + ((q == 0) | (k < q))
    want = ((x + u[h, (4 - b * b) % 2]) * x).expand(2, 2, 2, 2).softmax(-1) @ query
    for mine, exactly in zip(got, torch.autograd.grad(want.square().sum(), (t, u)), strict=True):
        assert exactly.norm() > 1e-6 and relative_error(mine, exactly) < 1e-4


def test_a_term_that_may_hide_a_row_stays():
    frozen, learned = torch.zeros(LENGTH), torch.nn.Parameter(table(LENGTH).detach())
    assert hoisted(lambda s, b, h, q, k: s + frozen[q] + learned[k])["notes"] == ""
    assert "dropped" not in hoisted(lambda s, b, h, q, k: s + (frozen[q] + learned[q]))["notes"]
    hidden = hoisted(lambda s, b, h, q, k: s + torch.where(q < 4, learned[q], -float("inf")))["notes"]
    assert "dropped" not in hidden and "row" in hidden


#: Terms for each query that the graph computes outside of the score_mod. They may be -inf in a later call.
HIDES = {
    "chosen": lambda t, valid: torch.where(valid, t, -torch.inf),
    "filled": lambda t, valid: (t * 2).masked_fill(~valid, -torch.inf),
    "a_logarithm": lambda t, valid: torch.log(t.sigmoid() * valid),
    "written_in_place": lambda t, valid: (t * 1.0).masked_fill_(~valid, -torch.inf),
    "divided": lambda t, valid: -t.exp() / valid,
    "divided_by_zero": lambda t, valid: torch.where(valid, t, -t.exp() / 0.0),
    "reciprocal": lambda t, valid: -(t.exp() * valid).reciprocal(),
    "root": lambda t, valid: -(t.exp() * valid).rsqrt(),
    "power": lambda t, valid: -((t.exp() * valid) ** -2.0),
    "no_parameter": lambda t, valid: t.detach().masked_fill(~valid, -torch.inf).requires_grad_(),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", HIDES)
def test_a_term_that_hides_a_row_in_a_later_call(name):
    """A row that is hidden as a whole is zero in flex_attention, and has no gradient."""
    learned = torch.nn.Parameter(table(2, LENGTH).detach())

    def attention(q, t, valid):
        row = t if name == "no_parameter" else HIDES[name](t, valid)
        return flex_attention(q, q, q, score_mod=lambda s, b, h, q, k: s + row[h, q])

    def dense(q, t, valid):
        row = (t if name == "no_parameter" else HIDES[name](t, valid))[:, :, None]
        shown = torch.softmax(q @ q.mT * 0.25 + torch.where(row.isinf(), 0.0, row), -1) @ q
        return torch.where(row.isinf(), 0.0, shown)

    query = torch.randn(1, 2, LENGTH, 16)
    with eager_graphs():
        compiled = torch.compile(attention, backend="gradfuse", fullgraph=True)
        for valid in (torch.ones(LENGTH, dtype=torch.bool), torch.arange(LENGTH) != 3):
            t = HIDES[name](learned, valid) if name == "no_parameter" else learned
            given, exact = query.clone().requires_grad_(), query.double().requires_grad_()
            got, want = compiled(given, t, valid), dense(exact, t.double(), valid)
            assert relative_error(got, want) < 1e-5
            grads = [torch.autograd.grad(out.square().sum(), x)[0] for out, x in ((got, given), (want, exact))]
            assert relative_error(*grads) < 1e-5


def test_a_term_without_a_key_stays_where_the_logsumexp_is_asked_for():
    t = torch.nn.Parameter(table(2, LENGTH).detach())
    assert "dropped" not in hoisted(lambda s, b, h, q, k: s + t[h, q], aux=True)["notes"]


def test_the_report_names_footprint_shape_and_bytes():
    t = table(32, 2)
    notes = hoisted(lambda s, b, h, q, k: s + t[(q - k).abs(), h])["notes"]
    assert re.fullmatch(
        r"table: \S+\[abs\(q - k\), h\] has the footprint head\+diagonal; its table is \[H, Q \+ K - 1\] of 120 bytes", notes
    ), notes


def test_equal_tables_are_shared():
    t = table(2, 2 * LENGTH)
    seen = hoisted(lambda s, b, h, q, k: torch.tanh(s * t[h, q - k + LENGTH]) + s * t[h, q - k + LENGTH])
    assert len(seen["node"].args[7]) == 1


def test_lookups_are_clamped_only_under_a_mask():
    t = table(2, LENGTH)
    score_mod = lambda s, b, h, q, k: s + t[h, (q - k).abs()]  # noqa: E731
    masked = hoisted(score_mod, mask=lambda b, h, q, k: q >= k)["outer"]
    assert masked.count("clamp") > hoisted(score_mod)["outer"].count("clamp")


def test_pairs_and_plain_reads_are_left_alone():
    t, u = table(2, LENGTH, LENGTH), table(2, LENGTH)
    assert hoisted(lambda s, b, h, q, k: s * u[h, q] + t[h, q, k] + u[h, k])["notes"] == ""


class UpToAttention(Interpreter):
    """Runs a Dynamo graph and evaluates the score_mod of its flex_attention on index grids."""

    def call_function(self, target, args, kwargs):
        if target is not flex_attention_hop:
            return super().call_function(target, args, kwargs)
        generator = torch.Generator().manual_seed(2)
        score = torch.randn(random_score_mods.EXTENTS, generator=generator)
        position = [i.long() for i in random_score_mods.grid()]
        modified = args[3](score, *position, *args[7])
        self.scores = (modified[0] if isinstance(modified, (tuple, list)) else modified).expand(score.shape)
        raise Stop


def scores_of(gm, inputs):
    """Return the modified scores minus the mean of each row. Softmax depends on nothing else."""
    run = UpToAttention(gm)
    with pytest.raises(Stop):
        run.run(*inputs)
    return run.scores.double() - run.scores.double().mean(-1, keepdim=True)


def test_a_table_is_computed_from_what_is_read_of_another(monkeypatch):
    """score_mods:1200051 of the fuzzer: the inner product of rows needs a table of pairs, and x in it is partly a table."""
    monkeypatch.setattr("inductor_ext.attention.hoisting.LARGEST_PAIR_TABLE", 0)
    t, u, w = table(2), table(2, 9), table(1, 2, LENGTH)
    a, c = table(1, 2, LENGTH, 3), table(1, 2, LENGTH, 3)
    index = torch.arange(LENGTH**2).view(1, LENGTH, LENGTH) % 9

    def score_mod(s, b, h, q, k):
        x = t[h] + u[h, index[b, q, k]] + w[b, h, k]
        return s + x * (x + torch.dot(a[b, h, q], c[b, h, k]))

    notes = hoisted(score_mod)["notes"]
    assert "its table is [B, H, K]" in notes and "its table is [B, H, Q, K]" in notes


def test_a_tensor_that_a_table_and_the_score_mod_read_is_cast_once():
    """Otherwise each of its two gradients is rounded before they are added (score_mods:801888 of the fuzzer)."""
    query = torch.randn(1, 2, LENGTH, 16, dtype=torch.bfloat16, requires_grad=True)
    t = torch.randn(2, LENGTH, dtype=torch.bfloat16, requires_grad=True)
    score_mod = lambda s, b, h, q, k: s * t[h, (q + h) % LENGTH] + t[h, k]  # noqa: E731
    seen = after(passes.hoisting, lambda q: flex_attention(q, q, q, score_mod=score_mod), query)
    read, table = seen["captured"]
    assert read.target == "to" and read.value.dtype is torch.float32
    assert "[h, (q + h) % 8] has the footprint head+row" in "; ".join(f"{d.path}: {d.why}" for d in seen["decisions"])
    assert table.value.dtype is torch.float32


def test_a_number_is_not_taken_for_the_node_of_that_number():
    """``k * 2`` and ``k * k`` differ, whatever number stands for k while equal expressions are looked for."""
    t = table(2, 9)
    squares = lambda s, b, h, q, k: s * t[h, k * 2 % 9].exp() + t[h, k * k % 9].exp()  # noqa: E731
    for mod in (squares, *(lambda s, b, h, q, k, n=n: s * t[h, k * n % 9].exp() + t[h, k * k % 9].exp() for n in (1, 3, 4))):
        assert hoisted(mod)["notes"].count("its table is [H, K]") == 2
        assert len(hoisted(mod)["captured"]) == 2


def many_steps(x):
    for _ in range(40):
        x = torch.where(x > 0.5, x * 0.5, x + 0.25)
    return x


def test_an_expression_that_uses_each_step_several_times():
    """There are 3**40 ways from the lookup to the result, and each node is looked at once."""
    t, query = table(2, LENGTH), torch.randn(1, 2, LENGTH, 16, requires_grad=True)
    score_mod = lambda s, b, h, q, k: s + many_steps(t[h, (q - k).clamp(0, 7)])  # noqa: E731
    with eager_graphs(), collect() as report:
        attention = torch.compile(lambda q: flex_attention(q, q, q, score_mod=score_mod), backend="gradfuse", fullgraph=True)
        (got,) = torch.autograd.grad(attention(query).sin().sum(), t)
    assert ["table" in d.path for d in report.decisions if d.pass_name == "hoisting"] == [True]
    exact, position = query.detach().double(), torch.arange(LENGTH)
    bias = many_steps(t.double())[:, (position[:, None] - position).clamp(0, 7)]
    (want,) = torch.autograd.grad(((exact @ exact.mT / 4 + bias).softmax(-1) @ exact).sin().sum(), t)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_dtype_of_a_number_in_a_tensor_counts():
    """int8 times an int64 number is int64. On a grid of int8, the number's dtype would not count, and 2 * 100 would wrap."""
    t, narrow, number = table(2, 11), torch.arange(LENGTH, dtype=torch.int8) % 4, torch.tensor(100)
    query = torch.randn(1, 2, LENGTH, 16, requires_grad=True)
    score_mod = lambda s, b, h, q, k: s + t[h, narrow[k] * number % 11]  # noqa: E731
    with eager_graphs(), collect() as report:
        attention = torch.compile(lambda q: flex_attention(q, q, q, score_mod=score_mod), backend="gradfuse", fullgraph=True)
        got = torch.autograd.grad(attention(query).sin().sum(), (query, t))
    assert ["table" in d.path for d in report.decisions if d.pass_name == "hoisting"] == [True]
    exact, bias = query.double(), t.double()[:, narrow.long() * 100 % 11][:, None]
    want = torch.autograd.grad(((exact @ exact.mT / 4 + bias).softmax(-1) @ exact).sin().sum(), (query, t))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.breadth(0)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(random_score_mods.score_mods)
def test_hoisting_changes_no_score(body):
    torch._dynamo.reset()
    score_mod, tables = random_score_mods.function(body), random_score_mods.tables(torch.float32)
    batch, heads, queries, keys = random_score_mods.EXTENTS
    query, key = torch.randn(batch, heads, queries, 16), torch.randn(batch, heads, keys, 16)
    compared = []

    def compare(gm, inputs):
        with torch.no_grad():
            before = copy.deepcopy(gm)
            with torch.enable_grad():
                passes.canonical.rewrite(gm, Options())
                passes.hoisting.rewrite(gm, Options())
            compared.append((scores_of(before, inputs), scores_of(gm, inputs)))
        raise Stop

    def attention(query, key, *tables):
        return flex_attention(query, key, key, score_mod=lambda s, b, h, q, k: score_mod(s, b, h, q, k, *tables))

    with pytest.raises(Exception, match="Stop"):
        torch.compile(attention, backend=compare, fullgraph=True)(query, key, *tables)
    ((before, after),) = compared
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
