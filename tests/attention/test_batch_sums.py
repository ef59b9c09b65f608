"""The gradient of ``t[h, q, k]``, which the batch shares: a kernel of its own sums it over the batch and stores it once."""

import contextlib
import re

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from inductor_ext.attention import batch_sums, dropout
from inductor_ext.core.report import collect
from inductor_ext.core.target import SHARED_MEMORY
from inductor_ext.torch_api.config import inductor_config
from tests.attention.case import Case, relative_error
from tests.support import snapshots
from tests.support.emitted import body, triton_sources
from tests.support.interpreter import DEVICES, INTERPRETED, triton_on_cpu
from tests.support.targets import on_target

OWN = "summed over the batch by programs of its own"
BF16 = torch.bfloat16


@pytest.fixture
def any_size(monkeypatch):
    """Few programs are enough, without a GPU of short tiles."""
    monkeypatch.setattr(batch_sums, "PROGRAMS", 0)
    monkeypatch.setattr(batch_sums, "HEAD_DIMS", range(65))
    if not torch.cuda.is_available():
        monkeypatch.setattr(batch_sums, "TILE", {**batch_sums.TILE, "BLOCK_M": 32, "QUERY_TILES": 2})


def case(name, score_mod, t=(3, 97, 130), frozen=(), u=None, **sizes):
    """A score_mod that also works on grids of positions, with tables t and perhaps u."""
    tables = {"t": t} if u is None else {"t": t, "u": u}
    given = {"batch": 3, "heads": 3, "length": t[-2], "kv_length": t[-1], "dtype": BF16, "frozen": frozen} | sizes
    return Case(name, tables, score_mod, score_mod, **given)


def biased(tables):
    return lambda s, b, h, q, k: s + tables["t"][h, q, k]


