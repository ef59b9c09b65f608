"""The chunkwise form: its formulas in float64, its kernels, and when it is chosen."""

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch

from inductor_ext.core.report import collect
from inductor_ext.mlstm import chunks, configs, lowering
from inductor_ext.mlstm.api import mlstm
from inductor_ext.mlstm.reference import mlstm_reference
from tests.attention.case import relative_error
from tests.support import snapshots
from tests.support.eager_graphs import eager_graphs
from tests.support.emitted import body
from tests.support.interpreter import DEVICES, INTERPRETED, triton_on_cpu
from tests.support.targets import on_target

from .case import Case
from .test_compiled import compiled, emitted


@pytest.fixture
def chunked(monkeypatch):
    """Call it with the number of positions in a chunk; from then on the chunkwise form is used."""
    return lambda chunk: monkeypatch.setattr(chunks, "chunk_size", lambda *_: chunk)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 32, which divide a chunk of 32."""
    monkeypatch.setattr(lowering, "forward_configs", lambda *_: [configs._forward(32, 32, 4, 1)])
    monkeypatch.setattr(lowering, "backward_configs", lambda *_: [configs._backward(32, 32, 32, 32, 4, 1)])


def check(case, device):
    """Compile and check. In the interpreter the scan over chunks, which has tests of its own, is slow."""
    on_gpu = device == "cuda"
    options = {} if on_gpu else {"options": {"disable": ["linear_scan"]}}
    with contextlib.nullcontext() if on_gpu else triton_on_cpu():
        case.check(compiled(case, **options), "cuda" if on_gpu else "cpu", draws=16 if on_gpu else 4)


@pytest.mark.parametrize("eps, norm", itertools.product([0, 1e-2], [True, False]))
@pytest.mark.parametrize("length, chunk", [(97, 32), (128, 32), (97, 1), (33, 64), (40, 13)])
def test_the_formula_in_float64(length, chunk, eps, norm, chunked):
    chunked(chunk)
    case = Case(length=length, eps=eps, norm=norm, dtype=torch.float64)
    errors, _ = case.errors(lambda *operands: case.call(mlstm, *operands))
    assert max(errors.values()) < 1e-11, errors


@pytest.mark.parametrize("shift, forget", itertools.product([-20.0, 20.0], [-20.0, 20.0]))
def test_extreme_gates(shift, forget, chunked):
    """There is no inf and no NaN, and the result is as exact as the problem allows. (Some of its gradients are not: they are 0.)"""
    chunked(32)
    case = Case(length=130, shift=shift, spread=1.0)
    *heads, input_gate, forget_gate, weight, bias = operands = case.operands()
    y = case.call(mlstm, *heads, input_gate, forget_gate + forget, weight, bias)
    assert all(x.isfinite().all() for x in (y, *torch.autograd.grad(y.sum(), operands)))
    exact = [x.detach().double() for x in operands]
    exact[4] += forget
    want = case.call(mlstm_reference, *exact)
    formula = case.call(mlstm_reference, *(x.float() for x in exact))
    assert relative_error(y, want) < max(1e-5, 1.2 * relative_error(formula, want))


@pytest.mark.parametrize("chunk", [0, 8])
def test_closed_input_gates(chunk, chunked):
    """Gates of -inf in all but the first position: their columns weigh nothing, in every chunk."""
    chunked(chunk)
    case = Case(length=30, eps=1e-2, norm_eps=1e-2, dtype=torch.float64)
    got, want = closed_gates(case, lambda *xs: case.call(mlstm, *xs))
    assert all(relative_error(x, y) < 1e-11 for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("chunk", [0, 8])
def test_several_columns_reach_the_maximum(chunk, chunked):
    """The first of them gets what rows pass to their maximum, as from torch's ``max``."""
    chunked(chunk)
    case = Case(length=30, eps=1e-1, norm_eps=1e-2, dtype=torch.float64)
    *heads, input_gate, forget_gate, weight, bias = case.operands()
    with torch.no_grad():
        input_gate.copy_(torch.arange(case.length) // 10)
        forget_gate.fill_(1000)
    operands = [*heads, input_gate, forget_gate, weight, bias]
    got, want = (torch.autograd.grad(case.call(f, *operands).square().sum(), operands) for f in (mlstm, mlstm_reference))
    assert all(relative_error(x, y) < 1e-11 for x, y in zip(got, want, strict=True))


def closed_gates(case, run, device="cpu"):
    """The result and the gradients of ``run`` with most gates closed, and those of the formula in float64."""
    operands = case.operands(device)
    closed = torch.arange(case.length, device=device) % 16 != 0
    with torch.no_grad():
        operands[3].masked_fill_(closed, -torch.inf)
    exact = [x.detach().double().requires_grad_() for x in operands]
    results = []
    for function, given in ((run, operands), (lambda *xs: case.call(mlstm_reference, *xs), exact)):
        y = function(*given)
        results.append([y, *torch.autograd.grad(y.sum(), given)])
    return results


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [0, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_closed_input_gates_in_kernels(dtype, chunk, device, chunked, small_tiles):
    chunked(chunk)
    case = Case(length=70, eps=1e-2, norm_eps=1e-2, dtype=dtype)
    with contextlib.nullcontext() if device == "cuda" else triton_on_cpu():
        run = compiled(case, options={"disable": ["linear_scan"]})
        got, want = closed_gates(case, run, "cuda" if device == "cuda" else "cpu")
    # In bf16 this only shows that there is no NaN and nothing is far off; one draw has no sharper bound (Case.check).
    most = 1e-5 if dtype is torch.float32 else 5e-2
    assert all(relative_error(x, y) < most for x, y in zip(got, want, strict=True))


@pytest.mark.breadth(3)
@pytest.mark.parametrize("device", ["eager", *DEVICES])
@pytest.mark.parametrize("chunk", [0, 32])
def test_no_gate_is_open_yet(chunk, device, chunked, small_tiles):
    """The result of such rows is not a number, as in the formula. Later rows, also of the same tile, do not see this."""
    chunked(chunk)
    case = Case(length=70, heads=1)
    operands = case.operands("cuda" if device == "cuda" else "cpu")
    run = compiled(case, options={"disable": ["linear_scan"]})
    if device == "eager":
        run = lambda *xs: case.call(mlstm, *xs)  # noqa: E731
    with torch.no_grad(), triton_on_cpu() if device == "interpreter" else contextlib.nullcontext():
        operands[3][..., :44] = -torch.inf
        got = run(*operands)
    want = case.call(mlstm_reference, *(x.detach().double() for x in operands))
    assert got[:, :, :44].isnan().all()
    assert relative_error(got[:, :, 44:], want[:, :, 44:]) < 1e-5


CASES = {
    "affine": (Case(), 32),
    "no_norm": (Case(length=70, norm=False, eps=1e-2, layout="transposed"), 32),
    "aligned": (Case(length=128, affine=False), 64),
    "one_chunk": (Case(length=20), 32),
    # In bf16 a state must not be rounded once: the gradient of the query would have twice the error that is allowed.
    "long_memory": (Case(length=256, width=32, value_width=32, heads=1, affine=False, spread=1.0, shift=2.0), 32),
}


#: In bf16 the others need more draws than the interpreter has time for; GPUs have it.
IN_HALF = ["long_memory"] if not torch.cuda.is_available() else list(CASES)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name, dtype", [(name, torch.bfloat16) for name in IN_HALF] + [(name, torch.float32) for name in CASES]
)
def test_kernels(name, dtype, device, chunked, small_tiles):
    case, chunk = CASES[name]
    chunked(chunk)
    check(replace(case, dtype=dtype), device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "width, dtype",
    [(w, dtype) for dtype, widest in chunks.WIDEST.items() for w in (16, 40, 64, 80, 128, 256) if w <= widest],
)
def test_widths(width, dtype, chunked):
    chunked(128)
    case = Case(length=1000, width=width, value_width=width, dtype=dtype, spread=1.0)
    case.check(compiled(case), "cuda")


@pytest.mark.gpu
def test_ten_runs_are_bitwise_equal(chunked):
    chunked(128)
    case = Case(length=1000, width=64, value_width=64, dtype=torch.bfloat16)
    operands, run = case.operands("cuda"), compiled(case)
    results = []
    for _ in range(10):
        y = run(*operands)
        results.append([y, *torch.autograd.grad(y.sum(), operands)])
    assert all(torch.equal(a, b) for other in results for a, b in zip(results[0], other, strict=True))


@pytest.mark.breadth(0)
@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_lengths(device, chunked, small_tiles):
    chunked(32)
    case, on_gpu = Case(heads=1, value_width=16), device == "cuda"
    run = compiled(case, dynamic=True)
    with contextlib.nullcontext() if on_gpu else triton_on_cpu():
        for case.length in (97, 130):
            case.check(run, "cuda" if on_gpu else "cpu")


def test_when_it_is_chosen(monkeypatch):
    query = torch.empty(1, 2, 100, 16)
    assert chunks.chunk_size(query, query, with_states=True) == 100, "a chunk of eager code is not padded"
    with triton_on_cpu():
        assert chunks.chunk_size(query, query, with_states=True) == chunks.CHUNK_IN_KERNELS
        assert chunks.chunk_size(query, query) == 0
        monkeypatch.setattr(chunks, "FEWEST_POSITIONS", 100)
        assert chunks.chunk_size(query, query) == 0
        monkeypatch.setattr(chunks, "FEWEST_ROWS", 200)
        assert chunks.chunk_size(query, query) == chunks.CHUNK_IN_KERNELS
        assert chunks.chunk_size(query[:, :1], query) == 0
        assert chunks.chunk_size(query[:, :, :99], query) == 0
        assert chunks.chunk_size(query, torch.empty(1, 2, 100, 65)) == 0
        narrow, wide = (torch.empty(1, 1, 100, width, dtype=torch.bfloat16) for width in (128, 256))
        assert chunks.chunk_size(narrow, narrow) == 0
        assert chunks.chunk_size(narrow, wide) == chunks.CHUNK_IN_KERNELS, "rows of wide heads take longer"
        wide = torch.empty(1, 2, 100, 256, dtype=torch.bfloat16)
        assert chunks.chunk_size(wide, wide) == chunks.CHUNK_IN_KERNELS
        with on_target(architecture=120):
            assert chunks.chunk_size(wide, wide) == 0
        # float64 has no kernel, and the sums of a state may not fit float16.
        for dtype in (torch.float64, torch.float16):
            assert chunks.chunk_size(query.to(dtype), query.to(dtype)) == 0


def test_when_it_is_chosen_on_a_cpu():
    query, wide = torch.empty(1, 2, 512, 16), torch.empty(1, 2, 512, 129)
    assert chunks.chunk_size(query, query) == chunks.CHUNK
    assert chunks.chunk_size(query[:, :, :511], query) == 0
    assert chunks.chunk_size(query, wide) == 0


@pytest.mark.parametrize("case", [Case(length=600, heads=1), Case(length=600, heads=1, dtype=torch.bfloat16)])
def test_a_long_sequence_on_a_cpu(case):
    with eager_graphs(), collect() as report:
        case.check(compiled(case), draws=4)
    assert "a chunk has 128 positions" in report.decisions[-1].why


@INTERPRETED
def test_emitted_kernels(chunked):
    chunked(128)
    sources = emitted(length=300, affine=False)
    for name, source in zip(("before", "forward", "after", "backward"), sources, strict=True):
        snapshots.check(__file__, f"mlstm_chunks_{name}", body(source))
