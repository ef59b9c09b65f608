"""Ops in the bodies of others, dynamic shapes, precision, caches: our passes see an op in every graph."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from inductor_ext.core.report import collect
from tests.attention.case import relative_error
from tests.support.eager_graphs import eager_graphs

LENGTH = 24


def attention(q, t):
    return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * t[h, 0] + t[h, i - j + LENGTH])


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(1, 2, LENGTH, 16, dtype=dtype, requires_grad=True), torch.randn(
        2, 50, dtype=dtype, requires_grad=True
    )


def dense(q, t):
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])
    scores = q @ q.mT / 4 * t[:, 0][:, None, None] + t[:, i - j + LENGTH]
    return scores.softmax(-1) @ q


def check(function, tolerance=1e-5, dtype=torch.float32, **options):
    torch._dynamo.reset()
    given, exact = inputs(dtype), [x.detach().double().requires_grad_() for x in inputs(dtype)]
    with eager_graphs(), collect() as report:
        out = torch.compile(function, backend="gradfuse", **options)(*given)
        grads = torch.autograd.grad(out.square().sum(), given)
    want = dense(*exact)
    for g, w in zip([out, *grads], [want, *torch.autograd.grad(want.square().sum(), exact)], strict=True):
        assert relative_error(g, w) <= tolerance
    return report


def hoisted(report):
    return any(d.pass_name == "hoisting" and d.path == "table" for d in report.decisions)


@pytest.mark.breadth(1)
def test_inside_a_checkpoint():
    assert hoisted(check(lambda q, t: checkpoint(attention, q, t, use_reentrant=False), fullgraph=True))


def test_inside_a_compiled_region():
    region = torch.compiler.nested_compile_region(attention)
    assert hoisted(check(lambda q, t: region(q, t), fullgraph=True))


def test_inside_a_branch():
    report = check(lambda q, t: torch.cond(q.sum() > -1e9, attention, lambda q, t: q * 1.0, (q, t)), fullgraph=True)
    assert hoisted(report)


def test_float64_keeps_its_precision():
    check(attention, tolerance=1e-13, dtype=torch.float64)


@pytest.mark.breadth(1)
@pytest.mark.parametrize("where", ["argument", "inside"])
def test_dynamic_lengths_with_a_block_mask(where):
    def run(q, t, mask):
        mod = lambda s, b, h, i, j: s + t[h, (i - j).clamp(-5, 5) + 5]  # noqa: E731
        if mask is None:
            # What transformers does for T5: one block for the whole length.
            mask = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, q.shape[2], q.shape[2], device="cpu", BLOCK_SIZE=q.shape[2]
            )
        return flex_attention(q, q, q, score_mod=mod, block_mask=mask)

    torch._dynamo.reset()
    with eager_graphs():
        compiled = torch.compile(run, backend="gradfuse", dynamic=True)
        for length in (24, 40, 133):
            q, t = torch.randn(1, 2, length, 16, requires_grad=True), torch.randn(2, 11, requires_grad=True)
            given = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cpu")
            out = compiled(q, t, given if where == "argument" else None)
            grads = torch.autograd.grad(out.square().sum(), (q, t))
            exact = [x.detach().double().requires_grad_() for x in (q, t)]
            i, j = torch.arange(length)[:, None], torch.arange(length)
            scores = exact[0] @ exact[0].mT / 4 + exact[1][:, (i - j).clamp(-5, 5) + 5]
            want = scores.masked_fill(i < j, -torch.inf).softmax(-1) @ exact[0]
            for g, w in zip([out, *grads], [want, *torch.autograd.grad(want.square().sum(), exact)], strict=True):
                assert relative_error(g, w) <= 1e-5


@pytest.mark.breadth(1)
def test_dynamic_lengths_with_a_learned_pair():
    def run(q, t):
        return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + t[h, i, j])

    torch._dynamo.reset()
    with eager_graphs():
        compiled = torch.compile(run, backend="gradfuse", dynamic=True)
        for length in (24, 40, 133):
            q, t = (torch.randn(*n, requires_grad=True) for n in ((1, 2, length, 16), (2, length, length)))
            out = compiled(q, t)
            grads = torch.autograd.grad(out.square().sum(), (q, t))
            exact = [x.detach().double().requires_grad_() for x in (q, t)]
            want = (exact[0] @ exact[0].mT / 4 + exact[1]).softmax(-1) @ exact[0]
            for g, w in zip([out, *grads], [want, *torch.autograd.grad(want.square().sum(), exact)], strict=True):
                assert relative_error(g, w) <= 1e-5


def test_a_wrong_option_raises_at_once():
    with pytest.raises(RuntimeError, match="max_autotune"):
        torch.compile(lambda x: x, backend="gradfuse", options={"max_autotun": True})
    with pytest.raises(RuntimeError):
        torch.compile(lambda x: x, backend="inductor", options={"max_autotun": True})


_CACHED = """
    import json, torch
    from torch._dynamo.utils import counters
    from torch.nn.attention.flex_attention import flex_attention
    def run(q, t, g, key):
        q = q[:, :, key.argsort()]
        out = flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * t[h, 0] + t[h, i - j + 24])
        scan = torch._higher_order_ops.associative_scan
        return scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (torch.sigmoid(g), g), 0, combine_mode="generic")[1].sum() + out.sum()
    options = json.loads({options!r})
    q, t = torch.randn(1, 2, 24, 16, requires_grad=True), torch.randn(2, 50, requires_grad=True)
    torch.compile(run, backend="gradfuse", options=options)(q, t, torch.randn(9, 3, requires_grad=True), torch.randn(24)).backward()
    print(json.dumps({{k: dict(counters[k]) for k in ("aot_autograd", "inductor")}}))
