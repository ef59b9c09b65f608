"""Casts: exact round trips are removed bit for bit, and lossy ones stay."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_ext.casts import rewrite as casts
from inductor_ext.casts.moves import element_dtype, holds, moved
from inductor_ext.core import joint_graph
from inductor_ext.core.fx import cast_of
from inductor_ext.core.report import collect
from inductor_ext.options import Options
from tests.support import snapshots
from tests.support.eager_graphs import eager_graphs
from tests.support.joint_graphs import rewritten_graph, text


def rewrite_casts(graph):
    with joint_graph.building(graph) as build:
        casts.rewrite(build, Options())


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def round_trips(graph):
    """Casts of a graph back to the dtype from which their operand was cast to a type that holds it, possibly with moves."""
    found = []
    for node in graph.nodes:
        source = cast_of(node)
        while source is not None and cast_of(source) is None:
            source = next(iter(moved(source)), None)
        if source is None or element_dtype(source) is element_dtype(node):
            continue
        if element_dtype(cast_of(source)) is element_dtype(node) and holds(element_dtype(source), element_dtype(node)):
            found.append(node)
    return found


def x(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype).requires_grad_()


def adjacent(a):
    return a.float().to(a.dtype) * 2


def through_views(a):
    return a.float().view(2, 3, 4).permute(2, 0, 1).unsqueeze(0).expand(5, -1, -1, -1).to(a.dtype) * 2


def through_copies(a):
    return a.float().t().contiguous().clone()[1:].to(a.dtype) * 2


def through_cat(a):
    wide = a.float()
    return torch.cat([wide, wide.flip(0), torch.zeros(2, 4)]).to(a.dtype) * 2


def cat_with_a_wide_tensor(a):
    """One of the parts was never narrow. The cast rounds it, so the cast stays."""
    return torch.cat([a.float(), torch.full((1, 4), 0.1).exp()]).to(a.dtype) * 2


def through_split(a):
    first, second = a.float().split(3)
    return (first.to(a.dtype) + second.to(a.dtype)) * 2


def through_gather(a):
    return a.float()[torch.tensor([1, 1, 0])].to(a.dtype) * 2


def through_two_widenings(a):
    return a.float().double().t().to(a.dtype) * 2


def widened_twice(a):
    return a.float().t().double() * 2


def used_in_between(a):
    wide = a.float()
    return (wide.t().to(a.dtype) * 2).float() + wide.t()


def lossy(a):
    return a.to(torch.bfloat16).float() * 2


def lossy_in_the_middle(a):
    return a.float().to(torch.float16).float().to(a.dtype) * 2


def through_the_other_half(a):
    """Neither fp16 nor bf16 holds the other. Casts in both directions round or overflow, so they stay."""
    other = torch.float16 if a.dtype is torch.bfloat16 else torch.bfloat16
    return a.to(other).t().to(a.dtype) * 2


def returned(a):
    return a.float().to(a.dtype)


def returned_view(a):
    return a.float().t().to(a.dtype)


def returned_expanded(a):
    return a.float().expand(2, 6, 4).to(a.dtype)


def returned_twice(a):
    wide = a.float()
    return wide, wide.to(a.dtype)


def printed(a):
    wide = a.float()
    return torch.ops.gradfuse.depend(wide, []).to(a.dtype) * 2


def through_integers(a):
    return a.int().to(a.dtype) * 2


def through_fp8(a):
    return a.to(torch.float8_e4m3fn).to(a.dtype) * 2


def complex_numbers(a):
    return torch.view_as_real(torch.view_as_complex(a.float().view(6, 2, 2)).to(torch.complex128).to(torch.complex64)).to(
        a.dtype
    )


def residual_stream(a):
    """The gradient is cast to a wider type, added, and cast back."""
    wide = a.float()
    return wide + (wide.to(torch.bfloat16) * 2).float()


def slices_of_a_cast(a):
    wide = a.float()
    return wide[:2] * 3 + wide[2:4] * 5


def expanded_then_cast(a):
    return a.view(1, 6, 4).expand(8, 6, 4).float() * 3


def linear(a):
    return torch.nn.functional.linear(a, a)


CASES = {
    "adjacent": (adjacent, x(6, 4)),
    "adjacent_fp16": (adjacent, x(6, 4, dtype=FP16)),
    "adjacent_fp32_through_fp64": (lambda a: a.double().t().float() * 2, x(6, 4, dtype=FP32)),
    "through_views": (through_views, x(6, 4)),
    "through_copies": (through_copies, x(6, 4)),
    "through_cat": (through_cat, x(6, 4)),
    "cat_with_a_wide_tensor": (cat_with_a_wide_tensor, x(6, 4)),
    "through_split": (through_split, x(6, 4)),
    "through_gather": (through_gather, x(6, 4)),
    "through_two_widenings": (through_two_widenings, x(6, 4)),
    "widened_twice": (widened_twice, x(6, 4)),
    "used_in_between": (used_in_between, x(6, 4)),
    "lossy": (lossy, x(6, 4, dtype=FP32)),
    "lossy_in_the_middle": (lossy_in_the_middle, x(6, 4)),
    "bfloat16_through_float16": (through_the_other_half, x(6, 4)),
    "float16_through_bfloat16": (through_the_other_half, x(6, 4, dtype=FP16)),
    "returned": (returned, x(6, 4)),
    "returned_view": (returned_view, x(6, 4)),
    "returned_expanded": (returned_expanded, x(6, 4)),
    "returned_twice": (returned_twice, x(6, 4)),
    "printed": (printed, x(6, 4)),
    "through_integers": (through_integers, x(6, 4)),
    "through_fp8": (through_fp8, x(6, 4)),
    "complex_numbers": (complex_numbers, x(6, 4)),
    "residual_stream": (residual_stream, x(6, 4, dtype=FP32)),
    "slices_of_a_cast": (slices_of_a_cast, x(6, 4)),
    "expanded_then_cast": (expanded_then_cast, x(6, 4)),
}
#: Cases with a cast that must stay, although it looks like the end of a round trip.
LOSSY = {"cat_with_a_wide_tensor", "lossy_in_the_middle", "printed"}


@pytest.mark.parametrize("name", CASES)
def test_graphs(name):
    function, argument = CASES[name]
    graph = rewritten_graph(function, argument)
    snapshots.check(__file__, f"casts/{name}", text(graph))
    assert name in LOSSY or not round_trips(graph)


def step(function, values):
    """The last output of a function, and the gradient of its input for an upstream gradient from a fixed seed."""
    leaf = values.clone().requires_grad_()
    out = function(leaf)
    out = out[-1] if isinstance(out, tuple) else out
    if not out.requires_grad:
        return [out]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad(out, leaf, grad)]


def same_bits(some, others):
    return all(
        torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(some, others, strict=True)
    )


@pytest.mark.breadth(1)
@pytest.mark.parametrize("name", CASES)
def test_same_bits(name):
    """The bits are those of eager mode, whose precision casts are emulated.

    Where stock itself differs from eager (torch 2.11 drops lossy casts), they are those of stock.
    """
    function, argument = CASES[name]
    special = argument.detach().clone()
    special.view(-1)[:6] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-39, 3e4]).to(argument.dtype)
    results = {}
    for backend in ("gradfuse", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, fullgraph=True, options={"emulate_precision_casts": True})
        results[backend] = [step(compiled, values) for values in (argument.detach(), special)]
    for ours, stock, values in zip(results["gradfuse"], results["inductor"], (argument.detach(), special), strict=True):
        eager = step(function, values)
        assert same_bits(ours, eager if same_bits(stock, eager) else stock)
        assert ours[0].stride() == eager[0].stride()


@pytest.mark.breadth(2)
@pytest.mark.parametrize("function", [returned, returned_view, returned_twice], ids=lambda f: f.__name__)
def test_the_result_does_not_share_memory_with_the_input(function):
    argument = torch.randn(6, 4).bfloat16()
    before = argument.clone()
    out = torch.compile(function, backend="gradfuse", fullgraph=True)(argument)
    out = out[-1] if isinstance(out, tuple) else out
    out.add_(1)
    assert torch.equal(argument, before)


@pytest.mark.parametrize("name", ["through_views", "used_in_between", "slices_of_a_cast", "expanded_then_cast"])
def test_idempotent(name):

    function, argument = CASES[name]
    graph = rewritten_graph(function, argument)
    before = [(n.target, [str(a) for a in n.args]) for n in graph.nodes]
    rewrite_casts(graph)
    assert before == [(n.target, [str(a) for a in n.args]) for n in graph.nodes]


def test_the_report_counts_the_bytes():
    with eager_graphs(), collect() as report:
        torch.compile(through_views, backend="gradfuse")(x(6, 4)).sum().backward()
    (decision, *_) = [d for d in report.decisions if d.pass_name == "casts"]
    assert decision.op == "bfloat16 -> float32 -> bfloat16" and decision.path == "removed"
    assert decision.why == f"{6 * 4 * 5 * 4} bytes are not written" and "a.float().view" in decision.where


@pytest.mark.parametrize("name", ["lossy", "lossy_in_the_middle", "bfloat16_through_float16", "float16_through_bfloat16"])
def test_a_cast_that_rounds_stays(name):
    function, argument = CASES[name]
    with eager_graphs(), collect() as report:
        torch.compile(function, backend="gradfuse")(argument).float().sum().backward()
    assert not [d for d in report.decisions if d.pass_name == "casts"], report


def test_can_be_disabled():
    graph = rewritten_graph(through_views, x(6, 4), options={"disable": ["casts"]})
    assert round_trips(graph)


WIDER = {BF16: (FP32, FP64), FP16: (FP32, FP64), FP32: (FP64,), FP64: ()}
MOVES = {
    "t": lambda a: a.t(),
    "view": lambda a: a.reshape(a.shape[1], a.shape[0]),
    "expand": lambda a: a.unsqueeze(0).expand(2, -1, -1).reshape(-1, a.shape[1]),
    "contiguous": lambda a: a.t().contiguous(),
    "slice": lambda a: a[1:] if len(a) > 2 else a,
    "cat": lambda a: torch.cat([a, a.flip(0)]),
    "cast": None,
}


@pytest.mark.breadth(0)
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(MOVES)), st.sampled_from([BF16, FP16, FP32, FP64])), min_size=1, max_size=7),
    st.sampled_from([BF16, FP16, FP32]),
    st.integers(0, 2**16),
)
def test_random_chains_keep_every_bit(steps, dtype, seed):
    """Casts in any order, including lossy ones. Only the pass runs, and an interpreter executes the graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def chain(a):
        for step, target in steps:
            a = torch.ops.prims.convert_element_type(a, target) if step == "cast" else MOVES[step](a)
        return torch.ops.prims.convert_element_type(a, dtype).sin()

    start = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
    traced = make_fx(chain, tracing_mode="fake")(start)
    rewrite_casts(traced.graph)
    traced.recompile()
    assert torch.equal(traced(start), chain(start))
    assert not round_trips(traced.graph)


def test_a_view_of_an_expanded_tensor_that_is_cast_before_the_expand():
    """casts:800556: the result of the cast is dense, and the expanded result that replaces it has no such view."""

    def function(a):
        wide = a.expand(2, 8).float()
        return wide.view(-1) * 2, wide.neg()

    a = torch.randn(8).to(BF16)
    with eager_graphs():
        got = torch.compile(function, backend="gradfuse", fullgraph=True)(a)
    for x, y in zip(got, function(a), strict=True):
        assert torch.equal(x, y)
        assert x.stride() == y.stride()
