"""Casts of weights that matmuls and convolutions read are done in groups: one kernel, and the same bits."""

import contextlib

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext.casts import together
from inductor_ext.core.report import collect
from inductor_ext.options import Options
from inductor_ext.torch_api.config import inductor_config
from tests.support.emitted import kernels_of
from tests.support.interpreter import DEVICES, triton_on_cpu
from tests.support.joint_graphs import text
from tests.support.targets import on_target

BF16, FP16, FP64 = torch.bfloat16, torch.float16, torch.float64
SQUARE = (32, 32)
WHOLE = "keep_addmm_fused_for_half_dtypes"


def cast(x, dtype=BF16):
    return torch.ops.prims.convert_element_type(x, dtype)


def grouped(function, *shapes, device="cuda"):
    """The graph of a function of tensors on a GPU that need not be there, after the pass."""
    with FakeTensorMode():
        gm = make_fx(function)(*(torch.empty(shape, device=device) for shape in shapes))
        together.rewrite(gm, Options())
        gm.graph.lint()
    return gm.graph


def groups(graph):
    """The number of casts of each group."""
    return [len(node.args[0]) for node in graph.find_nodes(op="call_function", target=together.KERNEL.overload)]


class Block(nn.Module):
    """Layers whose weights and biases autocast casts: five matmuls and a convolution."""

    def __init__(self, width=48):
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 97), nn.Linear(97, width)
        self.convolution = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x):
        with torch.autocast(x.device.type, BF16):
            x = self.query(x) * self.key(x).sigmoid()
            x = self.down(self.up(x).relu())
            return self.convolution(x.mT).float()


def step(block, x, **options):
    """The result and all gradients, the kernels of the forward, and what was decided."""
    torch._dynamo.reset()
    run = torch.compile(block, backend="gradfuse", options=options)

    def once():
        y = run(x)
        return y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])

    with collect() as report:
        results, (forward, _) = run_and_get_code(once)
    return results, kernels_of(forward), [d.why for d in report.decisions if d.pass_name == together.NAME]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [1, 97])
def test_a_group_changes_no_bit(device, length):
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, length, 48)
    place, scope = ("cuda", contextlib.nullcontext()) if device == "cuda" else ("cpu", triton_on_cpu())
    block, x = block.to(place), x.to(place).requires_grad_()
    with scope:
        results, kernels, why = step(block, x)
        separate, separate_kernels, _ = step(block, x, disable=[together.NAME])
    # The casts of x and of seven parameters, all but the bias of the convolution, and that of the weight with 97 rows, unless
    # Inductor pads it for the matmul.
    assert why in ([f"for {count} casts to {BF16}"] for count in (8, 9))
    assert all(torch.equal(a, b) for a, b in zip(results, separate, strict=True))
    assert len(separate_kernels) > len(kernels), "casts of equal sizes share one kernel's code"


def test_graph():
    def linears(x, v, w, bias):
        h = torch.addmm(cast(bias), cast(x) * 2, cast(v).permute(1, 0))
        return h @ cast(w), cast(v)

    assert text(grouped(linears, SQUARE, SQUARE, SQUARE, (32,))) == (
        "%0: float32[32, 32] = input\n"
        "%1: float32[32, 32] = input\n"
        "%2: float32[32, 32] = input\n"
        "%3: float32[32] = input\n"
        "%4:  = gradfuse.cast_all([%3, %1, %2, %1], bfloat16, [1, 1, 1, 1])\n"
        "%5: bfloat16[32] = getitem(%4, 0)\n"
        "%6: bfloat16[32, 32] = getitem(%4, 1)\n"
        "%7: bfloat16[32, 32] = getitem(%4, 2)\n"
        "%8: bfloat16[32, 32] = getitem(%4, 3)\n"
        "%9: bfloat16[32, 32] = prims.convert_element_type(%0, bfloat16)\n"
        "%10: bfloat16[32, 32] = aten.mul.Tensor(%9, 2)\n"
        "%11: bfloat16[32, 32] = aten.permute(%6, [1, 0])\n"
        "%12: bfloat16[32, 32] = aten.addmm(%5, %10, %11)\n"
        "%13: bfloat16[32, 32] = aten.mm(%12, %7)\n"
        "return [%13, %8]\n"
    )


