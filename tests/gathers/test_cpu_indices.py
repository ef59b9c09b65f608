"""An index that a model builds on the CPU is built on the GPU that reads it. Here the device "meta" stands for the GPU."""

import time

import pytest
import torch
from torch._dynamo import config
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext.core.joint_graph import building
from inductor_ext.gathers import cpu_indices
from inductor_ext.options import Options
from inductor_ext.torch_api.config import without_caches


def relative_positions(length):
    """An index of [length + 1, length + 1] as a model with an extra token builds it, in steps and without a device."""
    rows, columns = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    coordinates = torch.stack([rows, columns]).flatten(1)
    distance = (coordinates[:, :, None] - coordinates[:, None, :]).permute(1, 2, 0).contiguous()
    distance[:, :, 0] += length - 1
    distance[:, :, 0] *= 2 * length - 1
    index = torch.zeros((length * length + 1,) * 2, dtype=torch.int64)
    index[1:, 1:] = distance.sum(-1).abs()
    index[0, 0:] = 3
    index[0:, 0] = 4
    return index


def rewritten(function, *inputs):
    gm = make_fx(torch.func.functionalize(function), tracing_mode="symbolic")(*inputs)
    with building(gm.graph) as build:
        cpu_indices.rewrite(build, Options())
    gm.recompile()
    return gm


def devices(function, *inputs):
    """The devices of the tensors that the rewritten graph computes."""
    values = [n.meta["val"] for n in rewritten(function, *inputs).graph.nodes if n.op == "call_function"]
    return {x.device.type for x in values if isinstance(x, torch.Tensor)}


def table(*sizes):
    return torch.empty(*sizes, device="meta")


def test_an_index_of_slices_and_constants():
    assert devices(lambda x: x[relative_positions(3).view(-1)], table(30, 4)) == {"meta"}


def test_an_index_that_is_sent_to_the_device():
    assert devices(lambda x: x[relative_positions(3).int().to(x.device)], table(30, 4)) == {"meta"}


def test_a_single_number_that_is_sent_to_the_device():
    assert devices(lambda x: x * torch.ops.prims.device_put(torch.arange(2)[1], x.device), table(30, 4)) == {"meta"}


def test_an_index_that_several_devices_read_is_on_each_of_them():
    def function(x, y):
        index = relative_positions(3)
        return x[index], y[index]

    assert devices(function, table(30, 4), torch.ones(30, 4)) == {"meta", "cpu"}


def test_an_index_that_is_returned_stays_on_the_cpu_and_has_its_values():
    def function(x):
        index = relative_positions(3)
        return x[index], index

    assert devices(function, table(30, 4)) == {"meta", "cpu"}
    assert torch.equal(rewritten(function, table(30, 4))(table(30, 4))[1], relative_positions(3))


@pytest.mark.parametrize(
    "index",
    [
        lambda: torch.linspace(0, 9, 5).long(),
        lambda: torch.randint(10, (5,)),
        lambda: torch.zeros(5, dtype=torch.int64).sort().indices,
        lambda: torch.ones(5, dtype=torch.int64) << 70,
    ],
    ids=["floating point", "random", "order of equal values", "shift by too many bits"],
)
def test_what_devices_may_compute_differently_stays_on_the_cpu(index):
    assert "cpu" in devices(lambda x: x[index()], table(10, 4))


def test_an_index_that_is_an_input_stays_on_the_cpu():
    assert "cpu" in devices(lambda x, i: x[i + 1], table(10, 4), torch.arange(5))


@torch.library.custom_op("gradfuse_tests::first_rows", mutates_args=())
def first_rows(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    assert lengths.device.type == "cpu"
    return x[: int(lengths.sum())].clone()


@first_rows.register_fake
def _(x, lengths):
    return torch.empty_like(x)


def test_an_operand_that_an_op_needs_on_the_cpu_stays_there():
    assert "cpu" in devices(lambda x: first_rows(x, torch.full((3,), 2)), table(10, 4))


def test_a_mask_that_selects_indices_stays_on_the_cpu():
    """The number of its elements would have two names, one on each device."""
    with config.patch(capture_dynamic_output_shape_ops=True):
        assert "cpu" in devices(lambda x: x[torch.arange(5)[torch.arange(5) > 2]], table(10, 4))


def test_many_indices_that_follow_from_each_other():
    def function(x):
        index, found = torch.arange(5), []
        for _ in range(200):
            index = index + 1
            found.append(x[index])
        return found

    begin = time.perf_counter()
    gm = make_fx(function, tracing_mode="fake")(table(300, 4))
    traced = time.perf_counter()
    with building(gm.graph) as build:
        cpu_indices.rewrite(build, Options())
    assert time.perf_counter() - traced < 2 * (traced - begin)


def test_a_length_that_varies():
    gm = rewritten(lambda x: x[torch.arange(x.shape[0]).flip(0)], table(10, 4))
    assert not any(n.kwargs.get("device") == torch.device("cpu") for n in gm.graph.nodes)
    assert gm(table(7, 4)).shape == (7, 4)


@pytest.mark.gpu
def test_no_kernel_of_a_training_step_runs_on_the_cpu():
    def function(x):
        return (x[relative_positions(14).to(x.device)] * x[relative_positions(14).view(-1)].view(197, 197, 4)).sum()

    x = torch.randn(30_000, 4, device="cuda", requires_grad=True)
    torch._dynamo.reset()
    with without_caches():
        (result,), codes = run_and_get_code(lambda: torch.autograd.grad(torch.compile(function, backend="gradfuse")(x), x))
    assert len(codes) == 2 and not any("cpp_fused" in code for code in codes)
    (expected,) = torch.autograd.grad(function(x.double()), x)
    assert (result - expected).norm() < 1e-5 * expected.norm()
