"""The passes over graphs, in order, and the one driver that runs them: every graph is visited, every step can be dumped.

    stage "dynamo"     Dynamo's graph, before autograd
    stage "joint"      the joint graph of AOTAutograd (the whole graph, in inference), before it is partitioned
    stage "post_aot"   a forward or backward graph right before Inductor lowers it

A graph may hold others, as the body of a checkpoint, a branch, a loop or a compiled region: the passes run on each of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule

from .attention import canonical, hoisting
from .attention import cpu as dense_attention
from .casts import rewrite as casts
from .core import joint_graph
from .core.dynamo_graph import graphs_in
from .core.pass_ import Pass
from .dump import Dump
from .gathers import gathers, scatters
from .mlstm import cpu as dense_mlstm
from .mlstm import rewrite as mlstm
from .options import Options
from .scan import rewrite as scans

#: In the order in which they run. The rewrites are looked up when they run, so that a test can watch one.
ORDER: tuple[Pass, ...] = (
    Pass(
        "score_mods",
        "dynamo",
        "rewrite of score_mods that stock refuses (0-d captures, nested indexing, unused captures, ...)",
        lambda gm, options: canonical.rewrite(gm, options),
    ),
    Pass(
        "hoisting",
        "dynamo",
        "expressions of a score_mod that depend on less than a (query, key) pair, computed once as tables",
        lambda gm, options: hoisting.rewrite(gm, options),
    ),
    Pass(
        "scans",
        "dynamo",
        "associative_scan in pointwise mode: a gradient that is right, in one pass back through time",
        lambda gm, options: scans.rewrite(gm, options),
    ),
    Pass(
        "mlstm_pattern",
        "dynamo",
        "mLSTM in plain PyTorch, recognised and replaced by the op mlstm",
        lambda gm, options: mlstm.rewrite(gm, options),
    ),
    Pass(
        "scatters",
        "joint",
        "scatter-adds (gradients of gathers): fp32 sums rounded once, no atomics where provable or slower",
        lambda build, options: scatters.rewrite(build, options),
    ),
    Pass(
        "gathers",
        "joint",
        "gathers that read a large tensor several times over: each row read once and stored wherever it goes",
        lambda build, options: gathers.rewrite(build, options),
    ),
    Pass(
        "casts",
        "joint",
        "round trips of casts (bf16 -> f32 -> bf16) through ops that only move values, removed",
        lambda build, options: casts.rewrite(build, options),
    ),
    Pass(
        "out_dtype",
        "joint",
        "half-precision matmuls whose result is cast to fp32 and returned (weight gradients): fp32 output",
        lambda build, options: casts.widen_matmuls(build, options),
    ),
    Pass(
        "dense_attention",
        "post_aot",
        "flex_attention on CPU tensors as blocked dense math, which trains",
        lambda gm, options: dense_attention.rewrite(gm, options),
    ),
    Pass(
        "mlstm",
        "post_aot",
        "what is quadratic in the length of the op mlstm: fused kernels, and blocked dense math on a CPU",
        lambda gm, options: dense_mlstm.rewrite(gm, options),
    ),
)


def run(stage: str, gm: GraphModule, options: Options, dump: Dump) -> None:
    """Run the passes of a stage, in place, on ``gm`` and on every graph in it."""
    dump.graph(gm, stage)
    for module in graphs_in(gm):
        with _target(stage, module) as target:
            for each in ORDER:
                if each.stage == stage and target is not None:
                    each(target, options)
                    dump.graph(gm, f"{stage}_{each.name}")
        if module is not gm:
            module.recompile()


@contextlib.contextmanager
def _target(stage: str, module: GraphModule) -> Iterator[Any]:
    """What the passes of a stage take: the module itself, or the builder that they share on a joint graph."""
    if stage != "joint":
        yield module
        return
    with joint_graph.building(module.graph) as build:
        yield build
