"""Scenarios that split the model or the sequence: tensor, context and expert parallelism."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from . import model as models
from .model import EXPERTS, HEADS, LENGTH, TOPK, WIDTH, ScoreMod
from .worker import Context

SCENARIOS: dict[str, Callable[[Context], None]] = {}


def scenario(function: Callable[[Context], None]) -> Callable[[Context], None]:
    """Add a function to the table of scenarios."""
    SCENARIOS[function.__name__] = function
    return function


# ---------------------------------------------------------------- tensor parallel: each rank has its own heads


class ShardedBias(models.Attention):
    """The bias and the temperature are DTensors sharded by head. The score_mod captures this rank's part."""

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, WIDTH], the same on every rank -> [B, S, WIDTH]."""
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = self.attend(q, k, v, self.own_score_mod())
        return self.out(y.transpose(1, 2).flatten(2))

    def own_score_mod(self) -> ScoreMod:
        """The score_mod for this rank's heads, which are counted from 0."""
        return self.score_mod(self.bias.to_local(), self.temperature.to_local())


class ReplicatedBias(ShardedBias):
    """Every rank has the whole bias and reads the part of its heads, so its gradient is a partial sum."""

    first_head = 0

    def own_score_mod(self) -> ScoreMod:
        """The score_mod for this rank's heads, which are counted from ``first_head``."""
        bias, temperature = (x.to_local(grad_placements=[Partial()]) for x in (self.bias, self.temperature))
        whole, first = self.score_mod(bias, temperature), self.first_head
        return lambda s, b, h, q, k: whole(s, b, h + first, q, k)


def tensor_parallel(context: Context, kind: str, attention: type[models.Attention]) -> None:
    """Compare one step of the parallel model, whose ranks get the same data, with float64."""
    model = models.make((kind,)).to(context.device)
    tokens = context.on_device(*models.data())
    _, want = models.reference(model, *tokens)
    mesh = context.mesh()
    plan = {name: ColwiseParallel() for name in ("query", "key", "value")} | {"out": RowwiseParallel()}
    for block in model.blocks:
        block.attention.__class__ = attention
        block.attention.first_head = context.rank * HEADS // context.world
        parallelize_module(block.attention, mesh, plan)
        for name in ("bias", "temperature"):
            tensor = getattr(block.attention, name).detach()
            head_dim = tensor.shape.index(HEADS)
            placement = Replicate() if attention is ReplicatedBias else Shard(head_dim)
            setattr(block.attention, name, nn.Parameter(distribute_tensor(tensor, mesh, [placement])))
    context.compile(model)(*tokens).backward()
    models.check_gradients(models.gradients(model), want)


@scenario
def tp_bias_sharded_by_head(context: Context) -> None:
    """The bias is t[h, q - k], and t is sharded by row."""
    tensor_parallel(context, "relative", ShardedBias)


@scenario
def tp_bucket_bias_sharded_by_head(context: Context) -> None:
    """The bias is t[bucket(q - k), h], and t is sharded by column."""
    tensor_parallel(context, "bucket", ShardedBias)


@scenario
def tp_bias_replicated(context: Context) -> None:
    """Every rank has the whole table, and reads it at an offset."""
    tensor_parallel(context, "relative", ReplicatedBias)


# ---------------------------------------------------------------- context parallel: each rank has its own queries


class OwnQueries(models.Attention):
    """Keys and values are gathered from all ranks. This rank's queries begin at ``offset``, an int or a tensor."""

    group: object = None
    offset: int | Tensor = 0

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S / world, WIDTH] -> [B, S / world, WIDTH]."""
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.query, self.key, self.value))
        k, v = (all_gather_tensor_autograd(t.contiguous(), gather_dim=2, group=self.group) for t in (k, v))
        whole, offset = self.score_mod(self.bias, self.temperature), self.offset
        y = self.attend(q, k, v, lambda s, b, h, q, k: whole(s, b, h, q + offset, k))
        return self.out(y.transpose(1, 2).flatten(2))


def context_parallel(context: Context, kind: str, as_tensor: bool) -> None:
    """Check one step on this rank's part of every sequence. The gradients are summed over the ranks explicitly."""
    model = models.make((kind,)).to(context.device)
    tokens, targets = context.on_device(*models.data())
    _, want = models.reference(model, tokens, targets)
    length = LENGTH // context.world
    offset = context.rank * length
    share = slice(offset, offset + length)
    for block in model.blocks:
        block.attention.__class__ = OwnQueries
        block.attention.group = dist.group.WORLD
        block.attention.offset = torch.tensor(offset, device=context.device) if as_tensor else offset
    (context.compile(model)(tokens[:, share], targets[:, share]) / context.world).backward()
    got = models.gradients(model)
    for name in sorted(got):
        dist.all_reduce(got[name])
    models.check_gradients(got, want)


@scenario
def cp_offset_as_int(context: Context) -> None:
    """The bias is t[h, q + offset - k], and the offset is a Python int."""
    context_parallel(context, "relative", as_tensor=False)