def test_graph_of_concatenated_weights():
    """They are cast next to each other, where the matmul reads them."""

    def linears(x, v, w, a, b):
        bias, weight = torch.cat([a, b]), torch.cat([v, w])
        return torch.addmm(cast(bias), cast(x), cast(weight).permute(1, 0))

    assert text(grouped(linears, SQUARE, SQUARE, (97, 32), (32,), (97,))) == (
        "%0: float32[32, 32] = input\n"
        "%1: float32[32, 32] = input\n"
        "%2: float32[97, 32] = input\n"
        "%3: float32[32] = input\n"
        "%4: float32[97] = input\n"
        "%5:  = gradfuse.cast_all([%3, %4, %0, %1, %2], bfloat16, [2, 1, 2])\n"
        "%6: bfloat16[129] = getitem(%5, 0)\n"
        "%7: bfloat16[32, 32] = getitem(%5, 1)\n"
        "%8: bfloat16[129, 32] = getitem(%5, 2)\n"
        "%9: bfloat16[32, 129] = aten.permute(%8, [1, 0])\n"
        "%10: bfloat16[32, 129] = aten.addmm(%6, %7, %9)\n"
        "return %10\n"
    )


@pytest.mark.parametrize("device", DEVICES)
def test_concatenated_weights_are_cast_to_the_same_bits(device):
    torch.manual_seed(0)
    place, scope = ("cuda", contextlib.nullcontext()) if device == "cuda" else ("cpu", triton_on_cpu())
    xs = [torch.randn(n, 33, device=place) for n in (1, 97, 1000, 5)]
    run = torch.compile(lambda *xs: together.cast_all(xs, BF16, [1, 2, 1]), backend="gradfuse")
    torch._dynamo.reset()
    with scope:
        results, (code,) = run_and_get_code(run, *xs)
    assert len(kernels_of(code)) == 1
    for x, y in zip(results, (xs[0], torch.cat(xs[1:3]), xs[3]), strict=True):
        assert torch.equal(x, y.to(BF16))


def pair(a, b):
    return cast(a) @ cast(b)


def write_after(a, b):
    result = pair(a, b)
    torch.ops.aten.copy_(a, b)
    return result


