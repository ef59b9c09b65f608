"""The scope of the overrides, the caches, user passes, explain."""

import logging
import os
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.lowering import lowerings
from torch.nn.attention.flex_attention import flex_attention

import inductor_ext
from inductor_ext import backend
from inductor_ext.core.report import leave_to_stock
from inductor_ext.options import Options
from inductor_ext.torch_api import config as torch_config
from inductor_ext.torch_api.config import without_caches
from inductor_ext.torch_api.higher_order import flex_attention_backward_hop, flex_attention_hop
from inductor_ext.torch_api.lowering import override_lowerings
from tests.support.eager_graphs import eager_graphs
from tests.support.interpreter import triton_on_cpu

HOPS = (flex_attention_hop, flex_attention_backward_hop)


def attention(query, bias):
    return flex_attention(query, query, query, score_mod=lambda s, b, h, q, k: s + bias[h, k])


def inputs():
    return torch.randn(1, 2, 40, 16, requires_grad=True), torch.randn(2, 40, requires_grad=True)


def test_registered_by_name():
    assert "gradfuse" in torch.compiler.list_backends()


def test_the_function_itself_is_a_backend():
    query, bias = inputs()
    out = torch.compile(attention, backend=inductor_ext.gradfuse)(query, bias)
    assert all(g is not None for g in torch.autograd.grad(out.sum(), (query, bias)))


def test_lowerings_are_stocks_again_after_success_and_after_an_error():
    before = [lowerings[hop] for hop in HOPS]
    query, bias = inputs()
    torch.compile(attention, backend="gradfuse")(query, bias).sum().backward()
    assert [lowerings[hop] for hop in HOPS] == before
    with pytest.raises(ZeroDivisionError), override_lowerings({HOPS[0]: None}):
        assert lowerings[HOPS[0]] is None
        raise ZeroDivisionError
    assert [lowerings[hop] for hop in HOPS] == before


@pytest.mark.breadth(0)
def test_stock_inductor_still_refuses_to_train_on_cpu():
    """The device check is relaxed for gradfuse alone, also after gradfuse has compiled."""
    query, bias = inputs()
    torch.compile(attention, backend="gradfuse")(query, bias)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="does not support backward on CPU"):
        torch.compile(attention, backend="inductor")(query, bias)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        attention(query, bias)


@pytest.mark.parametrize(
    ("shapes", "error"),
    [
        (((1, 2, 8, 16), (1, 3, 8, 16)), "same number of heads"),
        (((1, 2, 8, 16), (2, 2, 8, 16)), "same batch size"),
        (((2, 8, 16), (2, 8, 16)), "must be 4D"),
    ],
)
def test_bad_shapes_raise_what_stock_raises(shapes, error):
    query, key = (torch.randn(s, requires_grad=True) for s in shapes)
    with pytest.raises(Exception, match=error):
        torch.compile(flex_attention, backend="gradfuse", fullgraph=True)(query, key, key)


class Counting(CustomGraphPass):
    def __init__(self):
        self.calls = 0

    def __call__(self, graph):
        self.calls += 1

    def uuid(self):
        return "counting"


def test_a_users_custom_pass_runs_beside_ours():
    passes = Counting(), Counting()
    slot = "post_grad_custom_pre_pass"
    function = torch.compile(lambda x: x.cos() + 1, backend="gradfuse", options={slot: passes[0]})
    with without_caches():
        function(torch.ones(3))
        torch._dynamo.reset()
        with config.patch({slot: passes[1]}):
            torch.compile(lambda x: x.cos() + 2, backend="gradfuse")(torch.ones(3))
    assert [p.calls for p in passes] == [1, 1]


def test_the_cache_keys_know_which_buffers_a_backward_may_overwrite():
    """A backward from the cache could overwrite what a second one, under retain_graph=True, reads again."""
    key = backend.CacheKey(Options(), [])
    keys = set()
    for donated in (None, [], [1, 2]):
        with mock.patch.object(torch_config, "get_donated_idxs", lambda donated=donated: donated):
            keys.add(key.uuid())
    assert len(keys) == 3


def test_disable_leaves_the_op_to_stock():
    query, bias = inputs()
    with pytest.raises(Exception), triton_on_cpu():  # noqa: B017  (stock has no CPU backward; what it raises varies)
        options = {"disable": ["flex_attention", "flex_attention_backward", "dense_attention"]}
        torch.compile(attention, backend="gradfuse", options=options)(query, bias).sum().backward()


def rows(query, table):
    """A score_mod that needs a whole row of the table for each score, which no kernel of ours can differentiate."""
    return flex_attention(query, query, query, score_mod=lambda s, b, h, q, k: s + (table[q] * s).tanh().sum())


