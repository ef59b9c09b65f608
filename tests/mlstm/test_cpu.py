"""The op compiled for CPU tensors as blocked dense math: the rewritten graphs, and in part Inductor's C++."""

import contextlib
import dataclasses

import pytest
import torch

from inductor_ext.core import cpu_loops as dense_loops
from inductor_ext.core.report import collect
from inductor_ext.mlstm import chunks
from tests.support import snapshots
from tests.support.eager_graphs import eager_graphs
from tests.support.joint_graphs import text

from .case import Case
from .test_compiled import CASES, compiled

CASES = CASES | {"float64": Case(dtype=torch.float64, length=20), "wide": Case(width=600, value_width=8, length=20, heads=1)}


@pytest.fixture
def small_blocks(monkeypatch):
    """There are several blocks of rows and segments of columns, and the last of each is not full."""
    monkeypatch.setattr(dense_loops, "QUERY_BLOCK", 32)
    monkeypatch.setattr(dense_loops, "KEY_SEGMENT", 48)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", CASES)
def test_graphs_match_float64(name):
    with eager_graphs():
        CASES[name].check(compiled(CASES[name]))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("length", [96, 97, 250])
@pytest.mark.parametrize("name", ["affine", "no_norm", "large_eps", "steep_gates", "bfloat16"])
def test_segments_match_float64(name, length, small_blocks):
    case = dataclasses.replace(CASES[name], length=length)
    with eager_graphs():
        case.check(compiled(case))


@pytest.mark.breadth(0)
@pytest.mark.parametrize("name", ["affine", *(pytest.param(n, marks=pytest.mark.slow) for n in ("large_eps", "bfloat16"))])
def test_matches_float64(name, small_blocks):
    CASES[name].check(compiled(CASES[name]))


@pytest.mark.breadth(0)
@pytest.mark.parametrize(
    "scope", [eager_graphs, pytest.param(contextlib.nullcontext, marks=pytest.mark.slow)], ids=["graphs", "compiled"]
)
def test_dynamic_lengths(scope):
    case = Case(heads=1)
    run = compiled(case, dynamic=True)
    with scope():
        for case.length in (97, 600):
            case.check(run)


def test_columns_after_the_rows_are_not_computed(small_blocks):
    """Later keys and values are NaN. The first block of rows does not read their segments."""
    case = Case(length=96, heads=1, norm=False)
    operands = case.operands()
    with torch.no_grad():
        for x in operands[1:3]:
            x[:, :, 48:] = torch.nan
    with eager_graphs():
        y = compiled(case)(*operands)
    assert y[:, :, :32].isfinite().all() and y[:, :, 48:].isnan().all()


@pytest.mark.breadth(0)
@pytest.mark.parametrize("chunk", [0, 128])
def test_memory_is_linear_in_the_length(chunk, monkeypatch):
    """No tensor of either graph, loop bodies included, holds length x length elements. The parallel form has loops."""
    monkeypatch.setattr(chunks, "chunk_size", lambda *_: chunk)
    case = Case(length=2048, heads=1, value_width=16)
    with eager_graphs() as graphs:
        compiled(case)(*case.operands()).sum().backward()
    modules = [m for gm in graphs for m in gm.modules() if isinstance(m, torch.fx.GraphModule)]
    values = [n.meta.get("val") for m in modules for n in m.graph.nodes]
    assert (len(modules) > 2) == (chunk == 0) and len(graphs) == 2
    assert max(x.numel() for x in values if isinstance(x, torch.Tensor)) <= dense_loops.QUERY_BLOCK * case.length


def test_the_report_says_so():
    case = Case(length=20)
    with collect() as report, eager_graphs():
        compiled(case)(*case.operands()).sum().backward()
    assert [(d.op, d.path) for d in report.decisions] == [
        ("mlstm", "blocked dense math"),
        ("mlstm_backward", "blocked dense math"),
    ]


def test_graphs(small_blocks):
    case = Case(length=100, heads=1)
    with eager_graphs() as graphs:
        compiled(case)(*case.operands()).sum().backward()
    for direction, gm in zip(("forward", "backward"), graphs, strict=True):
        bodies = [m for m in gm.modules() if isinstance(m, torch.fx.GraphModule) and m is not gm]
        snapshots.check(__file__, f"cpu_{direction}", "\n".join(text(m.graph) for m in bodies))
