"""What was wrong or failed on a GPU: index tables, randperm, dynamic rows, factors, cumulative gates."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.nn.attention.flex_attention import flex_attention

from inductor_ext.core.report import collect
from tests.attention.case import Case, relative_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_of_indices_by_pair(dtype):
    """Graphormer: the shortest-path distance of every pair of nodes looks up a bias."""
    spd = torch.randint(0, 512, (2, 96, 96), device="cuda")
    mod = lambda t: lambda s, b, h, q, k: s + t["t"][spd[b, q, k], h]  # noqa: E731
    Case("spd", {"t": (512, 4)}, mod, mod, heads=4, length=96, dim=32, dtype=dtype).check("cuda", seeds=4)


def step(function, *inputs):
    leaves = [x for x in inputs if x.is_floating_point() and x.requires_grad]

    def run():
        out = function(*inputs)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    return run


def codes(function, *inputs, dynamic=None):
    """The results of a step and the code of its kernels."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="gradfuse", dynamic=dynamic)
    results, code = run_and_get_code(step(compiled, *inputs))
    return results, "\n".join(code)


def exact(function, *inputs):
    wide = [x.detach().double().requires_grad_() if x.is_floating_point() and x.requires_grad else x for x in inputs]
    return step(function, *wide)()


def test_a_random_permutation_that_is_undone():
    """Made outside of the region; inside, a pattern of stock's on torch.randperm raises under any backend (see below)."""
    x, p = torch.randn(1000, 8, device="cuda", requires_grad=True), torch.randperm(1000, device="cuda")

    def function(x, p):
        y = x[p]
        return torch.empty_like(y).index_copy(0, p, y) * 2

    out = torch.compile(function, backend="gradfuse")(x, p)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out, x * 2) and torch.equal(grad, torch.full_like(x, 2))


@pytest.mark.parametrize("part", [1000, 300])
def test_a_part_of_a_random_permutation(part):
    def function(x):
        p = torch.randperm(1000, device="cuda")[:part]
        y = x[p]
        return torch.zeros_like(x).index_copy(0, p, y).sum(0) - y.sum(0) + y.sum()

    x = torch.randn(1000, 8, device="cuda", requires_grad=True)
    try:
        torch.compile(function, backend="inductor")(x).sum().backward()
    except Exception as error:
        # Stock's pattern for randperm cannot take a whole one: we can do no better, it matches before and after our passes.
        with pytest.raises(type(error), match="slice_shape"):
            torch.compile(function, backend="gradfuse")(x).sum().backward()
        assert part == 1000 and "slice_shape" in str(error)
        return
    torch._dynamo.reset()
    out = torch.compile(function, backend="gradfuse")(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    rows = grad.norm(dim=1)
    assert int((rows > 0).sum()) == part and torch.allclose(rows[rows > 0], rows.max())


def test_rows_of_a_dynamic_number_need_no_atomics():
    def function(x, g):
        return x[g.argsort() // 4]

    inputs = torch.randn(500, 64, device="cuda", requires_grad=True), torch.randn(2000, device="cuda")
    results, code = codes(function, *inputs, dynamic=True)
    assert "atomic_add(" not in code
    for got, want in zip(results, exact(function, *inputs), strict=True):
        assert relative_error(got, want) < 1e-6


def test_composed_permutations_need_no_atomics():
    def function(x, a, b):
        return x[a.argsort()[b.argsort()].flip(0).roll(3)]

    inputs = torch.randn(500, 64, device="cuda", requires_grad=True), *torch.randn(2, 500, device="cuda")
    results, code = codes(function, *inputs)
    assert "atomic_add(" not in code
    for got, want in zip(results, exact(function, *inputs), strict=True):
        assert relative_error(got, want) < 1e-6


def test_index_add_with_a_factor_is_rounded_once():
    b, i = torch.randn(4096, 9, device="cuda").bfloat16(), torch.randint(0, 9, (300,), device="cuda")
    s = torch.randn(4096, 300, device="cuda").bfloat16()
    got = torch.compile(lambda b, i, s: b.index_add(1, i, s, alpha=-0.5), backend="gradfuse")(b, i, s)
    want = b.double().index_add(1, i, s.double(), alpha=-0.5)
    assert relative_error(got, want) <= 1.2 * relative_error(want.bfloat16(), want)


def test_an_index_that_was_rounded_is_no_permutation():
    def function(x, key):
        p = key.argsort().to(torch.bfloat16).to(torch.int64).clamp(max=999)
        return x[p] * 1.0

    x, key = torch.randn(1000, 8, device="cuda", requires_grad=True), torch.randn(1000, device="cuda")
    with collect() as report:
        got = step(torch.compile(function, backend="gradfuse"), x, key)()
    assert not any(d.path in ("gather", "store") for d in report.decisions)
    # Inductor may leave out the rounding inside one kernel; then stock's results say what that gives.
    torch._dynamo.reset()
    stock = step(torch.compile(function, backend="inductor"), x, key)()
    for g, w in zip(got, stock, strict=True):
        assert relative_error(g, w) < 1e-5


def test_a_cumulative_gate_at_the_query_and_at_the_key():
    """The Forgetting Transformer: the bias is a difference of cumulative log-gates."""

    def scores(gate):
        c = torch.nn.functional.logsigmoid(gate.float()).cumsum(-1)
        return lambda s, b, h, q, k: s + (c[b, h, q] - c[b, h, k])

    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(4):
        q, k, v = (torch.randn(2, 4, 512, 64, generator=generator).cuda().bfloat16().requires_grad_() for _ in range(3))
        gate = torch.randn(2, 4, 512, generator=generator).cuda().bfloat16().requires_grad_()
        grad = torch.randn(2, 4, 512, 64, generator=generator).cuda().bfloat16()
        compiled = torch.compile(lambda q, k, v, g: flex_attention(q, k, v, score_mod=scores(g)), backend="gradfuse")
        got = torch.autograd.grad(compiled(q, k, v, gate), gate, grad)[0]

        def dense(work, operand, q=q, k=k, v=v, gate=gate, grad=grad):
            wide = gate.detach().to(work).requires_grad_()
            c = torch.nn.functional.logsigmoid(wide).cumsum(-1)
            raw = q.detach().to(work) @ k.detach().to(work).mT / 8
            s = raw + (c[..., :, None] - c[..., None, :])
            p = torch.softmax(s.detach(), -1)
            out = operand(p) @ v.detach().to(work)
            delta = (operand(out) * grad.to(work)).sum(-1, keepdim=True)
            ds = p * (grad.to(work) @ v.detach().to(work).mT - delta)
            return torch.autograd.grad(s, wide, ds)[0]

        want = dense(torch.float64, lambda x: x)
        usual = dense(torch.float32, lambda x: x.bfloat16().float()).bfloat16()
        errors.append((relative_error(got, want), relative_error(usual, want)))
    ours, formula = (sum(e[n] ** 2 for e in errors) ** 0.5 for n in (0, 1))
    assert ours <= 1.2 * formula, (ours, formula)
