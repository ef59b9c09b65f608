"""Uses of autograd with a compiled model: parts of the gradient, several backwards, hooks, odd layouts, float64."""

import copy

import pytest
import torch

from . import model as models
from . import small
from .conftest import stock_error


def compiled(layer, **options):
    return torch.compile(layer, backend="gradfuse", fullgraph=True, **options)


@pytest.mark.parametrize("kind", ["relative", *(pytest.param(k, marks=pytest.mark.slow) for k in ("bucket", "pair"))])
def test_one_layer(device, kind):
    layer = small.make(kind, device)
    small.check(layer, compiled(layer), *small.inputs(device))


def test_the_model(device):
    model = models.make().to(device)
    models.check_step(model, compiled(model), *(x.to(device) for x in models.data()))


@pytest.mark.breadth(0)
def test_the_model_in_half_precision(device):
    model = models.make().to(device, torch.bfloat16)
    batches = [tuple(x.to(device) for x in models.data(seed)) for seed in range(8)]
    models.check_half(model, compiled(model), batches, tolerance=1e-3)


@pytest.mark.breadth(1)
def test_float64_is_exact_to_float64s_precision(device):
    """Finding C10: the logsumexp was kept in float32, so gradients were right to 1e-7 only."""
    layer = small.make(device=device, dtype=torch.float64)
    if device == "cuda":
        # Neither stock nor gradfuse has a kernel for float64 on a GPU, and both refuse it.
        for backend in ("inductor", "gradfuse"):
            torch._dynamo.reset()
            with pytest.raises(Exception) as refused:
                torch.compile(layer, backend=backend)(*small.inputs(device, torch.float64))
            assert "Inductor" in type(refused.value).__name__ or "Lowering" in str(refused.value), refused.value
        return
    small.check(layer, compiled(layer), *small.inputs(device, torch.float64), tolerance=1e-11)


def test_gradients_accumulate_over_steps(device):
    layer = small.make(device=device)
    x, order = small.inputs(device)
    grad = small.gradient(x)
    want = {n: 2 * g for n, g in small.exact(layer, x, order, grad).items() if n not in ("out", "x")}
    function = compiled(layer)
    for _ in range(2):
        function(x, order).backward(grad)
    small.check_same(models.gradients(layer), want)


def test_retain_graph(device):
    """One forward has two backwards. By default Inductor donates buffers to the first, and with gradfuse it does so too."""
    layer = small.make(device=device)
    x, order = small.inputs(device)
    grad = small.gradient(x)
    want = {n: 2 * g for n, g in small.exact(layer, x, order, grad).items() if n not in ("out", "x")}
    with torch._functorch.config.patch(donated_buffer=False):
        out = compiled(layer)(x, order)
        out.backward(grad, retain_graph=True)
        out.backward(grad)
    small.check_same(models.gradients(layer), want)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(grad)


def test_the_gradient_of_one_thing_alone(device):
    layer = small.make(device=device)
    x, order = small.inputs(device)
    grad, function = small.gradient(x), compiled(layer)
    want = small.exact(layer, x, order, grad)
    for name in ("x", "attention.bias", "attention.query.weight"):
        leaf = x if name == "x" else layer.get_parameter(name)
        (got,) = torch.autograd.grad(function(x, order), leaf, grad)
        small.check_same({name: got}, {name: want[name]})


def test_only_the_bias_needs_a_gradient(device):
    """All other parameters and the input are frozen."""
    layer = small.make(device=device).requires_grad_(False)
    layer.attention.bias.requires_grad_(True)
    x, order = small.inputs(device)
    x.requires_grad_(False)
    grad = small.gradient(x)
    compiled(layer)(x, order).backward(grad)
    assert [n for n, p in layer.named_parameters() if p.grad is not None] == ["attention.bias"]
    want = small.exact(layer, x, order, grad)["attention.bias"]
    small.check_same({"bias": layer.attention.bias.grad}, {"bias": want})


def test_hooks_see_the_gradient_and_may_change_it(device):
    layer = small.make(device=device)
    x, order = small.inputs(device)
    grad = small.gradient(x)
    want = small.exact(layer, x, order, grad)
    seen = {}
    x.register_hook(lambda g: seen.__setitem__("x", g.clone()))
    layer.attention.bias.register_hook(lambda g: 3 * g)
    layer.attention.temperature.register_post_accumulate_grad_hook(lambda p: seen.__setitem__("temperature", p.grad.clone()))
    out = compiled(layer)(x, order)
    out.register_hook(lambda g: seen.__setitem__("above", g.clone()))
    out.backward(grad)
    assert torch.equal(seen["above"], grad)
    got = {"x": seen["x"], "temperature": seen["temperature"], "bias": layer.attention.bias.grad}
    names = {"x": "x", "temperature": "attention.temperature", "bias": "attention.bias"}
    small.check_same(got, {n: want[names[n]] * (3 if n == "bias" else 1) for n in got})


def _transposed(grad):
    return grad.transpose(0, 2).contiguous().transpose(0, 2)


def _strided(grad):
    return torch.stack([grad, torch.full_like(grad, 1e6)], -1)[..., 0]


def _expanded(grad):
    return grad[:, :1, :1].expand(grad.shape)


def _one_value(grad):
    return grad.flatten()[0].expand(grad.shape)


