"""The forward in Gluon, for Hopper: which attentions it takes, that it builds, and on a GPU that it is right."""

import dataclasses
import logging
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.async_compile import AsyncCompile
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from inductor_ext.attention import dropout, gluon_forward
from inductor_ext.core.report import collect
from inductor_ext.torch_api.template import build_failure
from tests.support import snapshots
from tests.support.emitted import body, triton_sources
from tests.support.offline import OFFLINE
from tests.support.targets import on_target

from .case import relative_error


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q - k).abs() <= 64


def some_rows(b, h, q, k):
    """The first rows see no key, and no block is full."""
    return (q >= 150) & (k >= 130) & (q >= k)


@dataclasses.dataclass(frozen=True)
class Attention:
    """An attention. score_mod: of two captured tensors, [H, S] and [H]. after: what follows it in the graph.

    block: the queries and keys of a block of the mask. factor: what products of queries and keys are multiplied with.
    """

    mask: object = None
    score_mod: object = lambda t, scale: None
    after: object = lambda out: out
    block: int = 128
    factor: float | None = None

    def function(self, device, queries, keys, table, scale, **options):
        mask = None if self.mask is None else create_block_mask(self.mask, None, None, queries, keys, device, self.block)

        def run(q, k, v):
            grouped = q.shape[1] != k.shape[1]
            score_mod = self.score_mod(table, scale)
            out = flex_attention(q, k, v, score_mod, mask, self.factor, enable_gqa=grouped, kernel_options=options)
            return self.after(out)

        return run

    def reference(self, q, k, v, table, scale):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        b, h, i, j = (torch.arange(n, device=q.device) for n in (*q.shape[:3], k.shape[2]))
        place = b[:, None, None, None], h[:, None, None], i[:, None], j[None, :]
        scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if self.factor is None else self.factor)
        score_mod = self.score_mod(table, scale)
        scores = scores if score_mod is None else score_mod(scores, *place)
        scores = scores if self.mask is None else scores.masked_fill(~self.mask(*place), -math.inf)
        return self.after(scores.softmax(-1).nan_to_num(0) @ v)


TAKEN = {
    "plain": Attention(),
    "causal": Attention(causal),
    "window": Attention(window),
    "some_rows": Attention(some_rows),
    "large_blocks": Attention(causal, block=256),
    "a_negative_scale": Attention(causal, factor=-0.2),
    "query": Attention(causal, lambda t, _: lambda s, b, h, q, k: s * t[h, q]),
    "query_and_key": Attention(None, lambda t, _: lambda s, b, h, q, k: s * t[h, q] + t[h, k]),
    "head": Attention(window, lambda _, t: lambda s, b, h, q, k: s * t[h] - t[h] * (q - k).abs() / 64),
    "by_parity": Attention(None, lambda *_: lambda s, b, h, q, k: torch.where((q + k) % 3 == 0, s * 0.5, s - 1.0)),
    "with_an_epilogue": Attention(causal, after=lambda out: F.relu(F.gelu(out.float() * 2 + 1)).clamp(max=2).to(out.dtype)),
    "clamped": Attention(
        None, lambda t, _: lambda s, b, h, q, k: torch.maximum(s.clamp(-2, 3), t[h, q]) * (q - k).clamp(max=9)
    ),
    # Whole tiles are hidden by numbers.
    "hidden_by_numbers": Attention(None, lambda *_: lambda s, b, h, q, k: torch.where(q - k < 64, s, -1e30)),
    "hidden_by_smaller_numbers": Attention(None, lambda *_: lambda s, b, h, q, k: torch.where(k - q < 64, s, -1e10)),
}


def operands(queries=256, keys=256, heads=2, kv_heads=2, dim=128, v_dim=128, dtype=torch.bfloat16, device="cpu", batch=2):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, v_dim)]
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes)
    table = torch.rand(heads, max(queries, keys), generator=generator).to(device)
    scale = torch.rand(heads, generator=generator).to(device)
    return (q, k, v), table.requires_grad_(), scale.requires_grad_()


@pytest.fixture(autouse=True)
def short_sequences(monkeypatch):
    """In these tests they take the kernel, too."""
    monkeypatch.setattr(gluon_forward, "SHORTEST", 1)