LEFT_ALONE = {
    "read_by_arithmetic": lambda a, b: cast(a).sin() @ cast(b).cos(),
    "also_read_by_arithmetic": lambda a, b: (lambda v: v @ cast(b) + v)(cast(a)),
    "of_values_of_the_graph": lambda a, b: cast(a.sin()) @ cast(b.sin()),
    "to_a_wider_type": lambda a, b: cast(a, FP64) @ cast(b, FP64),
    "of_two_dtypes": lambda a, b: (cast(a) @ cast(a), cast(b, FP16) @ cast(b, FP16)),
    "of_a_tensor_that_is_written_to": write_after,
    "of_a_concatenation_along_another_dim": lambda a, b: cast(torch.cat([a, b], 1)).mT @ cast(a.sin()),
    "of_a_concatenation_with_values_of_the_graph": lambda a, b: cast(torch.cat([a, b.sin()])) @ cast(b.sin()),
    "read_by_nothing": lambda a, b: (cast(a), cast(b)) and a + b,
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_left_alone(name):
    groups_found = groups(grouped(LEFT_ALONE[name], SQUARE, SQUARE))
    if name == "of_two_dtypes":
        assert groups_found == [2, 2], "a group has one dtype"
    else:
        assert groups_found == []
    assert groups(grouped(pair, SQUARE, SQUARE)) == [2], "the same tensors can be grouped"


def test_concatenations_that_change_a_dtype_or_drop_a_tensor_are_left_alone():
    """``cat`` widens its operands before the cast rounds, and takes an empty tensor of one dim for nothing."""

    def of_two_dtypes(a, b):
        return cast(torch.cat([a, b.double()])) @ cast(a.sin())

    def with_an_empty_one(a, nothing):
        return cast(torch.cat([nothing, a])) @ cast(a.sin())

    def of_an_input_in_fp64(a, b):
        return cast(torch.cat([a, b])) @ cast(a.sin())

    assert groups(grouped(of_two_dtypes, SQUARE, SQUARE)) == []
    with FakeTensorMode():
        graphs = [
            make_fx(with_an_empty_one)(torch.empty(SQUARE, device="cuda"), torch.empty(0, device="cuda")),
            make_fx(of_an_input_in_fp64)(torch.empty(SQUARE, device="cuda"), torch.empty(SQUARE, device="cuda", dtype=FP64)),
        ]
        for gm in graphs:
            # Another cast could be in the group.
            output = gm.graph.output_node()
            with gm.graph.inserting_before(output):
                first = gm.graph.find_nodes(op="placeholder")[0]
                other = gm.graph.call_function(torch.ops.prims.convert_element_type.default, (first, BF16))
                other.meta = {"val": first.meta["val"].to(BF16)}
            output.args = ((output.args[0], other),)
            together.rewrite(gm, Options())
            assert groups(gm.graph) == []


def test_the_bias_of_a_convolution_is_left_alone():
    """Inductor adds it in a kernel of its own, and does not round it there."""

    def convolution(x, weight, bias):
        return torch.ops.aten.convolution(cast(x), cast(weight), cast(bias), [1], [0], [1], False, [0], 1)

    # This CPU's build of torch traces no convolution on a GPU.
    with on_target(triton=True):
        graph = grouped(convolution, (1, 32, 32), (32, 32, 1), (32,), device="cpu")
    (group,) = graph.find_nodes(op="call_function", target=together.KERNEL.overload)
    assert [node.meta["val"].shape for node in group.args[0]] == [(1, 32, 32), (32, 32, 1)]


def test_large_tensors_and_tensors_of_another_device_are_left_alone():
    large = (together.MOST_OF_ONE // 32 + 1, 32)
    assert groups(grouped(lambda a, b, c: (pair(a, b), cast(b) @ cast(c)), large, SQUARE, SQUARE)) == [3]
    assert groups(grouped(pair, SQUARE, SQUARE, device="cpu")) == []
    assert groups(grouped(pair, (0, 32), SQUARE)) == []


def test_tensors_of_unknown_size_are_left_alone():
    torch._dynamo.reset()
    operands = torch.randn(32, 48), torch.randn(48, 40)
    with triton_on_cpu(), collect() as report:
        torch.compile(pair, backend="gradfuse", dynamic=True)(*operands)
    assert together.NAME not in {d.pass_name for d in report.decisions}


def test_groups_are_limited():
    def many(x, *weights):
        for w in weights:
            x = x @ cast(w)
        return x

    count = together.MOST_CASTS + 5
    assert groups(grouped(lambda x, *ws: many(cast(x), *ws), *[SQUARE] * count)) == [together.MOST_CASTS, 5]
    side = int(together.MOST_OF_ONE**0.5)
    fits = together.MOST_ELEMENTS // side**2
    assert groups(grouped(lambda x, *ws: many(cast(x), *ws), *[(side, side)] * (fits + 2))) == [fits, 2]


@pytest.mark.parametrize(
    "option, value",
    [("max_autotune", True), ("max_autotune_gemm", True), ("triton.native_matmul", True), (WHOLE, False)],
)
def test_not_where_inductor_fuses_the_casts(option, value):
    """Templates of matmuls compute their operands, and a bias that is added apart is computed there."""
    if option == WHOLE and not hasattr(inductor_config, WHOLE):
        pytest.skip("this torch has no such option")
    with inductor_config.patch({option: value}):
        assert groups(grouped(pair, SQUARE, SQUARE)) == []