@pytest.mark.breadth(0)
def test_incoming_gradients_of_any_layout(device):
    """The backward was compiled for a contiguous gradient of the output."""
    layer = small.make(device=device)
    x, order = small.inputs(device)
    function = compiled(layer)
    small.step(function, layer, x, order, small.gradient(x))
    for layout in (_transposed, _strided, _expanded, _one_value):
        grad = layout(small.gradient(x))
        assert not grad.is_contiguous()
        small.check_same(small.step(function, layer, x, order, grad), small.exact(layer, x, order, grad))


@pytest.mark.breadth(0)
def test_frozen_then_unfrozen_parameters(device, alike):
    """Finding G2: after a step with frozen parameters their gradient was wrong on CUDA, with torch 2.11.

    In 2.11 Dynamo does not check a parameter's ``requires_grad`` again while the module's dicts are unchanged, so it
    calls no backend for the second step. Eager code compiled by Dynamo gets no gradient either.
    """

    def run(backend, dense=False):
        model = models.make(("relative", "relative")).to(device)
        tokens = [x.to(device) for x in models.data()]
        for block in model.blocks:
            block.attention.dense = dense
        function = torch.compile(model, backend=backend, fullgraph=True)
        parameters = [p for block in model.blocks for p in (block.attention.temperature, block.attention.bias)]
        for p in parameters:
            p.requires_grad_(False)
        function(*tokens).backward()
        assert all(p.grad is None for p in parameters)
        for p in parameters:
            p.requires_grad_(True)
        models.check_step(model, function, *tokens)

    alike(run, lambda _: stock_error(lambda backend: run(backend, dense=True)))


@pytest.mark.breadth(0)
def test_frozen_then_unfrozen_parameters_that_dynamo_guards(device):
    """As the last test, but the guard is on in every release, so gradfuse must be right."""
    with torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=False):
        layer = small.make(device=device)
        parameters = [layer.attention.temperature, layer.attention.bias]
        function = compiled(layer)
        x, order = small.inputs(device)
        for needed in (False, True):
            for p in parameters:
                p.requires_grad_(needed)
            small.check(layer, function, x, order)


@pytest.mark.slow
def test_evaluation_between_training_steps(device):
    """Calls under no_grad and inference_mode compile their own graphs and do not change training."""
    layer = small.make(device=device)
    x, order = small.inputs(device)
    function = compiled(layer)
    want = small.exact(layer, x, order, small.gradient(x))["out"]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out = function(x, order)
        assert not out.requires_grad
        small.check_same({"out": out}, {"out": want})
    small.check(layer, function, x, order)


def test_second_derivatives_are_refused_not_wrong(device):
    """AOTAutograd does not differentiate twice, with stock or with gradfuse. It must raise an error."""
    layer = small.make(device=device)
    x, order = small.inputs(device)
    # If a buffer is donated to the first backward, the error is raised there.
    with pytest.raises(RuntimeError, match=r"double backward|donated buffers"):
        (first,) = torch.autograd.grad(compiled(layer)(x, order).square().sum(), x, create_graph=True)
        torch.autograd.grad(first.sum(), x)


@pytest.mark.slow
def test_deepcopy_trains_on_its_own(device):
    layer = small.make(device=device)
    x, order = small.inputs(device)
    function = compiled(layer)
    small.check(layer, function, x, order)
    other = copy.deepcopy(function)
    with torch.no_grad():
        other.attention.bias.mul_(2)
    small.check(other._orig_mod, other, x, order)
    small.check(layer, function, x, order)


@pytest.mark.breadth(0)
def test_module_compile_in_place_and_state(device, tmp_path):
    """The state of a module after ``module.compile`` can be loaded into an uncompiled and a compiled module."""
    layer = small.make(device=device)
    layer.compile(backend="gradfuse", fullgraph=True)
    x, order = small.inputs(device)
    small.check(layer, layer, x, order)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    for seed in (1, 2):
        other = small.make(device=device, seed=seed)
        function = compiled(other) if seed == 2 else other
        state = torch.load(tmp_path / "state.pt")
        function.load_state_dict({f"_orig_mod.{n}": p for n, p in state.items()} if seed == 2 else state)
        assert all(torch.equal(p, state[n]) for n, p in other.named_parameters())
    small.check(other, function, x, order)


def test_pickle_of_a_compiled_module(device, alike, tmp_path):
    """torch.save saves the whole compiled module, wherever it can save stock's."""

    def run(backend):
        torch.save(torch.compile(small.make(device=device), backend=backend), tmp_path / "module.pt")
        other = torch.load(tmp_path / "module.pt", weights_only=False)
        small.check(other._orig_mod, other, *small.inputs(device))

    alike(run)


@pytest.mark.parametrize(
    "options", [{"max_autotun": True}, {"max_autotune": "yes"}, {"strikt": True}, {"disable": ["hosting"]}]
)
def test_a_wrong_option_raises_at_torch_compile(options):
    """Finding C11: the error comes at once, as with ``backend="inductor"``, and not wrapped at the first call."""
    with pytest.raises(RuntimeError):
        torch.compile(lambda x: x + 1, backend="inductor", options=options)
    with pytest.raises(RuntimeError):
        torch.compile(lambda x: x + 1, backend="gradfuse", options=options)


def test_a_wrong_mode_raises_at_torch_compile():
    with pytest.raises(RuntimeError):
        torch.compile(lambda x: x + 1, backend="inductor", mode="fastest")
    with pytest.raises(RuntimeError):
        torch.compile(lambda x: x + 1, backend="gradfuse", mode="fastest")