def test_strict_names_the_users_line():
    query, table = torch.randn(1, 2, 40, 16, requires_grad=True), torch.randn(40, 3, requires_grad=True)
    with pytest.raises(Exception, match=r"no kernel for flex_attention.*test_backend.py"), triton_on_cpu():
        torch.compile(rows, backend="gradfuse", options={"strict": True})(query, table).sum().backward()


def test_deterministic_refuses_atomics_and_names_the_users_line():
    query, bias = inputs()

    def attention(query, bias):
        return flex_attention(query, query, query, score_mod=lambda s, b, h, q, k: s + bias[h, (s > 0).int()])

    with pytest.raises(Exception, match=r"only be accumulated with atomics.*test_backend.py"), triton_on_cpu():
        torch.compile(attention, backend="gradfuse", options={"deterministic": True})(query, bias).sum().backward()


@pytest.mark.breadth(0)
def test_deterministic_without_captures():
    query, _ = inputs()
    function = torch.compile(lambda q: flex_attention(q, q, q), backend="gradfuse", options={"deterministic": True})
    (first,), (second,) = (torch.autograd.grad(function(query).sum(), query) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.breadth(0)
def test_explain_prints_each_decision(caplog):
    query, bias = inputs()
    with caplog.at_level(logging.INFO, logger="gradfuse"):
        explanation = inductor_ext.explain(attention)(query, bias)
    assert [d.op for d in explanation.decisions] == ["flex_attention", "flex_attention_backward"]
    assert explanation.fallbacks == []
    assert "blocked dense math" in str(explanation)
    assert "test_backend.py" in str(explanation)
    assert any("blocked dense math" in message for message in caplog.messages)
    assert bias.grad is None


SCRIPT = textwrap.dedent(
    """
    import sys
    import torch
    from torch._dynamo.utils import counters
    from torch._inductor import codecache
    import inductor_ext
    from inductor_ext.core.report import collect

    def function(x):
        return (x.sin() * x).sum(-1)

    x = torch.randn(64, 64, requires_grad=True)
    for backend in sys.argv[1:]:
        torch._dynamo.reset()
        counters.clear()
        torch.compile(function, backend=backend)(x).sum().backward()
        print(backend, counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
    """
)


@pytest.mark.breadth(0)
def test_caches_never_mix_the_backends(tmp_path):
    """inductor, gradfuse, inductor in one process and in a second one that shares the cache directory."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": root}

    def run(*backends):
        command = [sys.executable, str(script), *backends]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return [line.split() for line in done.stdout.splitlines()]

    first = run("inductor", "gradfuse", "inductor")
    assert [name for name, _ in first] == ["inductor", "gradfuse", "inductor"]
    assert [int(hits) > 0 for _, hits in first] == [False, False, True]
    second = run("gradfuse", "inductor")
    assert [int(hits) > 0 for _, hits in second] == [True, True]


@pytest.mark.breadth(0)
@pytest.mark.parametrize("first", ["", "import inductor_ext"], ids=["entry point alone", "imported first"])
def test_found_by_name(first):
    script = f"{first}\nimport torch\nprint(torch.compile(lambda x: x + 1, backend='gradfuse')(torch.ones(2)).tolist())"
    installed = entry_points(group="torch_dynamo_backends", name="gradfuse")
    if not first and not installed:
        pytest.skip("the package is not installed")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.stdout.strip() == "[2.0, 2.0]", done.stderr[-2000:]


def test_ptxas_is_chosen_before_anything_is_compiled(monkeypatch):
    """Triton's cache has its version in the key, so it must be the same in a process that takes most kernels from caches."""
    order = []
    monkeypatch.setattr(torch_config, "choose_ptxas", lambda: order.append("ptxas"))
    stock = torch_config.compile_fx
    monkeypatch.setattr(torch_config, "compile_fx", lambda *a, **k: order.append("compile") or stock(*a, **k))
    torch.compile(lambda x: x + 1, backend="gradfuse")(torch.ones(2))
    assert order == ["ptxas", "compile"]


def test_inference_warns_of_nothing(caplog):
    """Stock's kernel is as good where no gradient is needed."""
    query = torch.randn(1, 2, 32, 16)
    with caplog.at_level(logging.INFO, logger="gradfuse"), torch.no_grad(), eager_graphs():
        torch.compile(lambda q: flex_attention(q, q, q), backend="gradfuse")(query)
    assert any("inference" in r.message for r in caplog.records)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_what_is_left_to_stock_is_warned_of_once_a_line(caplog):
    for op in ("flex_attention", "flex_attention_backward", "flex_attention"):
        leave_to_stock(False, "flex_attention", op, "a reason of this test", "model.py:7: attention(q)", "Do this.")
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        "flex_attention is left to stock Inductor at model.py:7: attention(q): a reason of this test. Do this."
    ]