@scenario
def cp_offset_as_tensor(context: Context) -> None:
    """The bias is t[h, q + offset - k], and the offset is a 0-d tensor."""
    context_parallel(context, "relative", as_tensor=True)


@scenario
def cp_pair_bias(context: Context) -> None:
    """The bias is t[h, q + offset, k], and each rank reads its rows of the table."""
    context_parallel(context, "pair", as_tensor=False)


# ---------------------------------------------------------------- expert parallel: each rank has its own experts


class OwnExperts(models.Experts):
    """Rows are sent to the rank of their expert and back, padded to the largest number that a rank can send to another."""

    group: object = None
    world = 1

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x [B, S, WIDTH], tokens [B, S], this rank's -> [B, S, WIDTH]."""
        rows = x.flatten(0, 1)
        weight, chosen = self.choose(rows, tokens)
        order = chosen.flatten().argsort(stable=True)
        source, expert = order // TOPK, chosen.flatten()[order]
        outputs = self.elsewhere(rows[source], expert)
        return torch.zeros_like(rows).index_add(0, source, outputs * weight.flatten()[order, None]).view_as(x)

    def elsewhere(self, rows: Tensor, expert: Tensor) -> Tensor:
        """The results of the experts, each on its rank, for the rows, which are sorted by expert."""
        most = len(rows)
        rank = expert // (EXPERTS // self.world)
        offset = torch.arange(most, device=rows.device) - torch.searchsorted(rank, rank)
        slot = rank * most + offset
        sent = torch.zeros(self.world * most, WIDTH, dtype=rows.dtype, device=rows.device).index_copy(0, slot, rows)
        kind = torch.zeros(self.world * most, dtype=torch.int64, device=rows.device).index_copy(0, slot, expert)
        received = all_to_all_single_autograd(sent, None, None, self.group)
        kind = all_to_all_single_autograd(kind, None, None, self.group)
        returned = all_to_all_single_autograd(self.here(received, kind), None, None, self.group)
        return returned[slot]

    def here(self, rows: Tensor, expert: Tensor) -> Tensor:
        """The results of this rank's experts for the rows that it received."""
        choices = F.one_hot(expert % (EXPERTS // self.world), EXPERTS // self.world).to(rows.dtype)
        hidden = F.silu(torch.einsum("nd,edf->nef", rows, self.up)) * choices[..., None]
        return torch.einsum("nef,efd->nd", hidden, self.down)


class ExactSplits(OwnExperts):
    """Only the rows that are needed are sent. The host reads their number from the data, and the graph breaks there."""

    def elsewhere(self, rows: Tensor, expert: Tensor) -> Tensor:
        """The results of the experts, each on its rank, for the rows, which are sorted by expert."""
        counts = F.one_hot(expert // (EXPERTS // self.world), self.world).sum(0)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        outgoing, incoming = counts.tolist(), theirs.tolist()
        received = all_to_all_single_autograd(rows, incoming, outgoing, self.group)
        kind = all_to_all_single_autograd(expert, incoming, outgoing, self.group)
        return all_to_all_single_autograd(self.here(received, kind), outgoing, incoming, self.group)


def expert_parallel(
    context: Context, experts: type[models.Experts], replaced: Callable[[Tensor], Tensor] = torch.clone
) -> None:
    """Check one step on this rank's tokens. Gradients of parameters that every rank has are averaged explicitly.

    replaced: other tokens for those of the data.
    """
    model = models.make(("relative",)).to(context.device)
    (tokens, targets), (all_tokens, all_targets) = context.data(), context.all_data()
    _, want = models.reference(model, replaced(all_tokens), all_targets)
    share = EXPERTS // context.world
    experts_here = slice(context.rank * share, (context.rank + 1) * share)
    for block in model.blocks:
        block.experts.__class__ = experts
        block.experts.group, block.experts.world = dist.group.WORLD, context.world
        for name in ("up", "down"):
            setattr(block.experts, name, nn.Parameter(getattr(block.experts, name).detach()[experts_here].clone()))
    (context.compile(model)(replaced(tokens), targets) / context.world).backward()
    got = models.gradients(model)
    for name in sorted(got):
        if name.endswith(("experts.up", "experts.down")):
            want[name] = want[name][experts_here]
        else:
            dist.all_reduce(got[name])
    models.check_gradients(got, want)


@scenario
def ep_padded(context: Context) -> None:
    """All ranks send the same number of rows, so there is one graph."""
    expert_parallel(context, OwnExperts)


@scenario
def ep_exact_splits(context: Context) -> None:
    """The number of rows that a rank sends depends on the data."""
    expert_parallel(context, ExactSplits)


@scenario
def ep_ranks_without_rows(context: Context) -> None:
    """All tokens choose experts of the first rank, so that the others receive no rows, and send only to it."""
    tokens = torch.arange(models.VOCABULARY, device=context.device)
    first = tokens[(models.experts_of(tokens) < EXPERTS // context.world).all(1)]
    assert len(first) > 1
    expert_parallel(context, ExactSplits, lambda t: first[t % len(first)])
