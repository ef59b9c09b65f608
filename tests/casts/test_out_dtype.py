"""Matmuls of half precision whose result is cast to fp32 write fp32 where a GPU can."""

import inspect

import pytest
import torch

from inductor_ext.casts import rewrite as casts
from inductor_ext.core import joint_graph
from inductor_ext.options import Options
from tests.support.joint_graphs import rewritten

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def out_dtype_nodes(function, *inputs, into_first=False):
    """The matmuls with fp32 output that a graph on a GPU would contain; no kernel runs.

    into_first: the result overwrites the first input, as at the end of an in-place operation.
    """
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        fakes = [torch.empty(i.shape, dtype=i.dtype, device="cuda") for i in inputs]
        graph = make_fx(function)(*fakes).graph
    for node, name in zip(graph.find_nodes(op="placeholder"), inspect.signature(function).parameters, strict=True):
        node.target = name
    if into_first:
        output = graph.find_nodes(op="output")[0]
        with graph.inserting_before(output):
            first = graph.find_nodes(op="placeholder")[0]
            output.args = (graph.call_function(torch.ops.aten.copy_.default, (first, output.args[0])),)
    with joint_graph.building(graph) as build:
        casts.rewrite(build, Options())
        casts.widen_matmuls(build, Options())
    return [n.target for n in graph.nodes if n.target in (torch.ops.aten.mm.dtype, torch.ops.aten.bmm.dtype)]


def cast(a, dtype=FP32):
    return torch.ops.prims.convert_element_type(a, dtype)


FOLDED = {
    "mm": lambda a, b: cast(a @ b),
    "through_a_permute": lambda a, b: cast((a @ b).t()),
    "bmm": lambda a, b: cast(torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)),
}
NOT_FOLDED = {
    "used_by_arithmetic": lambda a, b: cast(a @ b).sin(),
    "also_used_in_half": lambda a, b: (lambda y: (cast(y), y.sin()))(a @ b),
    "a_residual_stream": lambda a, b: cast(a) + cast(a @ b),
    "to_fp64": lambda a, b: cast(a @ b, FP64),
    "of_fp32": lambda a, b: cast(cast(a) @ cast(b)),
}


def test_slices():
    """The gradients of weights that one matmul reads are slices of its result. In a forward a slice may be all that is left."""
    parts = lambda y: [torch.ops.aten.slice.Tensor(y, 0, i, i + 2) for i in (0, 2)]  # noqa: E731
    halves = [torch.empty(6, 6, dtype=BF16)] * 2
    assert len(out_dtype_nodes(lambda x, tangents_1: parts(cast(tangents_1.t() @ x)), *halves)) == 1
    assert not out_dtype_nodes(lambda a, b: parts(cast(a @ b)), *halves)


@pytest.mark.parametrize("name", [*FOLDED, *NOT_FOLDED])
def test_matmuls_with_fp32_output(name):
    function = {**FOLDED, **NOT_FOLDED}[name]
    targets = out_dtype_nodes(function, torch.empty(6, 6, dtype=BF16), torch.empty(6, 6, dtype=BF16))
    assert len(targets) == (1 if name in FOLDED else 0)


def test_gradients_of_a_weight_used_twice_are_added_in_fp32():
    """Both matmuls write fp32, and only the sum, which is the gradient, rounds."""

    def tied(tangents_1, a, b):
        return cast(tangents_1.t() @ a) + cast(tangents_1.t() @ b)

    halves = [torch.empty(6, 6, dtype=BF16)] * 3
    assert len(out_dtype_nodes(tied, *halves)) == 2


def test_a_gradient_accumulated_in_place_is_added_in_fp32():
    def accumulate(acc, a, b):
        return acc + cast(a @ b)

    inputs = torch.empty(6, 6), *[torch.empty(6, 6, dtype=BF16)] * 2
    assert len(out_dtype_nodes(accumulate, *inputs, into_first=True)) == 1
    assert not out_dtype_nodes(accumulate, *inputs)


def test_a_matmul_on_the_cpu_is_left_as_it_is():
    found = rewritten(lambda a: (a @ a.t()).float(), torch.randn(6, 4).to(BF16).requires_grad_())
    assert "mm.dtype" not in found and "convert_element_type" in found
