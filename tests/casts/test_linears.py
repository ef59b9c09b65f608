"""Linear layers that read the same input become one matmul under autocast, unless something could tell the difference."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from inductor_ext.casts import linears
from inductor_ext.core.report import collect
from tests.support.eager_graphs import eager_graphs
from tests.support.interpreter import DEVICES, triton_on_cpu
from tests.support.targets import on_target

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
WIDTH, HEADS = 32, 2


@torch.library.custom_op("test::of_another_library", mutates_args=())
def of_another_library(x: torch.Tensor) -> torch.Tensor:
    """An op that could read its operand's strides."""
    return x.clone(memory_format=torch.contiguous_format)


@of_another_library.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@of_another_library.register_autograd
def _(ctx, grad):
    return grad


class Layers(nn.Module):
    """Two layers of the same input, and a function of them."""

    def __init__(self, function, bias=True):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=bias), nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


class Attention(nn.Module):
    """Query, key and value of one input. ``biases``: which of them have one."""

    def __init__(self, biases=(True, True, True), width=2 * WIDTH):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width, bias=bias) for bias in biases)

    def forward(self, x):
        heads = [f(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for f in (self.query, self.key, self.value)]
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)


def step(run, module, x, autocast=BF16):
    """The result and the gradients of the input and all parameters; None for those that have none."""
    leaves = [p for p in (x, *module.parameters()) if p.requires_grad]
    # A region in which autocast is off would keep the casts of the regions in it.
    with contextlib.nullcontext() if autocast is None else torch.autocast(x.device.type, autocast):
        result = run(x)
    result = torch.cat([y.flatten().double() for y in result]) if isinstance(result, tuple) else result.double()
    return result.detach(), *torch.autograd.grad(result.square().sum(), leaves, allow_unused=True)


def compiled_step(module, x, autocast=BF16, **options):
    """The same under gradfuse, as if the CPU were a GPU, and the numbers of layers that became one."""
    torch._dynamo.reset()
    with on_target(triton=True), eager_graphs() as graphs, collect() as report:
        results = step(torch.compile(module, backend="gradfuse", **options), module, x, autocast)
    assert len(graphs) >= 2, "a forward and a backward"
    return results, [int(d.why.split()[1]) for d in report.decisions if d.pass_name == linears.NAME]


def relative_error(x, reference):
    return (x.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30)


def check(module, x, autocast=BF16, **options):
    """Assert that gradfuse is as exact as eager mode, against float64. Returns the numbers of layers that became one."""
    results, counts = compiled_step(module, x, autocast, **options)
    eager = step(module, module, x, autocast)
    exact = step(module.double(), module, x.detach().double().requires_grad_(x.requires_grad), None)
    module.float()
    assert len(results) == len(eager) == len(exact)
    for ours, theirs, reference in zip(results, eager, exact, strict=True):
        assert (ours is None) == (theirs is None) == (reference is None)
        if ours is not None:
            assert relative_error(ours, reference) <= 1.2 * relative_error(theirs, reference) + 1e-6
    return counts


def tensor(*shape):
    return torch.randn(shape).requires_grad_()


def of_both(module, x):
    return module.first(x).sin(), module.second(x).exp()


@pytest.mark.parametrize("length", [1, 97])
@pytest.mark.parametrize("autocast", [BF16, FP16])
def test_query_key_and_value(length, autocast):
    torch.manual_seed(0)
    assert check(Attention(), tensor(2, length, 2 * WIDTH), autocast) == [3]
    assert check(Attention([False] * 3), tensor(2, length, 2 * WIDTH), autocast) == [3]
    assert check(Attention([True, False, True]), tensor(2, length, 2 * WIDTH), autocast) == [2], "as BEiT's"


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    torch.manual_seed(0)
    place, scope = ("cuda", contextlib.nullcontext()) if device == "cuda" else ("cpu", triton_on_cpu())
    module, x = Attention().to(place), torch.randn(2, 97, 2 * WIDTH, device=place, requires_grad=True)
    exact = step(module.double(), module, x.double().detach().requires_grad_(), None)
    module.float()
    torch._dynamo.reset()
    with scope, collect() as report:
        results = step(torch.compile(module, backend="gradfuse"), module, x)
    eager = step(module, module, x)
    assert [d.why for d in report.decisions if d.pass_name == linears.NAME] == ["for 3 layers that read the same input"]
    for ours, theirs, reference in zip(results, eager, exact, strict=True):
        assert relative_error(ours, reference) <= 1.2 * relative_error(theirs, reference) + 1e-6


