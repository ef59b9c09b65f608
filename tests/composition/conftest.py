"""The devices of these tests: ``device`` is a GPU, or the CPU, where the rewritten graphs run op by op."""

import contextlib
from unittest import mock

import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

from tests.support.eager_graphs import eager_graphs

DEVICES = ["graphs", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "graphs":
        with eager_graphs() as graphs:
            yield "cpu"
        assert not left_to_stock(graphs), "a flex_attention that trains was left to stock, whose C++ has no backward"
    else:
        yield request.param


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.slow), DEVICES[1]])
def generated(request):
    """A device for which code is generated. On the CPU this is C++, which is slow to build."""
    return request.param


def left_to_stock(graphs):
    """Whether the backward of a flex_attention is still one op in a graph, or in the body of one of its ops."""
    backward = torch.ops.higher_order.flex_attention_backward
    modules = [m for g in graphs for m in g.modules() if isinstance(m, torch.fx.GraphModule)]
    return any(m.graph.find_nodes(op="call_function", target=backward) for m in modules)


def stock_error(run):
    """The exception of ``run("aot_eager")``, which is stock up to code generation, or None.

    During the run flex_attention's refusal to train on the CPU is lifted, because it would hide every other failure.
    """
    torch._dynamo.reset()
    lifted = mock.patch.object(flex_module, "_validate_device", lambda *_: None)
    with lifted if not torch.cuda.is_available() else contextlib.nullcontext():
        try:
            run("aot_eager")
        except Exception as error:
            return error
        finally:
            torch._dynamo.reset()
    return None


@pytest.fixture
def alike(record_property):
    """Call ``run("gradfuse")``. It may fail only if stock fails too, and then the record of the test says so."""

    def check(run, stocks=stock_error):
        try:
            run("gradfuse")
        except Exception:
            error = stocks(run)
            if error is None:
                raise
            record_property("stock", f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")

    return check
