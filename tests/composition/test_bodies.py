"""Attention and routed gathers in the bodies of other ops: regions, autograd.Function, cond, loops.

Finding C5 was of this kind: the passes must visit every graph, and the bodies of higher-order ops too. If gradfuse fails,
``alike`` asserts that stock (``backend="aot_eager"``, without code generation) fails too.
"""

import pytest
import torch
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

from . import small
from .model import TOPK, dense_copy


def test_nested_compile_region(device, alike):
    layer = small.make(device=device)
    x, order = small.inputs(device)

    def run(backend):
        @torch.compiler.nested_compile_region
        def region(x, order):
            return layer(x, order)

        def function(x, order):
            return region(region(x, order), order)

        reference = dense_copy(layer, torch.float64)
        grad = small.gradient(x)
        leaf = x.detach().double().requires_grad_()
        want = small.step(lambda x, o: reference(reference(x, o), o), reference, leaf, order, grad.double())
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        small.check_same(small.step(compiled, layer, x, order, grad), want)

    alike(run)


class RoutedByHand(torch.autograd.Function):
    """The gather and the combine, with an explicit backward as in libraries for experts."""

    @staticmethod
    def forward(ctx, rows, order, gain):
        ctx.save_for_backward(rows, order, gain)
        return small.routed(rows, order, gain)

    @staticmethod
    def backward(ctx, grad):
        rows, order, gain = ctx.saved_tensors
        source = order // TOPK
        slope = grad[source] * (1 - torch.tanh(rows[source] * gain) ** 2)
        return torch.zeros_like(rows).index_add(0, source, slope * gain), None, (slope * rows[source]).sum(0)


def test_gathers_in_an_autograd_function(device):
    layer = small.make(device=device)

    def function(x, order):
        y = x + layer.attention(x)
        return RoutedByHand.apply(y.flatten(0, 1), order, layer.gain).view_as(x)

    small.check(layer, torch.compile(function, backend="gradfuse", fullgraph=True), *small.inputs(device))


class Halved(torch.autograd.Function):
    """A Function with attention in its forward. Its backward runs autograd on the formula."""

    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        return _attend(x, bias)

    @staticmethod
    def backward(ctx, grad):
        x, bias = ctx.saved_tensors
        probabilities = torch.softmax(x @ x.mT / 4 + bias[:, _distance(x)], -1)
        slope = probabilities * (grad @ x.mT - (grad * (probabilities @ x)).sum(-1, keepdim=True))
        grad_bias = torch.zeros_like(bias).index_add(1, _distance(x).flatten(), slope.sum(0).flatten(1))
        return (slope @ x + slope.mT @ x) / 4 + probabilities.mT @ grad, grad_bias


def _distance(x):
    length = x.shape[2]
    steps = torch.arange(length, device=x.device)
    return steps[:, None] - steps + length


def _attend(x, bias):
    length = x.shape[2]
    return flex_attention(x, x, x, score_mod=lambda s, b, h, q, k: s + bias[h, q - k + length])


def _dense(x, bias):
    return torch.softmax(x @ x.mT / 4 + bias[:, _distance(x)], -1) @ x


def _leaves(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 24, 16), (2, 48))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_() for s in shapes]


def check_attention(function, device, dense=_dense):
    """Compare ``function(x, bias)`` and its gradients with ``dense`` in float64."""
    leaves, exact = _leaves(device), _leaves(device, torch.float64)
    out, want = function(*leaves), dense(*exact)
    grad = small.gradient(out)
    got, expected = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(want, exact, grad.double())
    names = ("out", "x", "bias")
    small.check_same(dict(zip(names, (out, *got), strict=True)), dict(zip(names, (want, *expected), strict=True)))


def test_attention_in_an_autograd_function(device, alike):
    def run(backend):
        check_attention(torch.compile(lambda x, bias: Halved.apply(x, bias), backend=backend, fullgraph=True), device)

    alike(run)


@pytest.mark.parametrize("taken", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_attention_in_a_branch_of_cond(device, alike, taken):
    def run(backend):
        def function(x, bias):
            return torch.cond(chosen, lambda x, bias: _attend(x, bias), lambda x, bias: x * bias[0, 0], (x, bias))

        chosen = torch.tensor(taken, device=device)
        dense = _dense if taken else lambda x, bias: x * bias[0, 0]
        check_attention(torch.compile(function, backend=backend, fullgraph=True), device, dense)

    alike(run)


def test_gathers_in_a_branch_of_cond(device, alike):
    layer = small.make(device=device)

    def run(backend):
        def function(x, order):
            y = (x + layer.attention(x)).flatten(0, 1)
            branches = (lambda y, o, g: small.routed(y, o, g), lambda y, o, g: y * g)
            return torch.cond(order[0] >= 0, *branches, (y, order, layer.gain)).view_as(x)

        small.check(layer, torch.compile(function, backend=backend, fullgraph=True), *small.inputs(device))

    alike(run)


def test_attention_in_a_while_loop_without_gradients(device, alike):
    def run(backend):
        def function(x, bias):
            start = torch.zeros((), dtype=torch.int64, device=device)
            return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, _attend(x, bias)), (start, x))[1]

        x, bias = _leaves(device)
        with torch.no_grad():
            got = torch.compile(function, backend=backend, fullgraph=True)(x, bias)
            want, exact = (y.double() for y in (x, bias))
            for _ in range(3):
                want = _dense(want, exact)
        small.check_same({"out": got}, {"out": want})

    alike(run)


def test_attention_in_map(device, alike):
    """There is one attention for each leading index."""

    def run(backend):
        def function(x, bias):
            return torch_map(lambda row, bias: _attend(row[None], bias)[0], x, bias)

        check_attention(torch.compile(function, backend=backend, fullgraph=True), device)

    alike(run)


def test_gathers_in_a_scan(device, alike):
    """Every step of a recurrence over a sequence routes its rows."""
    order = torch.randperm(TOPK * 12, generator=torch.Generator().manual_seed(0)).to(device)

    def recurrence(x, gain, loop):
        def combine(carry, row):
            carry = small.routed(carry + row, order, gain)
            return carry, carry.clone()

        return loop(combine, torch.zeros_like(x[0]), x)

    def unrolled(combine, carry, xs):
        rows = []
        for x in xs:
            carry, row = combine(carry, x)
            rows.append(row)
        return carry, torch.stack(rows)

    def run(backend):
        generator = torch.Generator().manual_seed(1)
        exact = [torch.randn(s, generator=generator, dtype=torch.float64).to(device) for s in ((4, 12, 8), (8,))]
        leaves = [x.float().requires_grad_() for x in exact]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        compiled = torch.compile(lambda x, gain: recurrence(x, gain, scan)[1], backend=backend, fullgraph=True)
        out, want = compiled(*leaves), recurrence(*exact, unrolled)[1]
        grad = small.gradient(out)
        got, expected = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(want, exact, grad.double())
        small.check_same(dict(zip("oxg", (out, *got), strict=True)), dict(zip("oxg", (want, *expected), strict=True)))

    alike(run)
