"""The op in eager mode: the forward, the seven gradients, the states, and the operands that it refuses."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from inductor_ext.mlstm import MLSTMCell, chunks
from inductor_ext.mlstm.api import mlstm
from inductor_ext.mlstm.reference import mlstm_reference
from tests.attention.case import relative_error

from .case import Case
from .plain_forms import repeated


# With a single key, h is a multiple of its value, and a norm keeps only the sign of the factor. So the gradients of the
# query, the key and the gates are 0 except for rounding, and have no relative error. Length 1 is only tested without a norm.
@pytest.mark.parametrize(
    "length, norm, eps, norm_eps",
    [c for c in itertools.product([1, 8, 97, 256], [True, False], [0, 1e-2], [0, 1e-6]) if c[0] > 1 or not c[1]],
)
@pytest.mark.breadth(8)
def test_against_float64(length, norm, eps, norm_eps):
    case = Case(length=length, norm=norm, eps=eps, norm_eps=norm_eps)
    case.check(lambda *operands: case.call(mlstm, *operands))


@pytest.mark.breadth(6)
@pytest.mark.parametrize("eps, norm_eps, norm", itertools.product([0, 1e-6, 1e-2], [0, 1e-6], [True, False]))
def test_the_formula_of_the_gradient_in_float64(eps, norm_eps, norm):
    case = Case(length=150, eps=eps, norm_eps=norm_eps, norm=norm, dtype=torch.float64)
    errors, _ = case.errors(lambda *operands: case.call(mlstm, *operands))
    assert max(errors.values()) < 1e-11, errors


@pytest.mark.breadth(5)
@pytest.mark.parametrize("shift", [-20.0, 20.0])
@pytest.mark.parametrize("forget", [-20.0, 20.0])
@pytest.mark.parametrize("norm", [True, False])
def test_extreme_gates(shift, forget, norm):
    """There is no inf and no NaN, and the result is as exact as the problem allows."""
    case = Case(length=130, shift=shift, norm=norm, spread=1.0)

    def run(query, key, value, input_gate, forget_gate, *affine):
        return case.call(mlstm, query, key, value, input_gate, forget_gate + forget, *affine)

    operands = case.operands()
    y = run(*operands)
    grads = torch.autograd.grad(y, operands, torch.ones_like(y))
    assert all(x.isfinite().all() for x in (y, *grads))
    exact = [x.detach().double() for x in operands]
    exact[4] = exact[4] + forget
    formula = [x.float() for x in exact]
    want = case.call(mlstm_reference, *exact)
    assert relative_error(y, want) < max(1e-5, 1.2 * relative_error(case.call(mlstm_reference, *formula), want))


def test_both_branches_of_the_normaliser():
    """Rows whose sum of C exceeds exp(-m), and rows where it does not, both occur in the cases of this file."""
    query, key, _, input_gate, forget_gate, *_ = Case().operands()
    _, (_, normaliser, row_max) = mlstm(query, key, key, input_gate, forget_gate, eps=0.0, return_states=True)
    floor = torch.isclose(normaliser, torch.exp(-row_max))
    assert 0.1 < floor.float().mean() < 0.9


def test_cell_without_the_normalisers_derivative_then_norm_is_exact_without_eps():
    """Both eps are 0. The norm does not depend on the scale of h, so a fixed normaliser changes no gradient."""
    case = Case(length=64, eps=0.0, norm_eps=0.0, affine=False, dtype=torch.float64)

    def held(query, key, value, input_gate, forget_gate, hold):
        decay = F.logsigmoid(forget_gate).cumsum(-1)
        exponents = decay[..., :, None] - decay[..., None, :] + input_gate[..., None, :]
        exponents = exponents.masked_fill(~torch.ones(64, 64, dtype=torch.bool).tril(), -torch.inf)
        row_max = exponents.amax(-1, keepdim=True)
        combined = query @ key.mT * case.width**-0.5 * torch.exp(exponents - row_max)
        normaliser = torch.maximum(combined.sum(-1, keepdim=True).abs(), torch.exp(-row_max))
        return F.layer_norm(combined @ value / (normaliser.detach() if hold else normaliser), (case.value_width,), eps=0.0)

    operands = case.operands()
    grad = torch.randn(1, 2, 64, case.value_width, dtype=torch.float64)
    exact, fixed = (torch.autograd.grad(held(*operands, hold), operands, grad) for hold in (False, True))
    ours = torch.autograd.grad(case.call(mlstm, *operands), operands, grad)
    for a, b, c in zip(exact, fixed, ours, strict=True):
        assert relative_error(a, b) < 1e-10 and relative_error(a, c) < 1e-10


def test_gradcheck():
    case = Case(length=5, width=3, value_width=4, batch=1, heads=2, eps=1e-2, norm_eps=1e-3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *operands: case.call(mlstm, *operands), case.operands())


@pytest.mark.parametrize("states", [False, True])
def test_opcheck(states, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 4)
    case = Case(length=9)
    operands = case.operands()
    first = [torch.randn(1, 2, 16 * 25), torch.randn(1, 2, dtype=torch.float64)] if states else [None, None]
    operands += [x if x is None else x.requires_grad_() for x in first]
    arguments = (*operands, True, 1e-6, 1e-6, 0.25, states)
    torch.library.opcheck(torch.ops.gradfuse.mlstm.default, arguments)


def test_states():
    case = Case(length=40)
    operands = case.operands()
    query, key, value, input_gate, forget_gate, weight, bias = operands
    y, (hidden, normaliser, row_max) = mlstm(
        query, key, value, input_gate, forget_gate, norm_weight=weight, norm_bias=bias, return_states=True
    )
    assert relative_error(y, case.call(mlstm, *operands)) < 1e-6
    assert relative_error(hidden, mlstm_reference(query, key, value, input_gate, forget_gate, norm=False)) < 1e-5
    decay = F.logsigmoid(forget_gate).cumsum(-1)
    exponents = decay[..., :, None] - decay[..., None, :] + input_gate[..., None, :]
    want = exponents.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -torch.inf).amax(-1)
    assert relative_error(row_max, want) < 1e-5
    assert (normaliser >= torch.exp(-row_max) * (1 - 1e-5)).all()
    grads = torch.autograd.grad(y.sum() + hidden.square().sum(), operands)
    assert all(g.isfinite().all() for g in grads)


def test_memory_is_linear_in_the_length():
    """No tensor of the eager op holds S x S numbers."""
    case = Case(length=1500, batch=1, heads=1)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    operands = case.operands()
    with Sizes():
        y = case.call(mlstm, *operands)
        y.sum().backward()
    assert max(sizes) <= 128 * 1500


def test_the_module_is_xlstms():
    """The module is equal to gate projections of q, k and v, followed by the published parallel form."""
    torch.manual_seed(0)
    cell = MLSTMCell(48, 4)
    for parameter in cell.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    q, k, v = (torch.randn(2, 33, 48) for _ in range(3))
    joined = torch.cat([q, k, v], -1)
    gates = (F.linear(joined, g.weight, g.bias).transpose(1, 2) for g in (cell.input_gate, cell.forget_gate))
    heads = (x.view(2, 33, 4, 12).transpose(1, 2) for x in (q, k, v))
    want = repeated(*heads, *gates, cell.norm_weight)
    assert relative_error(cell(q, k, v), want) < 1e-5
    with pytest.raises(ValueError, match="does not divide"):
        MLSTMCell(50, 4)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(key=torch.randn(1, 2, 5, 8)), "query and key must be"),
        (dict(input_gate=torch.randn(1, 2, 6)), "input_gate must be"),
        (dict(value=torch.randn(1, 2, 5, 4).bfloat16()), "one floating dtype"),
        (dict(norm_weight=torch.randn(3)), "N \\* Dv = 8 numbers"),
        (dict(norm=False, norm_bias=torch.randn(8)), "has no meaning"),
        (dict(scale=0.0), "scale must be positive"),
    ],
)
def test_refusals(change, message):
    operands = dict(
        query=torch.randn(1, 2, 5, 6),
        key=torch.randn(1, 2, 5, 6),
        value=torch.randn(1, 2, 5, 4),
        input_gate=torch.randn(1, 2, 5),
        forget_gate=torch.randn(1, 2, 5),
    )
    with pytest.raises(ValueError, match=message):
        mlstm(**{**operands, **change})
