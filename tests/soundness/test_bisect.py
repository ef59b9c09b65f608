"""``gradfuse bisect`` finds a pass that was made wrong, the graph it is wrong on, and writes a file that fails."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch._inductor.compiler_bisector import CompilerBisector

from inductor_ext import backend, bisect, passes
from tests.support.eager_graphs import eager_graphs

#: Hoisting doubles every table: the second of two compiled functions comes out wrong.
SCRIPT = """
    import torch
    from torch.nn.attention.flex_attention import flex_attention
    import inductor_ext
    from inductor_ext import passes
    from tests.support.eager_graphs import eager_graphs

    rewrite = passes.hoisting.rewrite

    def wrong(gm, options):
        rewrite(gm, options)
        for node in gm.graph.find_nodes(op="call_method", target="contiguous") if options.enabled("hoisting") else []:
            with gm.graph.inserting_after(node):
                doubled = gm.graph.call_function(torch.mul, (node, 2.0))
            node.replace_all_uses_with(doubled, delete_user_cb=lambda user, new=doubled: user is not new)
        gm.recompile()

    passes.hoisting.rewrite = wrong
"""
USE = """
    with eager_graphs():
        x = torch.randn(4, requires_grad=True)
        torch.compile(lambda x: x * 2, backend="gradfuse")(x)
        q, t = torch.randn(1, 2, 8, 16, requires_grad=True), torch.randn(2, 16, requires_grad=True)
        mod = lambda s, b, h, i, j: s + t[h, (i - j) // 2 + 8]
        out = torch.compile(lambda q, t: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + t[h, (i - j) // 2 + 8]), backend="gradfuse")(q, t)
    i, j = torch.arange(8)[:, None], torch.arange(8)
    want = (q @ q.mT / 4 + t[:, (i - j) // 2 + 8]).softmax(-1) @ q
    assert torch.allclose(out, want, atol=1e-4)
"""


@pytest.mark.slow
def test_the_guilty_pass_and_graph_are_found(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ".")
    script, repro = tmp_path / "script.py", tmp_path / "repro.py"
    script.write_text(textwrap.dedent(SCRIPT) + textwrap.dedent(USE))
    assert bisect.run(str(script), repro=str(repro)) == 0
    printed = capfd.readouterr().out
    assert "The pass 'hoisting' (" in printed and ") makes the script fail on graph " in printed
    # The file alone is right, because the pass is only wrong in the script; with the same mistake in front it is not.
    run = subprocess.run([sys.executable, repro], capture_output=True, text=True, timeout=300)
    assert "The graph computes the right results" in run.stdout, run.stderr[-2000:]
    broken = tmp_path / "broken.py"
    broken.write_text(textwrap.dedent(SCRIPT) + "with eager_graphs():\n" + textwrap.indent(repro.read_text(), "    "))
    run = subprocess.run([sys.executable, broken], capture_output=True, text=True, timeout=300)
    assert "'hoisting'" in run.stderr and run.returncode, run.stderr[-2000:]


def test_a_script_that_succeeds_has_nothing_to_find(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('fine')")
    assert bisect.run(str(script)) == 1


def test_the_first_failure_is_found_by_halving():
    assert [bisect.first(lambda n, least=least: n >= least, 100) for least in (1, 2, 57, 100)] == [1, 2, 57, 100]


def test_the_bisector_of_pytorch_knows_our_passes(monkeypatch):
    def wrong(build, options):
        (output,) = build.graph.find_nodes(op="output")
        first = next(n for n in output.all_input_nodes if n.op == "call_function")
        with build.graph.inserting_after(first):
            doubled = build.graph.call_function(torch.ops.aten.mul.Tensor, (first, 2.0))
            doubled.meta = dict(first.meta)
        first.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)

    monkeypatch.setattr(passes.casts, "rewrite", wrong)

    def succeeds():
        torch._dynamo.reset()
        x = torch.arange(4.0)
        with eager_graphs():
            # The bisector replaces the backend by the one that it tries.
            return torch.equal(torch.compile(lambda x: x + 1, backend="gradfuse")(x), x + 1)

    found = CompilerBisector.do_bisect(succeeds)
    assert (found.backend, found.subsystem) == (backend.gradfuse.__name__, "casts")
    assert found.debug_info.startswith("graph ")
