"""``python -m tests.upstream`` runs a small file that is written like PyTorch's own tests."""

import re
import subprocess
import sys
import textwrap

import pytest

from tests import upstream

from .small import ROOT

FILE = """
    import torch
    from helper_beside_it import LENGTH
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._inductor.test_case import TestCase as InductorTestCase
    from torch.nn.attention.flex_attention import flex_attention
    from torch.testing._internal import common_utils
    from tests.support.eager_graphs import eager_graphs


    def trained(compiled):
        q = torch.randn(1, 2, LENGTH, 16, requires_grad=True)
        bias = torch.randn(2, LENGTH, requires_grad=True)
        with eager_graphs() as graphs:
            out = compiled(q, q, q, score_mod=lambda s, b, h, i, j: s + bias[h, j])
            torch.autograd.grad(out.sum(), bias)
        return len(graphs)


    class TestBiases(InductorTestCase):
        @common_utils.parametrize("backend", [None, "inductor"])
        def test_compiled_by_gradfuse(self, backend):
            options = {} if backend is None else {"backend": backend}
            self.assertEqual(trained(torch.compile(flex_attention, **options)), 2)

        def test_another_backend_stays(self):
            with self.assertRaisesRegex(Exception, "nothing of the kind"):
                trained(torch.compile(flex_attention, backend="aot_eager"))

        def test_a_counter(self):
            counter = CompileCounterWithBackend("inductor")
            self.assertEqual(counter.backend, "gradfuse")
            torch.compile(lambda x: x.sin(), backend=counter, fullgraph=True)
            self.assertEqual(counter.frame_count, 0)

        def test_a_lifted_refusal(self):
            with self.assertRaisesRegex(NotImplementedError, "does not support backward on CPU"):
                trained(torch.compile(flex_attention))

        def test_wrong(self):
            self.assertEqual(1, 2)


    common_utils.instantiate_parametrized_tests(TestBiases)
"""


@pytest.mark.breadth(0)
def test_a_file_runs_with_our_backend(tmp_path):
    folder = tmp_path / "test" / "inductor"
    folder.mkdir(parents=True)
    (tmp_path / "test" / "helper_beside_it.py").write_text("LENGTH = 24\n")
    (folder / "test_made_up.py").write_text(textwrap.dedent(FILE))
    command = [sys.executable, "-m", "tests.upstream", str(folder / "test_made_up.py"), "-rA", "-p", "no:warnings"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    outcomes = {name: outcome for outcome, name in re.findall(r"^(PASSED|FAILED).*::(\w+)", done.stdout, re.MULTILINE)}
    assert done.returncode == 1, done.stdout + done.stderr
    assert outcomes == {
        "test_compiled_by_gradfuse_backend0": "PASSED",
        "test_compiled_by_gradfuse_backend_inductor": "PASSED",
        "test_another_backend_stays": "FAILED",
        "test_a_counter": "PASSED",
        "test_wrong": "FAILED",
    }, done.stdout
    assert "gradfuse lifts this refusal: does not support backward on CPU" in done.stdout
    assert "2 failed, 3 passed, 1 skipped" in done.stdout


def test_a_missing_file_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["upstream", str(tmp_path / "none.py")])
    with pytest.raises(SystemExit):
        upstream.main()
    assert "none.py is not a file" in capsys.readouterr().err