"""


def counts(folder, options="{}"):
    import json

    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": os.getcwd()}
    environment.pop("TRITON_INTERPRET", None)
    script = folder / "script.py"
    script.write_text("import inductor_ext\n" + textwrap.dedent(_CACHED).format(options=options))
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.breadth(0)
def test_a_second_process_starts_warm(tmp_path):
    cold, warm, other = counts(tmp_path), counts(tmp_path), counts(tmp_path, '{"disable": ["hoisting"]}')
    for found in (cold, warm, other):
        assert not found["aot_autograd"].get("autograd_cache_bypass") and not found["inductor"].get(
            "fxgraph_cache_bypass"
        ), found
    assert cold["aot_autograd"]["autograd_cache_miss"] >= 1 and not cold["aot_autograd"].get("autograd_cache_hit")
    assert warm["aot_autograd"]["autograd_cache_hit"] >= 1 and not warm["aot_autograd"].get("autograd_cache_miss")
    assert other["aot_autograd"]["autograd_cache_miss"] >= 1 and not other["aot_autograd"].get("autograd_cache_hit")


def test_nodes_that_stock_has_not_sorted_yet():
    """After stock replaced an attention by SDPA, its own sort has not run when our passes see the joint graph."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 48, 1, 16), (3, 17, 1, 16), (3, 17, 16))
    q, k, v = (torch.randn(s, generator=generator, requires_grad=True) for s in shapes)
    table = torch.randn(9, 1, generator=generator)
    index = torch.randint(9, (48, 17), generator=generator)

    def function(q, k, v, table):
        value = v.view(3, 17, 1, 16).permute(0, 2, 1, 3)
        bias = table[index.view(-1)].view(48, 17, -1).permute(2, 0, 1).contiguous() / 4
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), value, attn_mask=bias)
        return out.transpose(1, 2).reshape(3, -1, 16)

    torch._dynamo.reset()
    with eager_graphs():
        out = torch.compile(function, backend="gradfuse", fullgraph=True)(q, k, v, table)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = function(*exact, table.double())
    for got, expected in zip([out, *grads], [want, *torch.autograd.grad(want.square().sum(), exact)], strict=True):
        assert relative_error(got, expected) < 1e-5
