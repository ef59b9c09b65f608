"""Data-parallel scenarios (DDP and FSDP2), and the table of all scenarios. Each runs in every process of a test.

Every rank trains on its own part of a batch. The reference is one process in float64 on the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from . import model as models
from . import parallel
from .worker import Context

SCENARIOS: dict[str, Callable[[Context], None]] = dict(parallel.SCENARIOS)


def scenario(function: Callable[[Context], None]) -> Callable[[Context], None]:
    """Add a function to the table of scenarios."""
    SCENARIOS[function.__name__] = function
    return function


def check(
    context: Context, model: nn.Module, function: Callable[..., Tensor], want: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    """Check that one step of ``function`` on this rank's data gives the parameters of ``model`` the gradients ``want``."""
    function(*context.data()).backward()
    models.check_gradients(models.gradients(model), want, tolerance)


def wanted(context: Context, model: nn.Module) -> dict[str, Tensor]:
    """The gradients of one process in float64 on the data of all ranks."""
    return models.reference(model, *context.all_data())[1]


def ddp(model: nn.Module, context: Context, **options: object) -> DistributedDataParallel:
    """This rank's replica of the model in DDP."""
    return DistributedDataParallel(model, device_ids=[context.rank] if context.device == "cuda" else None, **options)


@scenario
def ddp_compiled_outside(context: Context) -> None:
    """torch.compile is around DDP, whose optimizer for Dynamo then calls gradfuse.

    This was finding C6.
    """
    model = models.make().to(context.device)
    want = wanted(context, model)
    model = ddp(model, context)
    check(context, model, context.compile(model), want)


@scenario
def ddp_generated_code(context: Context) -> None:
    """torch.compile is around DDP, with Inductor's code generation and the smallest model."""
    model = models.make(("relative",)).to(context.device)
    want = wanted(context, model)
    model = ddp(model, context)
    check(context, model, context.compile(model), want)


ddp_generated_code.generated = True  # read by the worker and by pytest's marks


@scenario
def ddp_compiled_inside(context: Context) -> None:
    """DDP is around the compiled module."""
    model = models.make(("relative",)).to(context.device)
    want = wanted(context, model)
    model = ddp(context.compile(model), context)
    check(context, model, model, want)


@scenario
def ddp_small_buckets(context: Context) -> None:
    """The buckets are so small that Dynamo's DDP optimizer splits the graph."""
    model = models.make(("relative", "pair")).to(context.device)
    want = wanted(context, model)
    with mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 4096):
        model = ddp(model, context, bucket_cap_mb=0.02)
        check(context, model, context.compile(model), want)


@scenario
def ddp_find_unused(context: Context) -> None:
    """No output depends on one of the parameters."""
    model = models.make(("bucket",)).to(context.device)
    want = wanted(context, model)
    model.unused = nn.Linear(3, 3, device=context.device)
    model = ddp(model, context, find_unused_parameters=True)
    function = context.compile(model)
    function(*context.data()).backward()
    got = models.gradients(model)
    models.check_gradients({n: g for n, g in got.items() if "unused" not in n}, want)
    assert all(not g.any() for n, g in got.items() if "unused" in n)


@scenario
def ddp_static_graph(context: Context) -> None:
    """There are two steps, and in the second DDP uses what it learned about the graph in the first."""
    model = models.make(("relative",)).to(context.device)
    want = wanted(context, model)
    model = ddp(model, context, static_graph=True)
    function = context.compile(model)
    for _ in range(2):
        model.zero_grad()
        check(context, model, function, want)


@scenario
def ddp_fp16_hook(context: Context) -> None:
    """Gradients are sent as fp16, so the bound is the precision of fp16."""
    model = models.make(("relative",)).to(context.device)
    want = wanted(context, model)
    model = ddp(model, context)
    model.register_comm_hook(None, fp16_compress_hook)
    check(context, model, context.compile(model), want, tolerance=1e-3)