CASES = [
    case("bias", biased),
    case("fp16", biased, dtype=torch.float16, dim=40, v_dim=24),
    case("whole_tiles", biased, t=(3, 64, 128), dim=64),
    case("factor", lambda x: lambda s, b, h, q, k: s * x["t"][h, q, k], dim=32),
    case("other_tables", lambda x: lambda s, b, h, q, k: s * x["u"][h] + x["t"][h, q, k], u=(3,)),
    case("two_pairs", lambda x: lambda s, b, h, q, k: s * x["u"][h, q, k] + x["t"][h, q, k], u=(3, 97, 130)),
    case("pair_of_the_batch", lambda x: lambda s, b, h, q, k: s + x["u"][b, h, q, k] + x["t"][h, q, k], u=(3, 3, 97, 130)),
    case("scores", lambda x: lambda s, b, h, q, k: torch.tanh(s * x["t"][h, q, k] / 3) * 3),
    case("hidden", lambda x: lambda s, b, h, q, k: torch.where(k <= q, s + x["t"][h, q, k], float("-inf"))),
    case("diagonal", lambda x: lambda s, b, h, q, k: s + x["u"][h, k - q + 97] + x["t"][h, q, k], u=(3, 300)),
    case("coarse", lambda x: lambda s, b, h, q, k: s + x["u"][h, q // 32, k // 32] + x["t"][h, q, k], u=(3, 8, 8)),
    case(
        "descending_keys",
        lambda x: lambda s, b, h, q, k: s + x["u"][b, h, q, k - q + 127] + x["t"][h, q, k],
        t=(3, 128, 128),
        u=(3, 3, 128, 256),
        dim=32,
    ),
    case("four_dims", lambda x: lambda s, b, h, q, k: s + x["t"][0, h, q, k], t=(1, 3, 97, 130)),
    case("grouped_heads", biased, t=(4, 97, 130), heads=4, kv_heads=2),
    case("transposed", biased, layout="transposed"),
    case("expanded", biased, layout="expanded"),
    case("one_query", biased, t=(3, 1, 130)),
    # The main kernel sums delta itself then, and the kernel of the sums reads it.
    case("one_tile_of_keys", biased, t=(3, 97, 40)),
]


NAMED = {c.name: c for c in CASES}
#: TMA moves its tiles. The rows of most other cases are not aligned.
WHOLE_TILES = NAMED["whole_tiles"]


def scope(device, tma=True):
    return contextlib.nullcontext() if device == "cuda" else triton_on_cpu(tma=tma)


@pytest.mark.breadth(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", CASES, ids=lambda c: c.name)
def test_gradients(given, device, any_size):
    torch._dynamo.reset()
    with scope(device), collect() as report:
        given.check("cuda" if device == "cuda" else "cpu")
    assert how(report).count(OWN) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("option", ["deterministic", "one_pass", "without_tma"])
def test_options(option, device, any_size):
    torch._dynamo.reset()
    options = {"deterministic": True} if option == "deterministic" else None
    kernel = {"kernel_options": {"bwd_ONE_PASS": True}} if option == "one_pass" else {}
    with scope(device, tma=option != "without_tma"), collect() as report:
        WHOLE_TILES.check("cuda" if device == "cuda" else "cpu", options=options, **kernel)
    assert how(report).count(OWN) == 1


def how(report):
    """How the backward of an attention reduces each captured gradient."""
    (found,) = (d for d in report.decisions if d.op == "flex_attention_backward" and d.reductions)
    return [value for _, value in found.reductions]


ELSEWHERE = [
    case("one_batch_element", biased, batch=1),
    case("of_the_batch", lambda x: lambda s, b, h, q, k: s + x["t"][b, q, k]),
    case("padded_rows", biased, t=(3, 97, 136), kv_length=130),
    case("transposed_table", lambda x: lambda s, b, h, q, k: s + x["t"][h, k, q], t=(3, 130, 97), length=97, kv_length=130),
    case("two_reads", lambda x: lambda s, b, h, q, k: s + x["t"][h, q, k] + x["t"][h, q, 0]),
    case("a_mask", biased, mask=lambda b, h, q, k: q >= k, block_size=64),
    case("wide_heads", biased, dim=80),
    case("a_large_batch", biased, t=(1, 33, 72), heads=1, batch=9),
    case("fp32_table", biased, dtypes={"t": torch.float32}),
    case("of_some_queries", lambda x: lambda s, b, h, q, k: s + x["t"][1, h, q, k], t=(2, 3, 97, 130)),
    case("fp32", biased, dtype=torch.float32),
]


@INTERPRETED
@pytest.mark.parametrize("given", ELSEWHERE, ids=lambda c: c.name)
def test_what_it_is_not_for(given, any_size):
    torch._dynamo.reset()
    with triton_on_cpu(tma=True), collect() as report:
        given.check("cpu")
    assert OWN not in how(report)


@INTERPRETED
def test_few_programs_are_not_worthwhile():
    """Three heads of three tiles are nine programs, where an H200 has 132 multiprocessors."""
    torch._dynamo.reset()
    with triton_on_cpu(tma=True), collect() as report:
        NAMED["bias"].check("cpu")
    assert OWN not in how(report)


def kernels(given, tma):
    """The sources of the kernel and of the main kernel of the backward."""
    torch._dynamo.reset()
    inputs, tables = given.make("cpu")
    attend = torch.compile(
        lambda q, k, v, *t: given.function(dict(zip(tables, t, strict=True)), "cpu")(q, k, v), backend="gradfuse"
    )
    sources = triton_sources(attend, *inputs, *tables.values(), tma=tma)
    (own,) = (source for source in sources if "QUERY_TILES" in source)
    (main,) = (source for source in sources if "num_key_programs" in source)
    return own, main


@INTERPRETED
def test_kernel(any_size):
    snapshots.check(__file__, "batch_sums", body(kernels(NAMED["bias"], tma=True)[0]))
    by_tma, loaded = (body(kernels(WHOLE_TILES, tma=tma)[0]) for tma in (True, False))
    assert "tl.make_tensor_descriptor" in by_tma and "tl.make_tensor_descriptor" not in loaded


def shared(attend, *inputs):
    """The gradients of a function of q, k, v and a pair with the kernel, and with additions in memory."""
    for disable in ([], [batch_sums.NAME]):
        torch._dynamo.reset()
        with collect() as report, inductor_config.patch(fallback_random=True):
            torch.manual_seed(5)
            out = torch.compile(attend, backend="gradfuse", fullgraph=True, options={"disable": disable})(*inputs)
            yield torch.autograd.grad(out, inputs)
        assert (OWN in how(report)) == (not disable)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("what", ["dropout", "dropout_of_odd_lengths", "logsumexp"])
def test_with_and_without_the_kernel(what, device, any_size):
    """Dropout draws the same mask in the kernel, and delta has the gradient of the logsumexp."""
    given = NAMED["bias"] if what == "dropout_of_odd_lengths" else WHOLE_TILES
    options = {} if what == "logsumexp" else {"kernel_options": dropout(0.3)}

    def attend(q, k, v, t):
        out = flex_attention(q, k, v, score_mod=biased({"t": t}), return_lse=what == "logsumexp", **options)
        return sum(x.float().square().sum() for x in (out if what == "logsumexp" else [out]))

    inputs, tables = given.make("cuda" if device == "cuda" else "cpu")
    with scope(device):
        own, added = shared(attend, *inputs, tables["t"])
    assert all(relative_error(x, y) < 2e-3 for x, y in zip(own, added, strict=True))


BUILT = [
    case("bias", biased, t=(2, 128, 128), dim=64, heads=2),
    case("factor_of_odd_lengths", NAMED["factor"].score_mod, t=(2, 97, 130), dim=64, heads=2),
    case("two_pairs", NAMED["two_pairs"].score_mod, t=(2, 128, 128), u=(2, 128, 128), dim=64, heads=2),
]


@INTERPRETED
@pytest.mark.breadth(2)
@pytest.mark.parametrize("given", BUILT, ids=lambda c: c.name)
def test_builds_without_spills(given, builder, monkeypatch):
    monkeypatch.setattr(batch_sums, "PROGRAMS", 0)
    for arch in SHARED_MEMORY:
        with on_target(architecture=arch):
            own, main = kernels(given, tma=arch >= 90)
        # Triton 3.6 spills two registers of each there, later ones none.
        spills = 8 if arch == 120 else 0
        builder.build(own, arch, batch_sums.TILE["num_warps"], batch_sums.TILE["num_stages"]).check(spills)
        warps, stages = (int(re.search(rf"{name}=(\d+)", main).group(1)) for name in ("num_warps", "num_stages"))
        # Rows that are not aligned are read one by one, beside a factor of each score: 8 bytes, and 48 with Triton 3.9.
        builder.build(main, arch, warps, stages).check(48 if given.name == "factor_of_odd_lengths" else spills)
