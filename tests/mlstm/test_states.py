"""The state before the first position and the one after the last: sequences that are cut anywhere."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from inductor_ext.mlstm import MLSTMCell, chunks
from inductor_ext.mlstm.api import mlstm
from tests.attention.case import relative_error
from tests.support.eager_graphs import eager_graphs
from tests.support.interpreter import DEVICES

from .case import Case
from .test_chunks import check, small_tiles  # noqa: F401 (a fixture)
from .test_compiled import compiled


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 32)
    monkeypatch.setattr(chunks, "CHUNK_IN_KERNELS", 32)


@pytest.mark.parametrize("first, last", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("length, eps", itertools.product([1, 31, 97, 128], [0, 1e-2]))
def test_the_formula_in_float64(length, eps, first, last, small_chunks):
    case = Case(length=length, eps=eps, norm_eps=1e-2, first=first, last=last, norm=length != 31, dtype=torch.float64)
    errors, _ = case.errors(lambda *operands: case.call(mlstm, *operands))
    assert max(errors.values()) < 1e-11, errors


@pytest.mark.parametrize("first_max", [-1000.0, -3.0, 3.0, 1000.0])
def test_a_first_state_of_any_size(first_max, small_chunks):
    """It weighs nothing, or is the maximum of some rows, or of all."""
    case = Case(first=True, last=True, first_max=first_max, eps=1e-2, norm_eps=1e-2, spread=1.0, dtype=torch.float64)
    errors, _ = case.errors(lambda *operands: case.call(mlstm, *operands))
    assert max(errors.values()) < 1e-11, errors


def cut(function, at, query, key, value, input_gate, forget_gate, **options):
    """The results of ``mlstm`` if the sequence is cut at some positions."""
    state, results = None, []
    for start, end in itertools.pairwise([0, *at, query.shape[2]]):
        parts = [x[:, :, start:end] for x in (query, key, value, input_gate, forget_gate)]
        y, state = function(*parts, **options, initial_state=state, return_final_state=True)
        results.append(y)
    return torch.cat(results, 2)


@pytest.mark.parametrize("at", [[1], [32], [50, 51], [96]])
def test_a_sequence_that_is_cut(at, small_chunks):
    """Gradients pass from part to part, also through the maxima, because eps is not zero."""
    case = Case(eps=1e-2, dtype=torch.float64)
    errors, _ = case.errors(lambda *operands: case.call(lambda *xs, **options: cut(mlstm, at, *xs, **options), *operands))
    assert max(errors.values()) < 1e-11, errors


def test_a_closed_first_state(small_chunks):
    """A maximum of -inf: the first state weighs nothing, and its gradients are zero."""
    case = Case(first=True, dtype=torch.float64)
    operands = case.operands()
    with torch.no_grad():
        operands[-1].fill_(-torch.inf)
    y = case.call(mlstm, *operands)
    assert relative_error(y, replace(case, first=False).call(mlstm, *operands[:-3])) < 1e-11
    grads = torch.autograd.grad(y.sum(), operands)
    assert all(x.isfinite().all() for x in grads) and all(x.norm() < 1e-12 for x in grads[-3:])


def test_the_states_of_rows_come_first():
    case = Case(norm=False, affine=False, dtype=torch.float64)
    y, (hidden, _, row_max), (matrix, vector, maximum) = mlstm(
        *case.operands(), norm=False, return_states=True, return_final_state=True
    )
    assert torch.equal(y, hidden) and torch.equal(row_max[..., -1], maximum)
    assert matrix.shape == (1, 2, 16, 24) and vector.shape == (1, 2, 16)


def test_a_cell_that_is_called_part_by_part():
    cell, inputs = MLSTMCell(48, 4), [torch.randn(2, 20, 48) for _ in range(3)]
    first, state = cell(*(x[:, :7] for x in inputs), return_final_state=True)
    second = cell(*(x[:, 7:] for x in inputs), initial_state=state)
    assert relative_error(torch.cat([first, second], 1), cell(*inputs)) < 1e-6


def test_no_position():
    operands = Case(length=0, affine=False).operands()
    assert mlstm(*operands).shape == (1, 2, 0, 24)
    with pytest.raises(ValueError, match="at least one position"):
        mlstm(*operands, return_final_state=True)


@pytest.mark.parametrize("wrong", ["shape", "dtype"])
def test_errors(wrong):
    *operands, matrix, vector, maximum = Case(affine=False, first=True).operands()
    state = (matrix, vector, maximum[..., None]) if wrong == "shape" else (matrix, vector.int(), maximum)
    with pytest.raises(ValueError, match="initial_state must"):
        mlstm(*operands, initial_state=state)


CASES = {
    "both": Case(first=True, last=True),
    "first": Case(first=True, affine=False),
    "last": Case(last=True, norm=False, eps=1e-2),
    "one": Case(length=1, first=True, last=True, norm=False),
    "bfloat16": Case(first=True, last=True, dtype=torch.bfloat16, affine=False, spread=1.0),
    "float16": Case(first=True, last=True, dtype=torch.float16, affine=False, spread=1.0, length=20),
    "wide": Case(first=True, last=True, width=80, value_width=80, length=20, heads=1),
}


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", CASES)
def test_graphs_on_a_cpu(name, small_chunks):
    with eager_graphs():
        CASES[name].check(compiled(CASES[name]))


@pytest.mark.breadth(0)
def test_dynamic_lengths(small_chunks):
    """Also one that chunks fill."""
    case = CASES["both"]
    run = compiled(case, dynamic=True)
    with eager_graphs():
        for length in (128, 97):
            replace(case, length=length).check(run)


@pytest.mark.breadth(0)
@pytest.mark.caches
def test_compiled_for_a_cpu():
    """Cold, and then from AOTAutograd's cache."""
    with fresh_cache():
        for where in ("miss", "hit"):
            counters.clear()
            torch._dynamo.reset()
            CASES["both"].check(compiled(CASES["both"]))
            assert counters["aot_autograd"][f"autograd_cache_{where}"] == 1


@pytest.mark.breadth(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in CASES if torch.cuda.is_available() or name != "bfloat16"])
def test_kernels(name, device, small_chunks, small_tiles):  # noqa: F811
    check(CASES[name], device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, width", [(torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 128)])
def test_lengths(dtype, width):
    # With fewer heads the gradient of the first maximum is too few numbers to compare rounding errors by.
    sizes = {"batch": 4, "heads": 4, "width": width, "value_width": width}
    for length in (97, 1000):
        case = Case(length=length, dtype=dtype, spread=1.0, first=True, last=True, **sizes)
        case.check(compiled(case), "cuda")


@pytest.mark.gpu
def test_decoding(small_chunks):
    """One position at a time, without gradients."""
    case = Case(length=40, dtype=torch.float32, affine=False)
    operands = case.operands("cuda")
    with torch.no_grad():
        whole = case.call(mlstm, *operands)
        step = torch.compile(mlstm, backend="gradfuse", fullgraph=True)
        got = case.call(lambda *xs, **options: cut(step, list(range(1, 40)), *xs, **options), *operands)
    assert relative_error(got, whole) < 1e-5
