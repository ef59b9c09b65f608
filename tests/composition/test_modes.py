"""The options of torch.compile: modes, CUDA graphs, cpp_wrapper, freezing, autocast and compiled autograd."""

import contextlib
import re

import pytest
import torch
from torch._inductor import config

from . import model as models
from . import small

MODES = ["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]


@pytest.mark.parametrize("mode", [MODES[0], *(pytest.param(m, marks=pytest.mark.slow) for m in MODES[1:])])
def test_every_mode_trains(device, mode):
    """There are three steps, so that CUDA graphs are recorded and replayed if the mode uses them."""
    layer = small.make(device=device)
    function = torch.compile(layer, backend="gradfuse", mode=mode)
    for seed in range(1 if device == "cpu" else 3):
        torch.compiler.cudagraph_mark_step_begin()
        small.check(layer, function, *small.inputs(device, seed=seed))


@pytest.mark.gpu
def test_replays_of_cuda_graphs_are_bitwise_equal_under_deterministic():
    """Finding G5, here with one process: for the same inputs every replay is bitwise equal."""
    model = models.make().cuda()
    tokens = [x.cuda() for x in models.data()]
    function = torch.compile(model, backend="gradfuse", mode="reduce-overhead", options=None)
    with torch.random.fork_rng(devices=[0]):
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            runs = []
            for _ in range(6):
                model.zero_grad()
                torch.compiler.cudagraph_mark_step_begin()
                function(*tokens).backward()
                runs.append(models.gradients(model))
        finally:
            torch.use_deterministic_algorithms(False)
    for later in runs[1:]:
        assert all(torch.equal(later[name], g) for name, g in runs[0].items())
    models.check_gradients(runs[-1], models.reference(model, *tokens)[1])


@pytest.mark.gpu
def test_cuda_graphs_over_changing_lengths():
    """There is one CUDA graph for each length, and an earlier length replays its graph."""
    layer = small.make(device="cuda")
    function = torch.compile(layer, backend="gradfuse", mode="reduce-overhead", dynamic=False)
    for step, length in enumerate((40, 24, 40, 24, 40)):
        torch.compiler.cudagraph_mark_step_begin()
        small.check(layer, function, *small.inputs("cuda", length=length, seed=step))


CPP_WRAPPER = {
    "as configuration": (lambda: config.patch(cpp_wrapper=True), None),
    "as an option": (contextlib.nullcontext, {"cpp_wrapper": True}),
}


@pytest.mark.parametrize("how", CPP_WRAPPER)
def test_cpp_wrapper(generated, how, alike):
    """Finding G3. If stock's cpp_wrapper cannot train the layer with attention by the formula, gradfuse may fail too."""
    patched, options = CPP_WRAPPER[how]
    x, order = small.inputs(generated)
    layer = small.make(device=generated)

    def run(backend):
        with patched():
            small.check(layer, torch.compile(layer, backend=backend, options=options, fullgraph=True), x, order)

    def stocks(_run):
        torch._dynamo.reset()
        layer.attention.dense = True
        try:
            run("inductor")
        except Exception as error:
            return error
        return None

    alike(run, stocks)


def test_freezing_without_gradients(generated, alike):
    """Inference with the parameters as constants of the graph.

    Stock's CPU kernel of torch 2.13 does not accept queries that come directly from a Linear, frozen or not.
    """
    layer = small.make(device=generated).eval()
    x, order = small.inputs(generated)
    want = {"out": small.forward(layer, x, order)}

    def run(backend):
        torch._dynamo.reset()
        with torch.no_grad():
            frozen = torch.compile(layer, backend=backend, options={"freezing": True}, fullgraph=True)
            for _ in range(2):
                small.check_same({"out": frozen(x, order)}, want)

    def stocks(_run):
        try:
            run("inductor")
        except Exception as error:
            return error
        return None

    alike(run, stocks)


def test_training_beside_a_frozen_inference(device):
    """Parameters that are constants of an inference graph are not constants in later training."""
    layer = small.make(device=device)
    x, order = small.inputs(device)
    trained = torch.compile(layer, backend="gradfuse", fullgraph=True)
    with torch.no_grad():
        torch.compile(lambda x: (x @ layer.gain).sin(), backend="gradfuse", options={"freezing": True})(x)
    small.check(layer, trained, x, order)
    with torch.no_grad():
        layer.gain.mul_(2)
    small.check(layer, trained, x, order)


def test_autocast(device):
    """Attention runs in bf16, and gradients are fp32. The bound is the error of the formula in eager autocast."""
    layer = small.make(device=device)
    x, order = small.inputs(device)
    grad = small.gradient(x)
    want = small.exact(layer, x, order, grad)
    emulated = models.dense_copy(layer, torch.float32)

    def autocast(function):
        def call(x, order):
            with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
                return function(x, order)

        return call

    leaf = small.copied(x)
    eager = small.step(autocast(emulated), emulated, leaf, order, grad)
    got = small.step(torch.compile(autocast(layer), backend="gradfuse", fullgraph=True), layer, x, order, grad)
    assert got["attention.bias"].dtype == torch.float32
    models.check_gradients(got, want, tolerance=1e-3, eager=eager)


@pytest.mark.breadth(1)
def test_compiled_autograd(device):
    """The backward of the whole loss is one compiled graph, which contains the backward of gradfuse."""
    model = models.make(("relative",)).to(device)
    tokens = [x.to(device) for x in models.data()]
    _, want = models.reference(model, *tokens)
    loss = torch.compile(model, backend="gradfuse")(*tokens)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="gradfuse")):
        loss.backward()
    models.check_gradients(models.gradients(model), want)


@pytest.mark.breadth(0)
def test_compiled_autograd_of_a_compiled_step(device, alike):
    """Forward and backward are in one compiled function. Stock torch 2.11 cannot trace flex_attention in it."""
    tokens = [x.to(device) for x in models.data()]

    def run(backend):
        model = models.make(("relative",)).to(device)
        _, want = models.reference(model, *tokens)

        def train(tokens, targets):
            loss = model(tokens, targets)
            loss.backward()
            return loss

        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(train, backend=backend)(*tokens)
        models.check_gradients(models.gradients(model), want)

    alike(run)


@pytest.mark.slow
def test_a_graph_break_in_a_score_mods_module(device):
    """There is one graph before the break and one after it, each with an attention."""
    model = models.make(("relative", "bucket")).to(device)
    tokens = [x.to(device) for x in models.data()]
    forward = model.blocks[1].forward

    def broken(x, tokens):
        torch._dynamo.graph_break()
        return forward(x, tokens)

    _, want = models.reference(model, *tokens)
    model.blocks[1].forward = broken
    torch.compile(model, backend="gradfuse")(*tokens).backward()
    models.check_gradients(models.gradients(model), want)


def test_versions_are_supported():
    """The tests are written for these releases."""
    assert (2, 11) <= tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) <= (2, 15)