class _NotRun:
    def run(self, *_, **__):
        pass


def source(attention, length=256, **options):
    """The source of the forward kernel for an H200, which is not run, or None if it is not in Gluon."""
    inputs, table, scale = operands(length, length)
    compiled = torch.compile(attention.function("cpu", length, length, table, scale), backend="gradfuse", **options)
    torch._dynamo.reset()
    not_run = mock.patch.object(AsyncCompile, "triton", lambda *_, **__: _NotRun())
    with on_target(architecture=90, gluon=True), not_run:
        found = triton_sources(compiled, *inputs)
    return next((kernel for kernel in found if "@gluon.jit" in kernel), None)


@OFFLINE
def test_emitted_kernel():
    snapshots.check(__file__, "gluon_causal_forward", body(source(TAKEN["causal"])))


@OFFLINE
@pytest.mark.breadth(2)
@pytest.mark.parametrize("length", [512, 500])
@pytest.mark.parametrize("name", TAKEN)
def test_builds_without_spills(name, length, builder):
    built = builder.build(source(TAKEN[name], length), 90, 4, 1)
    built.check()
    built.check_matmuls()


LONG = Attention(None, lambda *_: lambda s, b, h, q, k: s + torch.where(q > 5, 70000, 0) * q % 7)
SOFTCAP = Attention(causal, lambda *_: lambda s, b, h, q, k: 20 * torch.tanh(s / 20))
MASKED_KEYS = Attention(causal, lambda t, _: lambda s, b, h, q, k: s + t[h, k])
PAIR = Attention(None, lambda t, _: lambda s, b, h, q, k: s + t[h, (q * k) % 256])
OTHERS = {
    "a read for each pair": (PAIR, {}, {}),
    "a distance": (Attention(None, lambda t, _: lambda s, b, h, q, k: s + t[h, (q - k).abs()]), {}, {}),
    "integers of 64 bits": (LONG, {}, {}),
    "a long function": (SOFTCAP, {}, {}),
    "values of keys beside a mask": (MASKED_KEYS, {}, {}),
    "small blocks": (Attention(causal, block=64), {}, {}),
    "one block": (Attention(causal, block=512), {}, {}),
    "dropout": (TAKEN["plain"], {}, dropout(0.1)),
    "head dim 64": (TAKEN["plain"], {"dim": 64, "v_dim": 64}, {}),
    "fp32": (TAKEN["plain"], {"dtype": torch.float32}, {}),
    "rows that are not aligned": (TAKEN["plain"], {"dim": 100, "v_dim": 100}, {}),
    "tiles of the user": (TAKEN["plain"], {}, {"BLOCK_M": 64}),
    "warps of the user": (TAKEN["plain"], {}, {"num_warps": 8}),
}


def paths(function, inputs, **options):
    torch._dynamo.reset()
    not_run = mock.patch.object(AsyncCompile, "triton", lambda *_, **__: _NotRun())
    with on_target(architecture=90, gluon=True), not_run, collect() as report:
        triton_sources(torch.compile(function, backend="gradfuse", options=options), *inputs)
    return [d.path for d in report.decisions if d.pass_name == "flex_attention"], report.decisions


@OFFLINE
@pytest.mark.breadth(4)
@pytest.mark.parametrize("name", OTHERS)
def test_attentions_that_it_leaves(name):
    attention, sizes, options = OTHERS[name]
    inputs, table, scale = operands(**sizes)
    found, _ = paths(attention.function("cpu", 256, 256, table, scale, **options), inputs)
    assert found == ["flex_forward.py.jinja"]


@OFFLINE
def test_lengths_that_may_change(builder):
    """They are arguments of the kernel, and its warpgroups' functions have these too."""
    kernel = source(TAKEN["plain"], dynamic=True)
    assert "ks0" in kernel
    builder.build(kernel, 90, 4, 1).check()


