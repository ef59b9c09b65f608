"""score_mods for which a rewrite was wrong once: dtypes, ranges, in-place operations, gradient modes."""

import contextlib
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from inductor_ext.core import report
from tests.attention.case import Case, relative_error
from tests.support.eager_graphs import eager_graphs
from tests.support.interpreter import INTERPRETED, triton_on_cpu

DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]

HEADS, LENGTH = 2, 24


def _in_place_read(t):
    def score_mod(s, b, h, q, k):
        x = t["t"][h, k // 2] * 1.0
        x.mul_(2.0)
        return s + x

    return score_mod


def _augmented(t):
    def score_mod(s, b, h, q, k):
        x = t["t"][h, k // 2] * 1.0
        y = x
        x += t["t"][h, k // 3]
        return s + x * y

    return score_mod


def _in_place_score(t):
    def score_mod(s, b, h, q, k):
        s = s * 1.0
        s.mul_(t["t"][h, k // 2])
        return s

    return score_mod


def _in_place_relu(t):
    def score_mod(s, b, h, q, k):
        x = t["t"][h, k // 2] * 1.0
        F.relu(x, inplace=True)
        return s + x

    return score_mod


def _in_place_by_position(t):
    def score_mod(s, b, h, q, k):
        x = t["t"][h, k // 2] * 1.0
        F.relu(x, True)
        return s + x

    return score_mod


def _without_gradient(t):
    def score_mod(s, b, h, q, k):
        with torch.no_grad():
            x = t["t"][h, k // 2] * 2
        return s + x * t["u"][h, k // 2]

    return score_mod


def _dense_without_gradient(t):
    return lambda s, b, h, q, k: s + (t["t"][h, k // 2] * 2).detach() * t["u"][h, k // 2]


def _only_without_gradient(t):
    def score_mod(s, b, h, q, k):
        with torch.no_grad():
            x = t["t"][h, k // 2]
        return s + x + t["u"][h, k]

    return score_mod


def _cast_that_is_no_copy(t):
    def score_mod(s, b, h, q, k):
        read = t["t"][h, k] * 1.0
        same = read.to(read.dtype)
        same.mul_(2.0)
        return s + read * t["u"][h, k]

    return score_mod


def _dunder(t):
    def score_mod(s, b, h, q, k):
        x = s * 1
        x.__iadd__(t["t"][h, k])
        return s + x

    return score_mod


def _alias(make):
    def score_mod_of(t):
        def score_mod(s, b, h, q, k):
            x = s + t["t"][h, k]
            same = make(x)
            same.mul_(2)
            return x + same

        return score_mod

    return score_mod_of


def _filled(t):
    def score_mod(s, b, h, q, k):
        x, y = s * 1, s * 1
        x.fill_(t["t"][h, k])
        y.fill_(value=2.0)
        return s * y + x

    return score_mod


def case(name, score_mod, dense=None, tables=None, **options):
    tables = {"t": (HEADS, LENGTH), "u": (HEADS, LENGTH)} if tables is None else tables
    return Case(name, tables, score_mod, dense or score_mod, heads=HEADS, length=LENGTH, **options)


def times(t):
    """Time stamps of 1.7e9 seconds, a few seconds apart."""
    return torch.arange(LENGTH, device=next(iter(t.values())).device) * 3 + 1_700_000_000


def number(t):
    return torch.tensor(200, device=next(iter(t.values())).device)


def small(t):
    """Bytes whose differences wrap."""
    return (torch.arange(LENGTH, device=next(iter(t.values())).device) * 37 % 256).to(torch.uint8)


CASES = [
    case(
        "bool_plus_bool",
        lambda t: lambda s, b, h, q, k: s + t["t"][h, 0] * k + ((q > k) + (k > 5)),
        lambda t: lambda s, b, h, q, k: s + t["t"][h, 0] * k + ((q > k) | (k > 5)),
    ),
    case(
        "bool_plus_bool_and_tables",
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k // 2] + t["u"][h, k // 3] + ((q > k) + (k > 5)),
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k // 2] + t["u"][h, k // 3] + ((q > k) | (k > 5)),
    ),
    case("time_stamps", lambda t: lambda s, b, h, q, k, time=times(t): s + t["t"][h, k // 2] - (time[q] - time[k]) * 0.01),
    case(
        "time_stamps_bare",
        lambda t: lambda s, b, h, q, k, time=times(t): s + t["t"][h, k // 2] + t["u"][h, k] - (time[q] - time[k]) * 0.05,
    ),
    case("bytes_that_wrap", lambda t: lambda s, b, h, q, k, c=small(t): s + t["t"][h, k // 2] + (c[q] - c[k]) * 0.02),
    case(
        "in_place_read",
        _in_place_read,
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k // 2] * 2,
        tables={"t": (HEADS, LENGTH)},
    ),
    case(
        "in_place_score",
        _in_place_score,
        lambda t: lambda s, b, h, q, k: s * t["t"][h, k // 2],
        tables={"t": (HEADS, LENGTH)},
    ),
    case(
        "in_place_relu",
        _in_place_relu,
        lambda t: lambda s, b, h, q, k: s + F.relu(t["t"][h, k // 2]),
        tables={"t": (HEADS, LENGTH)},
    ),
    case(
        "in_place_by_position",
        _in_place_by_position,
        lambda t: lambda s, b, h, q, k: s + F.relu(t["t"][h, k // 2]),
        tables={"t": (HEADS, LENGTH)},
    ),
    case(
        "a_power_of_a_position",
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k] * (-1) ** k,
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k] * (1 - 2 * (k % 2)),
        tables={"t": (HEADS, LENGTH)},
    ),
    case(
        "augmented",
        _augmented,
        lambda t: lambda s, b, h, q, k: s + (t["t"][h, k // 2] + t["t"][h, k // 3]) ** 2,
        tables={"t": (HEADS, LENGTH)},
    ),
    *(
        case(
            f"alias_{name}",
            _alias(make),
            lambda t: lambda s, b, h, q, k: (s + t["t"][h, k]) * 4,
            tables={"t": (HEADS, LENGTH)},
        )
        for name, make in (("pos", lambda x: +x), ("real", torch.real))
    ),
    case("in_place_method", _dunder, lambda t: lambda s, b, h, q, k: 2 * s + t["t"][h, k], tables={"t": (HEADS, LENGTH)}),
    case("filled", _filled, lambda t: lambda s, b, h, q, k: 2 * s + t["t"][h, k], tables={"t": (HEADS, LENGTH)}),
    case("without_gradient", _without_gradient, _dense_without_gradient),
    case(
        "float_beyond_its_integers",
        lambda t: lambda s, b, h, q, k: s + t["t"][h, (k.float() * 16777213 - q.float() * 16777213).long() % LENGTH],
    ),
    case(
        "int32_that_wraps",
        lambda t: lambda s, b, h, q, k: s + t["t"][h, ((k * 300_000_000).long() - (q * 300_000_000).long()) % LENGTH],
        lambda t: (
            lambda s, b, h, q, k: s + t["t"][h, ((k.int() * 300_000_000).long() - (q.int() * 300_000_000).long()) % LENGTH]
        ),
    ),
    case(
        "zeros_like_the_score",
        lambda t: lambda s, b, h, q, k: s + torch.where(q >= k, t["t"][h, q - k], torch.zeros_like(s)),
        lambda t: lambda s, b, h, q, k: s + torch.where(q >= k, t["t"][h, q - k], torch.zeros_like(s)),
    ),
    case(
        "full_like_the_score",
        lambda t: lambda s, b, h, q, k: s + torch.where(q >= k, t["t"][h, q - k], torch.full_like(s, 2.0)),
        lambda t: lambda s, b, h, q, k: s + torch.where(q >= k, t["t"][h, q - k], torch.full_like(s, 2.0)),
    ),
    case(
        "ones_like_a_read",
        lambda t: lambda s, b, h, q, k: s + t["u"][h, q] * k * 0.1 + torch.ones_like(t["t"][h, k]) * t["t"][h, k // 2],
        lambda t: lambda s, b, h, q, k: s + t["u"][h, q] * k * 0.1 + t["t"][h, k // 2],
    ),
    case(
        "ones_like_the_only_read",
        lambda t: lambda s, b, h, q, k: torch.where(q > k, s, torch.ones_like(t["w"][q * k % 8, h])),
        lambda t: lambda s, b, h, q, k: torch.where(q > k, s, 1.0) + 0 * t["w"][q * k % 8, h],
        tables={"w": (8, HEADS)},
    ),
    case(
        "embedding",
        lambda t: lambda s, b, h, q, k: s + F.embedding((q - k).clamp(0, 7), t["w"])[h],
        lambda t: lambda s, b, h, q, k: s + t["w"][(q - k).clamp(0, 7), h],
        tables={"w": (8, HEADS)},
    ),
    case(
        "dot_of_two_captured_rows",
        lambda t: lambda s, b, h, q, k: s + torch.dot(t["a"][b, h, q], t["c"][b, 0, k]),
        lambda t: lambda s, b, h, q, k: s + torch.einsum("bhqd,bkd->bhqk", t["a"], t["c"][:, 0]),
        tables={"a": (2, HEADS, LENGTH, 5), "c": (2, 1, LENGTH, 5)},
    ),
    case(
        "sum_of_a_product_of_rows",
        lambda t: lambda s, b, h, q, k: s + (t["a"][b, h, q] * t["c"][b, h, k]).sum(-1) * 0.5,
        lambda t: lambda s, b, h, q, k: s + torch.einsum("bhqd,bhkd->bhqk", t["a"], t["c"]) * 0.5,
        tables={"a": (2, HEADS, LENGTH, 5), "c": (2, HEADS, LENGTH, 5)},
    ),
    case(
        "sum_of_a_row",
        lambda t: lambda s, b, h, q, k: s + t["a"][h, k].sum() + (t["a"][h, q] * t["t"][h, q]).sum() * k * 0.1,
        lambda t: lambda s, b, h, q, k: s + t["a"][h, k].sum(-1) + (t["a"].sum(-1) * t["t"])[h, q] * k * 0.1,
        tables={"a": (HEADS, LENGTH, 5), "t": (HEADS, LENGTH)},
    ),
    case(
        "all_that_is_learned_is_detached",
        lambda t: lambda s, b, h, q, k: s + torch.where(q > k, t["t"][h, k // 2], s * 0.5).detach() + t["u"][h, q * 0 + k],
        lambda t: lambda s, b, h, q, k: s + torch.where(q > k, t["t"][h, k // 2], s * 0.5).detach() + t["u"][h, k],
    ),
    case(
        "a_cast_that_is_no_copy",
        _cast_that_is_no_copy,
        lambda t: lambda s, b, h, q, k: s + 2 * t["t"][h, k] * t["u"][h, k],
    ),
    case(
        "narrow_casts_of_a_distance",
        lambda t: lambda s, b, h, q, k: s + t["t"][h, (k - q).to(torch.uint8).long() % LENGTH],
    ),
    case(
        "differences_of_narrow_positions",
        lambda t: (
            lambda s, b, h, q, k: (
                s + t["t"][h, ((k * 37).to(torch.int8) - (q * 11).to(torch.int8)).long() % LENGTH] * t["u"][h, k]
            )
        ),
    ),
    case(
        "narrow_casts_of_a_row",
        lambda t: lambda s, b, h, q, k: s * t["t"][h, (q * 37).to(torch.int8).long() % 7] + t["u"][h, k],
    ),
    case(
        "only_under_no_grad",
        _only_without_gradient,
        lambda t: lambda s, b, h, q, k: s + t["t"][h, k // 2].detach() + t["u"][h, k],
    ),
    case(
        "float64_and_float32_tables",
        lambda t: lambda s, b, h, q, k: s * t["t"][h, k] * (t["t"][h, k] + t["u"][h, k]),
        dtypes={"t": torch.float32},
        dtype=torch.float64,
    ),
    case(
        "operators_that_end_with_an_underscore",
        lambda t: lambda s, b, h, q, k: s + torch.where((q > 3) & (k < 9) | (q == k), t["t"][h, k // 2], t["u"][h, k]),
    ),
    case(
        "int64_number_beside_bytes",
        lambda t: lambda s, b, h, q, k, c=small(t), n=number(t): s + t["t"][h, ((c[k] + n) // 7) % LENGTH] * 1.0,
        lambda t: lambda s, b, h, q, k, c=small(t): s + t["t"][h, ((c[k].long() + 200) // 7) % LENGTH],
    ),
]


@pytest.mark.breadth(3)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_graphs_match_float64(case):
    with eager_graphs():
        case.check("cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_a_number_a_head_of_one_query_and_one_key(device):
    """A gradient that is added to starts at zero, also where there is only one score to add."""
    query, key, value = (torch.randn(2, HEADS, 1, 16, device=device) for _ in range(3))
    query.requires_grad_()
    table = torch.randn(2, HEADS, device=device, requires_grad=True)

    def attention(table):
        aux = AuxRequest(lse=True)
        return flex_attention(query, key, value, score_mod=lambda s, b, h, q, k: s + table[b, h] * s, return_aux=aux)

    torch._dynamo.reset()
    with triton_on_cpu() if device == "cpu" else contextlib.nullcontext(), report.collect() as seen:
        _, aux = torch.compile(attention, backend="gradfuse", fullgraph=True)(table)
        (got,) = torch.autograd.grad(aux.lse.sum(), table)
    want = (query.double() * key.double()).sum((-1, -2)) / 4
    assert relative_error(got, want) < 1e-5
    (backward,) = (d.why for d in seen.decisions if d.pass_name == "flex_attention_backward")
    assert "summed in registers" in backward and "one writer" not in backward


@pytest.mark.breadth(1)
@pytest.mark.parametrize("case", [c for c in CASES if "narrow" in c.name], ids=lambda c: c.name)
def test_generated_code_matches_float64(case):
    """Inductor follows positions through casts in the integers, so an expression that leaves the kernel says where it wraps."""
    case.check("cpu")


def test_an_element_of_a_computed_row_is_refused_by_name():
    """Stock refuses it too; read as an element of a table it would be another one."""
    table = torch.randn(HEADS, LENGTH, requires_grad=True)
    query = torch.randn(2, HEADS, LENGTH, 16, requires_grad=True)
    attention = torch.compile(
        lambda q: flex_attention(q, q, q, score_mod=lambda s, b, h, q, k: s + (table[h] * 2)[k]), backend="gradfuse"
    )
    with eager_graphs(), pytest.raises(Exception, match=r"Index the captured tensor with one scalar"):
        attention(query).sum().backward()


#: On a GPU Inductor computes an index in 64 bits where int32 would have wrapped, and may fuse a product into a sum, which then
#: rounds once: what such programs read there is not what they read eagerly, with any backend.
ELSEWHERE_ONLY = ("int32_that_wraps", "float_beyond_its_integers")
ON_A_GPU = [c for c in CASES if c.name not in ELSEWHERE_ONLY]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", ON_A_GPU, ids=lambda c: c.name)
def test_kernels_match_float64(case, dtype):
    dataclasses.replace(case, dtype=dtype).check("cuda", seeds=16 if dtype.itemsize == 2 else 1)
