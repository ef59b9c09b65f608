"""Activation checkpointing, both plain and selective, inside the compiled region and around it."""

import functools

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from inductor_ext.core.report import collect

from . import model as models
from . import small

plain = functools.partial(checkpoint, use_reentrant=False)


def _policy(_context, op, *_args, **_kwargs):
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.higher_order.flex_attention)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective(function, *args):
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("how", [plain, pytest.param(selective, marks=pytest.mark.slow)], ids=["plain", "selective"])
def test_inside_the_compiled_region(device, how):
    """Finding C5: the body of the checkpoint is a separate graph, which no pass visited.

    The decisions must be those without a checkpoint, except in the forward, which is inference if it saves no tensors.
    """
    layer = small.make(device=device)

    def function(x, order):
        return how(layer, x, order)

    decisions = []
    for f in (layer, function):
        torch._dynamo.reset()
        with collect() as report:
            small.check(layer, torch.compile(f, backend="gradfuse", fullgraph=True), *small.inputs(device))
        decisions.append({(d.pass_name, d.op) for d in report.decisions if d.pass_name != "dense_attention"})
    assert decisions[0] <= decisions[1], decisions[0] - decisions[1]


def test_the_gather_alone_inside_the_compiled_region(device):
    layer = small.make(device=device)

    def function(x, order):
        y = x + layer.attention(x)
        return plain(small.routed, y.flatten(0, 1), order, layer.gain).view_as(x)

    small.check(layer, torch.compile(function, backend="gradfuse", fullgraph=True), *small.inputs(device))


def test_around_the_compiled_region(device):
    """The compiled forward runs twice."""
    layer = small.make(device=device)
    function = torch.compile(layer, backend="gradfuse", fullgraph=True)
    small.check(layer, lambda *args: plain(function, *args), *small.inputs(device))


def test_selective_around_the_compiled_region(generated):
    """The policy sees only the calls that generated code makes. If graphs run op by op, it would see more, and loops too."""
    layer = small.make(device=generated)
    function = torch.compile(layer, backend="gradfuse", fullgraph=True)
    small.check(layer, lambda *args: selective(function, *args), *small.inputs(generated))


@pytest.mark.breadth(0)
def test_every_block_of_the_model(device):
    """checkpoint_wrapper is around each block, and torch.compile around the whole model, as trainers do."""
    model = models.make().to(device)
    exact = models.make().to(device)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    tokens = [x.to(device) for x in models.data()]
    _, want = models.reference(exact, *tokens)
    torch.compile(model, backend="gradfuse", fullgraph=True)(*tokens).backward()
    models.check_gradients(models.gradients(model), want)


def test_random_numbers_are_drawn_again_alike(generated):
    """Dropout is recomputed with the same random numbers, so the gradient is that of the output.

    Inductor's random numbers come from a seed that only generated code reads.
    """
    layer = small.make(device=generated)
    x, _ = small.inputs(generated)

    def body(x):
        return torch.nn.functional.dropout(x + layer.attention(x), 0.5)

    def function(x):
        return plain(body, x)

    out = torch.compile(function, backend="gradfuse", fullgraph=True)(x)
    kept = out.detach() != 0
    assert 0.3 < kept.float().mean() < 0.7
    got = torch.autograd.grad(out, (x, layer.attention.bias), torch.ones_like(out))
    exact = models.dense_copy(layer, torch.float64)
    leaf = x.detach().double().requires_grad_()
    want_out = (leaf + exact.attention(leaf)) * kept * 2
    want = torch.autograd.grad(want_out, (leaf, exact.attention.bias), torch.ones_like(want_out))
    names = ("out", "x", "bias")
    small.check_same(dict(zip(names, (out, *got), strict=True)), dict(zip(names, (want_out, *want), strict=True)))