@pytest.mark.breadth(1)
@OFFLINE
@pytest.mark.parametrize("name", ["hidden_by_numbers", "query_and_key"])
def test_equal_scores_are_equally_probable(name, builder):
    """The maximum is subtracted before the product with log2(e): of the exact product of -1e30 a rest of 6e21 would stay."""
    ptx = builder.build(source(TAKEN[name]), 90, 4, 1).ptx
    products = [line for line in ptx.splitlines() if "0f3FB8AA3B" in line]
    assert products and all("mul" in line or "mov" in line for line in products)


@OFFLINE
def test_nothing_is_fused_into_it():
    kernel = source(TAKEN["with_an_epilogue"])
    assert "triton_helpers.maximum" not in kernel and "erf" not in kernel


@OFFLINE
def test_short_sequences_are_left(monkeypatch):
    monkeypatch.setattr(gluon_forward, "SHORTEST", 257)
    inputs, table, scale = operands()
    assert paths(TAKEN["plain"].function("cpu", 256, 256, table, scale), inputs)[0] == ["flex_forward.py.jinja"]


@OFFLINE
def test_it_can_be_disabled():
    inputs, table, scale = operands()
    function = TAKEN["causal"].function("cpu", 256, 256, table, scale)
    assert paths(function, inputs)[0] == [gluon_forward.FILE]
    assert paths(function, inputs, disable=["gluon"])[0] == ["flex_forward.py.jinja"]


@OFFLINE
def test_a_kernel_that_does_not_build_is_replaced(monkeypatch):
    monkeypatch.setattr(gluon_forward, "build_failure", lambda choice: "CompilationError: no such op")
    inputs, table, scale = operands()
    found, decisions = paths(TAKEN["causal"].function("cpu", 256, 256, table, scale), inputs)
    assert found == ["flex_forward.py.jinja"]
    (decision,) = [d for d in decisions if d.pass_name == "gluon"]
    assert decision.path == "Triton" and "no such op" in decision.why


def test_the_reason_is_kept_and_nothing_is_printed(caplog):
    """Inductor logs the source of a kernel that does not build, with all that Triton says about it."""

    def precompile():
        logging.getLogger("torch._inductor.runtime.triton_heuristics").error("Triton compilation failed")
        raise ValueError("at 3:4:\nno such op")

    source, layout = mock.Mock(module_cache_key="no source"), mock.Mock(device=torch.device("cuda"))
    choice = mock.Mock(bmreq=source, layout=layout, precompile=precompile)
    assert build_failure(choice) == "ValueError: no such op" and not caplog.records


SHAPES = {
    "one tile": {},
    "uneven": {"queries": 1000, "keys": 1000},
    "more keys": {"queries": 300, "keys": 1000},
    "more queries": {"queries": 1024, "keys": 700},
    "groups": {"queries": 640, "keys": 640, "heads": 8, "kv_heads": 2},
    "padded head dims": {"queries": 513, "keys": 513, "dim": 80, "v_dim": 96},
    "fp16": {"queries": 2048, "keys": 2048, "dtype": torch.float16},
}


def on_gpu(attention, inputs, table, scale, **options):
    run = attention.function("cuda", inputs[0].shape[2], inputs[1].shape[2], table, scale)
    torch._dynamo.reset()
    with collect() as report:
        out = torch.compile(run, backend="gradfuse", **options)(*inputs)
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
        grads = torch.autograd.grad(out, [*inputs, table, scale], gradient, allow_unused=True)
    return [out, *grads], [d.path for d in report.decisions if d.pass_name == "flex_attention"]


def check_on_gpu(attention, inputs, table, scale):
    got, path = on_gpu(attention, inputs, table, scale)
    without, other = on_gpu(attention, inputs, table, scale, options={"disable": ["gluon"]})
    exact = [x.detach().double().requires_grad_() for x in (*inputs, table, scale)]
    want = attention.reference(*exact)
    gradient = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(inputs[0]).double()
    want = [want, *torch.autograd.grad(want, exact, gradient, allow_unused=True)]
    assert (path, other) == ([gluon_forward.FILE], ["flex_forward.py.jinja"])
    for ours, triton, x in zip(got, without, want, strict=True):
        assert (ours is None) == (x is None)
        if x is not None:
            assert relative_error(ours, x) <= 1.1 * relative_error(triton, x) + 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="for Hopper")