@scenario
def ddp_compiled_optimizer(context: Context) -> None:
    """Three steps with a compiled optimizer lead to the same parameters as in float64."""
    model = models.make(("relative",)).to(context.device)
    exact = models.dense_copy(model, torch.float64)
    model = ddp(model, context)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, exact)]
    function, update = context.compile(model), context.compile(optimizers[0].step)
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        function(*context.data()).backward()
        exact(*context.all_data()).backward()
        update()
        optimizers[1].step()
    got = {models.plain_name(n): p.detach() for n, p in model.named_parameters()}
    models.check_gradients(got, {n: p.detach() for n, p in exact.named_parameters()})


@scenario
def fsdp_whole(context: Context) -> None:
    """All parameters are one group, and torch.compile is around the model."""
    model = models.make(("relative",)).to(context.device)
    want = wanted(context, model)
    fully_shard(model, mesh=context.mesh())
    check(context, model, context.compile(model), want)


@scenario
def fsdp_per_block(context: Context) -> None:
    """Each block is sharded and compiled, as trainers do, and the root is sharded too."""
    model = models.make().to(context.device)
    want = wanted(context, model)
    for block in model.blocks:
        block.compile(backend=context.backend)
        fully_shard(block, mesh=context.mesh())
    fully_shard(model, mesh=context.mesh())
    check(context, model, model, want)


@scenario
def fsdp_per_block_compiled_whole(context: Context) -> None:
    """Each block is sharded. torch.compile is around the root, and the graph breaks at FSDP's hooks."""
    model = models.make().to(context.device)
    want = wanted(context, model)
    for block in model.blocks:
        fully_shard(block, mesh=context.mesh())
    fully_shard(model, mesh=context.mesh())
    check(context, model, context.compile(model), want)


@scenario
def fsdp_bf16_policy(context: Context) -> None:
    """Parameters are cast to bf16 and gradients are reduced in fp32. The error of eager bf16 is the bound."""
    model = models.make(("relative",)).to(context.device)
    want = wanted(context, model)
    _, eager = models.reference(model, *context.all_data(), dtype=torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.compile(backend=context.backend)
        fully_shard(block, mesh=context.mesh(), mp_policy=policy)
    fully_shard(model, mesh=context.mesh(), mp_policy=policy)
    model(*context.data()).backward()
    got = models.gradients(model)
    assert all(g.dtype == torch.float32 for g in got.values())
    models.check_gradients(got, want, tolerance=5e-3, eager=eager)


@scenario
def fsdp_checkpointing(context: Context) -> None:
    """There is activation checkpointing inside each compiled, sharded block."""
    model = models.make(("relative",)).to(context.device)
    want = wanted(context, model)
    for i, block in enumerate(model.blocks):
        block = checkpoint_wrapper(block)
        block.compile(backend=context.backend)
        model.blocks[i] = fully_shard(block, mesh=context.mesh())
    fully_shard(model, mesh=context.mesh())
    check(context, model, model, want)


@scenario
def fsdp_distributed_checkpoint(context: Context) -> None:
    """All ranks save the state after a step, and another sharded, compiled model that loads it makes the same next step."""
    first, exact = models.make(("relative",)).to(context.device), models.make(("relative",)).to(context.device)
    want = wanted(context, exact)
    other = models.make(("relative",), seed=1).to(context.device)
    for model in (first, other):
        model.compile(backend=context.backend)
        fully_shard(model, mesh=context.mesh())
    first(*context.data()).backward()
    saved = get_model_state_dict(first)
    assert saved.keys() == exact.state_dict().keys()
    dcp.save(saved, checkpoint_id=context.folder / "checkpoint")
    loaded = copy.deepcopy(get_model_state_dict(other))
    dcp.load(loaded, checkpoint_id=context.folder / "checkpoint")
    set_model_state_dict(other, loaded)
    check(context, other, other, want)