def test_gradients_of_parameters_are_tensors_of_their_own():
    """What happens to the gradient of one weight, as an optimizer may change it in place, does not happen to another."""
    torch.manual_seed(0)
    module, x = Attention(), tensor(2, 5, 2 * WIDTH)
    with on_target(triton=True), eager_graphs():
        run = torch.compile(module, backend="gradfuse")
        for _ in range(2):
            with torch.autocast("cpu", BF16):
                run(x).float().square().sum().backward()
    twice = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.query.weight.grad.zero_()
    module.value.bias.grad.mul_(3)
    for name, p in module.named_parameters():
        factor = {"query.weight": 0, "value.bias": 3}.get(name, 1)
        assert torch.equal(p.grad, factor * twice[name])


def linear_views(module, x):
    """Views that slices have: other dims split, merged in front of the rows, moved."""
    first, second = module.first(x), module.second(x)
    return first.view(-1, WIDTH).unflatten(-1, (4, 8)).mT.exp(), second.chunk(3, -1)[1].reshape(-1).sin()


TAKEN = {
    "of_both": (of_both, [2]),
    "linear_views": (linear_views, [2]),
    "one_weight_twice": (lambda m, x: (m.first(x).sin(), m.first(x).exp()), [2]),
    "gates": (lambda m, x: m.first(x).relu() * m.second(x)[..., :WIDTH], [2]),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_that_become_one(name, dynamic):
    torch.manual_seed(0)
    function, expected = TAKEN[name]
    assert check(Layers(function), tensor(3, 40, WIDTH), dynamic=dynamic) == expected


@pytest.mark.parametrize("autocast", [BF16, FP16])
def test_in_a_region_of_autocast(autocast):
    def region(module, x):
        with torch.autocast(x.device.type, autocast, enabled=x.dtype is FP32):
            return of_both(module, x)

    torch.manual_seed(0)
    assert check(Layers(region), tensor(3, 40, WIDTH), autocast=None) == [2]


def input_changed_between(module, x):
    y = x * 1.5
    first = module.first(y)
    y.add_(1)
    return first.sin(), module.second(y).sin()


def weight_changed_between(module, x):
    first = module.first(x).sin()
    with torch.no_grad():
        module.second.weight.mul_(0.5)
    second = module.second(x).sin()
    with torch.no_grad():
        module.second.weight.mul_(2)
    return first, second


@pytest.mark.parametrize("changed", [input_changed_between, weight_changed_between])
def test_operands_that_change_between(changed):
    """Autocast keeps a copy of each operand for the backward, so eager mode allows this."""
    torch.manual_seed(0)
    module, x = Layers(changed), tensor(3, 40, WIDTH)
    results, counts = compiled_step(module, x)
    assert counts == []
    for ours, theirs in zip(results, step(module, module, x), strict=True):
        assert relative_error(ours, theirs) < 1e-2


def changed_in_place(module, x):
    first = module.first(x)
    first.mul_(2)
    return first.sin(), module.second(x).sin()


def without_gradients(module, x):
    first = module.first(x).sin()
    with torch.no_grad():
        second = module.second(x).sin()
    return first, second


def in_two_regions(module, x):
    with torch.autocast(x.device.type, BF16, enabled=x.dtype is FP32):
        first = module.first(x).sin()
    with torch.autocast(x.device.type, FP16, enabled=x.dtype is FP32):
        return first, module.second(x).sin()


def out_of_autocast(module, x):
    with torch.autocast(x.device.type, BF16), torch.autocast(x.device.type, enabled=False):
        return of_both(module, x)


def computed_weight(module, x):
    return module.first(x).sin(), F.linear(x, module.second.weight * 2).sin()


LEFT_ALONE = {
    "returned": lambda m, x: (m.first(x), m.second(x)),
    "returned_as_a_view": lambda m, x: (m.first(x).mT, m.second(x).view(-1)),
    "returned_after_ops_that_change_nothing": lambda m, x: (m.first(x) * 1, m.second(x) + 0),
    "of_two_inputs": lambda m, x: (m.first(x).sin(), m.second(x.sin()).sin()),
    "a_view_that_needs_whole_rows": lambda m, x: (m.first(x).view(-1).sin(), m.second(x).sin()),
    "strides_are_read": lambda m, x: (m.first(x).as_strided((4, 4), (4, 1)).sin(), m.second(x).sin()),
    "an_op_of_another_library": lambda m, x: (of_another_library(m.first(x)).sin(), m.second(x).sin()),
    "a_view_of_no_cast": lambda m, x: (m.first(x).to(m.second(x).dtype).view(-1).sin(), m.second(x).sin()),
    "an_op_of_another_library_after_no_cast": lambda m, x: (
        of_another_library(m.first(x).to(x.dtype if x.dtype is FP64 else BF16)).sin(),
        m.second(x).sin(),
    ),
    "a_view_by_an_unusual_name": lambda m, x: (m.first(x).tensor_split(3, 0)[1].view(-1).sin(), m.second(x).sin()),
    "an_op_of_aten": lambda m, x: (torch.ops.aten.as_strided.default(m.first(x), [4, 4], [4, 1]).sin(), m.second(x).sin()),
    "an_index": lambda m, x: (m.first(x)[torch.tensor(1)].sin(), m.second(x).sin()),
    "detached": lambda m, x: (m.first(x).sin() + m.second(x).detach()[..., :WIDTH],),
    "only_its_dtype": lambda m, x: (m.first(x).sin().type_as(m.second(x)),),
    "only_the_shape_of_a_view": lambda m, x: (m.first(x).sin().expand_as(m.second(x)[..., :WIDTH]),),
    "of_no_use": lambda m, x: (m.second(x), m.first(x).sin())[1:],
    "only_its_shape": lambda m, x: (m.first(x).sin() * m.second(x).shape[-1],),
    "only_where_it_is_largest": lambda m, x: (m.first(x).sin() * m.second(x).argmax(-1, keepdim=True),),
    "checkpointed": lambda m, x: checkpoint(lambda y: sum(z.sum() for z in of_both(m, y)), x, use_reentrant=False)[None],
    "changed_in_place": changed_in_place,
    "without_gradients": without_gradients,
    "computed_weight": computed_weight,
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_left_alone(name):
    torch.manual_seed(0)
    assert check(Layers(LEFT_ALONE[name]), tensor(3, 40, WIDTH)) == []
    assert check(Layers(of_both), tensor(3, 40, WIDTH)) == [2], "the same layers can be one"


def test_views_whose_size_depends_on_data():
    def function(module, x):
        count = (x[0, 0, 0] > 0).long().item()
        return module.first(x)[: count + 1].sin(), module.second(x).select(1, count).sin()

    torch.manual_seed(0)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert check(Layers(function), tensor(3, 40, WIDTH)) == []


@pytest.mark.parametrize("function", [of_both, in_two_regions, out_of_autocast])
def test_without_the_same_autocast(function):
    torch.manual_seed(0)
    assert check(Layers(function), tensor(3, 40, WIDTH), autocast=None) == []


def test_parameters_that_are_left_alone():
    torch.manual_seed(0)
    frozen = Layers(of_both)
    frozen.first.requires_grad_(False)
    assert check(frozen, tensor(3, 40, WIDTH)) == []
    half = Layers(of_both).to(BF16)
    assert compiled_step(half, torch.randn(3, 40, WIDTH, dtype=BF16))[1] == [], "they are not cast, so a copy would cost"
    with on_target(triton=False):
        assert not _counts(Layers(of_both)), "a CPU launches nothing"


def _counts(module):
    with eager_graphs(), collect() as report, torch.autocast("cpu", BF16):
        torch._dynamo.reset()
        torch.compile(module, backend="gradfuse")(tensor(3, 40, WIDTH))
    return [d.why for d in report.decisions if d.pass_name == linears.NAME]


def test_slices_that_are_not_aligned_are_left_alone():
    torch.manual_seed(0)
    module = Layers(of_both)
    module.first = nn.Linear(WIDTH, WIDTH + 4)
    assert check(module, tensor(3, 40, WIDTH)) == []


def test_weights_in_another_layout_are_left_alone():
    """Their gradients would have the layout of slices."""
    torch.manual_seed(0)
    module = Layers(of_both)
    module.first.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).mT)
    assert check(module, tensor(3, 40, WIDTH)) == []


def test_large_layers_are_left_alone(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(linears, "MOST_OF_ONE", 4 * WIDTH**2 - 1)
    assert check(Layers(of_both), tensor(3, 40, WIDTH)) == []


@pytest.mark.parametrize("option", ["max_autotune", "max_autotune_gemm"])
def test_not_where_inductor_fuses_the_casts(option):
    torch.manual_seed(0)
    assert compiled_step(Layers(of_both), tensor(3, 40, WIDTH), options={option: True})[1] == []


def test_disabled():
    torch.manual_seed(0)
    assert check(Layers(of_both), tensor(3, 40, WIDTH), options={"disable": [linears.NAME]}) == []