class TestOnHopper:
    @pytest.mark.parametrize("name", TAKEN)
    def test_matches_float64(self, name):
        inputs, table, scale = operands(500, 500, device="cuda")
        check_on_gpu(TAKEN[name], inputs, table, scale)

    def test_less_than_a_tile(self):
        check_on_gpu(TAKEN["plain"], *operands(97, 97, device="cuda"))

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("name", ["plain", "causal", "some_rows"])
    def test_shapes_match_float64(self, name, shape):
        check_on_gpu(TAKEN[name], *operands(**SHAPES[shape], device="cuda"))

    def test_strided_and_expanded_operands(self):
        (q, k, v), table, scale = operands(640, 640, device="cuda")
        q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        k, v = (x.detach()[:1].expand(2, -1, -1, -1).requires_grad_() for x in (k, v))
        check_on_gpu(TAKEN["causal"], (q, k, v), table, scale)

    def test_gradient_through_the_logsumexp(self):
        (q, k, v), *_ = operands(500, 500, device="cuda")
        mask = create_block_mask(causal, None, None, 500, 500, "cuda")
        torch._dynamo.reset()
        run = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, return_lse=True), backend="gradfuse")
        with collect() as report:
            out, lse = run(q, k, v)
        assert {d.path for d in report.decisions if d.pass_name == "flex_attention"} == {gluon_forward.FILE}
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        hidden = torch.ones(500, 500, dtype=torch.bool, device="cuda").triu(1)
        scores = (exact[0] @ exact[1].mT / math.sqrt(128)).masked_fill(hidden, -math.inf)
        want = scores.softmax(-1) @ exact[2], scores.logsumexp(-1)
        tangents = torch.randn_like(out), torch.randn_like(lse)
        got = torch.autograd.grad((out, lse), (q, k, v), tangents)
        expected = torch.autograd.grad(want, exact, [x.double() for x in tangents])
        assert relative_error(lse, want[1]) < 1e-5
        assert max(map(relative_error, (out, *got), (want[0], *expected))) < 6e-3

    def test_dynamic_lengths(self):
        torch._dynamo.reset()
        run = torch.compile(lambda q, k, v: flex_attention(q, k, v), backend="gradfuse", dynamic=True)
        with collect() as report:
            for length in (300, 1000, 128):
                inputs, *_ = operands(length, length, device="cuda")
                want = TAKEN["plain"].reference(*(x.detach().double() for x in inputs), None, None)
                assert relative_error(run(*inputs), want) < 4e-3
        assert {d.path for d in report.decisions if d.pass_name == "flex_attention"} == {gluon_forward.FILE}

    def test_cuda_graphs(self):
        inputs, table, scale = operands(640, 640, device="cuda")
        run = TAKEN["query"].function("cuda", 640, 640, table, scale)
        graphs = torch.compile(run, backend="gradfuse", mode="reduce-overhead")
        results = [graphs(*inputs).clone() for _ in range(4)]
        want = TAKEN["query"].reference(*(x.detach().double() for x in (*inputs, table, scale)))
        assert all(relative_error(x, want) < 4e-3 for x in results)

    def test_max_autotune(self):
        """It is the fastest forward, and the tiles of the others do not compete with it."""
        inputs, table, scale = operands(640, 640, device="cuda")
        run = TAKEN["causal"].function("cuda", 640, 640, table, scale)
        torch._dynamo.reset()
        with collect() as report:
            got = torch.compile(run, backend="gradfuse", mode="max-autotune-no-cudagraphs")(*inputs)
        assert {d.path for d in report.decisions if d.pass_name == "flex_attention"} == {gluon_forward.FILE}
        assert relative_error(got, TAKEN["causal"].reference(*(x.detach().double() for x in (*inputs, table, scale)))) < 4e-3

    def test_repeats_are_equal(self):
        inputs, table, scale = operands(2048, 2048, heads=16, kv_heads=16, device="cuda")
        run = torch.compile(TAKEN["causal"].function("cuda", 2048, 2048, table, scale), backend="gradfuse")
        first = run(*inputs)
        assert all(torch.equal(run(*inputs), first) for _ in range(200))
