"""Scatters and gathers on a GPU: exact, bitwise reproducible where promised, and errors out of bounds as in eager mode."""

import os
import subprocess
import sys

import pytest
import torch

from tests.attention.case import relative_error

from .test_scatters import ELEMENTS, PATHS, TOKENS, WIDTH, embedded, gradients, routing

pytestmark = pytest.mark.gpu


def on_gpu(function, dtype, **options):
    torch.manual_seed(0)
    x, chosen = torch.randn(TOKENS, WIDTH).to(dtype).cuda(), routing().cuda()
    weight = torch.randn(function(x, chosen).shape).to(dtype).float().cuda()
    compiled = torch.compile(function, backend="gradfuse", fullgraph=True, options=options)
    return compiled, x, chosen, weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("function", PATHS, ids=lambda f: f.__name__)
def test_as_exact_as_fp32_rounded_once(function, dtype):
    compiled, x, chosen, weight = on_gpu(function, dtype)
    _, got = gradients(compiled, x, chosen, weight)
    _, want = gradients(function, x.double(), chosen, weight.double())
    _, once = gradients(function, x.float(), chosen, weight)
    assert relative_error(got, want) <= 1.05 * relative_error(once.to(dtype), want) + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("function", [*PATHS, embedded], ids=lambda f: f.__name__)
def test_deterministic_is_bitwise_equal_over_ten_runs(function, dtype):
    compiled, x, chosen, weight = on_gpu(function, dtype, deterministic=True)
    first = gradients(compiled, x, chosen, weight)[1]
    assert all(torch.equal(first, gradients(compiled, x, chosen, weight)[1]) for _ in range(9))
    _, want = gradients(function, x.double(), chosen, weight.double())
    _, once = gradients(function, x.float(), chosen, weight)
    assert relative_error(first, want) <= 1.2 * relative_error(once.to(dtype), want) + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("function", ELEMENTS, ids=lambda f: f.__name__)
def test_deterministic_element_by_element(function, dtype):
    compiled, x, chosen, weight = on_gpu(function, dtype, deterministic=True)
    first = gradients(compiled, x, chosen, weight)
    for _ in range(9):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(compiled, x, chosen, weight), strict=True))
    want, once = gradients(function, x.double(), chosen, weight.double()), gradients(function, x.float(), chosen, weight)
    for mine, exact, rounded in zip(first, want, once, strict=True):
        assert relative_error(mine, exact) <= 1.2 * relative_error(rounded.to(dtype), exact) + 1e-6


@pytest.mark.parametrize("rows", [64, 65, 3000])
def test_large_enough_for_a_kernel(rows):
    """Few rows by matmuls, long runs over many chunks, and many rows: on the path that is chosen because of the size."""
    ids = torch.randint(0, rows, (60000,), device="cuda") * (torch.rand(60000, device="cuda") < 0.5)
    table = torch.randn(rows, 1000, device="cuda").bfloat16()
    grad = torch.randn(60000, 1000, device="cuda")
    compiled = torch.compile(lambda t, i: t[i], backend="gradfuse")
    _, got = gradients(compiled, table, ids, grad)
    want = torch.zeros(rows, 1000, dtype=torch.float64, device="cuda").index_add_(0, ids, grad.bfloat16().double())
    once = torch.zeros(rows, 1000, device="cuda").index_add_(0, ids, grad.bfloat16().float()).bfloat16()
    assert relative_error(got, want) <= 1.05 * relative_error(once, want)
    assert torch.equal(got, gradients(compiled, table, ids, grad)[1])


OUT_OF_BOUNDS = """
import sys, torch, inductor_ext
rows = int(sys.argv[1])
ids = torch.randint(0, rows, (60000,), device="cuda")
ids[777] = int(sys.argv[2])
base = torch.zeros(rows, 1000, device="cuda", dtype=torch.bfloat16)
values = torch.ones(60000, 1000, device="cuda", dtype=torch.bfloat16)
out = torch.compile(lambda b, i, v: b.index_put((i,), v, accumulate=True), backend="gradfuse")(base, ids, values)
torch.cuda.synchronize()
print("last row", float(out[-1].float().mean()))
"""


@pytest.mark.parametrize("index, message", [(0, "index out of bounds"), (-1, "index out of bounds"), (None, "last row")])
@pytest.mark.parametrize("rows", [50, 3000])
def test_out_of_bounds_is_asserted_on_the_device(rows, index, message):
    """index: how far it is beyond the last row or before the first, or None for the last row, as -1."""
    index = -1 if index is None else index + rows if index == 0 else index - rows
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_BOUNDS, str(rows), str(index)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert message in done.stdout + done.stderr
    assert (done.returncode == 0) == (index == -1)
