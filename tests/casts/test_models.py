"""Training of models whose dtypes leave casts behind: no graph keeps a round trip, and no gradient is less exact."""

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch import nn

from tests.attention.case import relative_error
from tests.support.eager_graphs import eager_graphs

from .models import WIDTH, Block, MasterWeights, Upcasting, cast_after_construction
from .test_rewrite import round_trips

BF16 = torch.bfloat16


def autocast(module):
    def run(*inputs):
        with torch.autocast("cpu", BF16):
            return module(*inputs)

    return run


def hidden():
    return torch.randn(2, 8, WIDTH)


MODELS = {
    "autocast": lambda: (Block(), autocast, hidden()),
    "cast_after_construction": lambda: (cast_after_construction(Block()), lambda m: m, hidden().to(BF16)),
    "upcasting": lambda: (Upcasting().to(BF16), lambda m: m, torch.randint(0, 50, (2, 8))),
    "master_weights": lambda: (MasterWeights(), lambda m: m, hidden().to(BF16)),
}


def gradients(module, run, inputs):
    loss = run(inputs).float().square().mean()
    return torch.autograd.grad(loss, list(module.parameters()))


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", MODELS)
def test_no_round_trip_survives(name):
    module, wrap, inputs = MODELS[name]()
    with eager_graphs() as graphs:
        got = gradients(module, torch.compile(wrap(module), backend="gradfuse", fullgraph=True), inputs)
    assert len(graphs) == 2 and not any(round_trips(gm.graph) for gm in graphs)
    eager = gradients(module, wrap(module), inputs)
    exact_module = MODELS[name]()[0].double()
    exact_module.load_state_dict({k: v.double() for k, v in module.state_dict().items()})
    exact_inputs = inputs.double() if inputs.is_floating_point() else inputs
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        want = gradients(exact_module, lambda x: exact_module(x), exact_inputs)
    errors = torch.tensor([[relative_error(g, w), relative_error(e, w)] for g, e, w in zip(got, eager, want, strict=True)])
    ours, eagers = errors.square().mean(0).sqrt()
    assert ours <= 1.2 * eagers


@pytest.mark.breadth(2)
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_saved_in_two_dtypes(name):
    """A tensor and its cast to a wider type are not both saved for the backward."""
    module, wrap, inputs = MODELS[name]()
    with eager_graphs() as graphs:
        gradients(module, torch.compile(wrap(module), backend="gradfuse", fullgraph=True), inputs)
    forward = graphs[0].graph
    saved = set(forward.find_nodes(op="output")[0].all_input_nodes)
    casts = [n for n in forward.nodes if n.target is torch.ops.prims.convert_element_type.default]
    both = [n for n in casts if n in saved and n.args[0] in saved and n.args[0].op != "placeholder"]
    assert not both


class TestTheExampleOfPytorchXla3718:
    """A linear layer with a weight [66, 44] and an input [22, 44], cast to bf16 in every possible way."""

    def casts(self, module, wrap=lambda m: m, dtype=BF16):
        with eager_graphs() as graphs:
            out = torch.compile(wrap(module), backend="gradfuse", fullgraph=True)(torch.randn(22, 44).to(dtype))
            out.float().sum().backward()
        assert len(graphs) == 2
        assert not any(round_trips(gm.graph) for gm in graphs)
        nodes = [n for gm in graphs for n in gm.graph.nodes]
        return [n for n in nodes if n.target is torch.ops.prims.convert_element_type.default]

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("how", ["to", "data", "constructed", "after_a_step"])
    def test_no_cast_at_all(self, how, bias):
        dtype = {"dtype": BF16} if how == "constructed" else {}
        module = nn.Linear(44, 66, bias=bias, **dtype)
        assert module.weight.shape == (66, 44)
        if how == "after_a_step":
            module(torch.randn(22, 44)).sum().backward()
            module.zero_grad()
        if how in ("data", "after_a_step"):
            cast_after_construction(module)
        else:
            module.to(BF16)
        # The gradient of the bias sums bf16 rows in fp32, which takes one pair of casts. No other cast is allowed.
        assert len(self.casts(module)) <= (2 if bias else 0)

    def test_autocast_leaves_only_its_own(self):
        """The input and the weight are cast to bf16. The weight's gradient (and the input's, if it had one) is cast back."""
        assert len(self.casts(nn.Linear(44, 66, bias=False), autocast, torch.float32)) == 3


DISTRIBUTED = """
import sys, torch, torch.distributed as dist
import inductor_ext
from torch import nn
from tests.support.eager_graphs import eager_graphs
from tests.casts.models import Block, WIDTH
from tests.casts.test_rewrite import round_trips

torch.manual_seed(0)
rank, port, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
model = Block()
if how == "ddp":
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    # Without NCCL, DDP refuses bf16_compress_hook by its name. The code of the hook also runs on gloo.
    def compress(group, bucket):
        return default_hooks.bf16_compress_hook(group, bucket)

    compress.__annotations__ = default_hooks.bf16_compress_hook.__annotations__
    model = nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(None, compress)
else:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
with eager_graphs() as graphs:
    compiled = torch.compile(model, backend="gradfuse")
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "ddp"):
            loss = compiled(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
assert losses[-1] < losses[0], losses
assert len(graphs) >= 2, len(graphs)
print("round trips:", sum(len(round_trips(gm.graph)) for gm in graphs))
dist.destroy_process_group()
"""


@pytest.mark.breadth(0)
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes with gloo on the CPU")
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_two_processes(how):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in [os.getcwd(), *sys.path] if p),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", DISTRIBUTED]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen([*command, str(rank), port, how], env=environment, **pipes) for rank in (0, 1)]
    outputs = [p.communicate(timeout=300)[0] for p in processes]
    assert all(p.returncode == 0 for p in processes), outputs[0][-3000:]
    assert all("round trips: 0" in output for output in outputs), outputs[0][-1000:]
