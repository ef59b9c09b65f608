"""The passes over graphs, in order, and the driver that runs them. It visits every graph, and can dump every step.

    stage "dynamo"     Dynamo's graph, before autograd
    stage "joint"      the joint graph of AOTAutograd (the whole graph, in inference), before it is partitioned
    stage "partition"  the same graph after Inductor's own passes over it
    stage "post_aot"   a forward or backward graph right before Inductor lowers it

A graph may contain others: the body of a checkpoint, a branch, a loop or a compiled region. The passes run on each of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule

from .attention import canonical, hoisting, kernel_dropout, layouts, no_mask
from .attention import cpu as dense_attention
from .attention.recognition import rewrite as recognition
from .casts import linears, together
from .casts import rewrite as casts
from .core import equal_graphs, joint_graph
from .core.dynamo_graph import graphs_in
from .core.pass_ import Pass
from .dump import Dump
from .gathers import cpu_indices, gathers, scatters
from .mlstm import cpu as dense_mlstm
from .mlstm import rewrite as mlstm
from .options import Options
from .scan import loops
from .scan import rewrite as scans

#: The passes in the order in which they run. Each rewrite is looked up when it runs, so that a test can replace it.
ORDER: tuple[Pass, ...] = (
    Pass(
        "attention_pattern",
        "dynamo",
        "recognises attention in plain PyTorch with learned tensors or a large mask, and replaces it by flex_attention",
        lambda gm, options: recognition.rewrite(gm, options),
    ),
    Pass(
        "score_mods",
        "dynamo",
        "rewrites score_mods that stock refuses (0-d captures, nested indexing, unused captures, ...)",
        lambda gm, options: canonical.rewrite(gm, options),
    ),
    Pass(
        "hoisting",
        "dynamo",
        "computes expressions of a score_mod that depend on less than a (query, key) pair once, as tables",
        lambda gm, options: hoisting.rewrite(gm, options),
    ),
    Pass(
        "layouts",
        "dynamo",
        "lays out captured tensors for the lookups of a score_mod: dims that vary last, indices in 32 bits",
        lambda gm, options: layouts.rewrite(gm, options),
    ),
    Pass(
        "attention_dropout",
        "dynamo",
        "draws the seed of a flex_attention with dropout, whose mask its kernels then compute from the positions",
        lambda gm, options: kernel_dropout.rewrite(gm, options),
        kernel_dropout.check,
    ),
    Pass(
        "time_loops",
        "dynamo",
        "recognises a linear recurrence in a Python loop over time, and replaces it by a scan",
        lambda gm, options: loops.rewrite(gm, options),
    ),
    Pass(
        "scans",
        "dynamo",
        "gives associative_scan in pointwise mode a correct gradient, in one pass back through time",
        lambda gm, options: scans.rewrite(gm, options),
    ),
    Pass(
        "mlstm_pattern",
        "dynamo",
        "recognises mLSTM in plain PyTorch and replaces it by the op mlstm",
        lambda gm, options: mlstm.rewrite(gm, options),
    ),
    Pass(
        "equal_graphs",
        "dynamo",
        "keeps one of equal score_mods, mask_mods and combine_fns, and drops those that were rewritten: less to compile",
        lambda gm, options: equal_graphs.rewrite(gm, options),
    ),
    Pass(
        "linears_together",
        "dynamo",
        "computes linear layers that read the same input (query, key and value) by one matmul, under autocast on a GPU",
        lambda gm, options: linears.rewrite(gm, options),
    ),
    Pass(
        "cpu_indices",
        "joint",
        "builds on the GPU an index that is computed on the CPU from constants (arange without a device) in each step",
        lambda build, options: cpu_indices.rewrite(build, options),
    ),
    Pass(
        "scatters",
        "joint",
        "sums scatter-adds (gradients of gathers) in fp32, rounds once, without atomics where provable or slower",
        lambda build, options: scatters.rewrite(build, options),
    ),
    Pass(
        "gathers",
        "joint",
        "changes gathers that read a large tensor several times: each row is read once and stored to all its indices",
        lambda build, options: gathers.rewrite(build, options),
    ),
    Pass(
        "casts",
        "joint",
        "removes round trips of casts (bf16 -> f32 -> bf16) through ops that only move values",
        lambda build, options: casts.rewrite(build, options),
    ),
    Pass(
        "out_dtype",
        "joint",
        "gives half-precision matmuls whose result is cast to fp32 and returned (weight gradients) an fp32 output",
        lambda build, options: casts.widen_matmuls(build, options),
    ),
    Pass(
        "no_mask",
        "partition",
        "makes constants of the block mask that flex_attention computes if there is none, which our kernels do not read",
        lambda build, options: no_mask.rewrite(build, options),
    ),
    Pass(
        "dense_attention",
        "post_aot",
        "turns flex_attention on CPU tensors into blocked dense math, which can be trained",
        lambda gm, options: dense_attention.rewrite(gm, options),
    ),
    Pass(
        "mlstm",
        "post_aot",
        "computes the part of the op mlstm that is quadratic in the length by fused kernels, on a CPU by blocked dense math",
        lambda gm, options: dense_mlstm.rewrite(gm, options),
    ),
    Pass(
        "casts_together",
        "post_aot",
        "casts the inputs of a graph that matmuls read in half precision (weights, biases) in groups, on a GPU",
        lambda gm, options: together.rewrite(gm, options),
    ),
)


def run(stage: str, gm: GraphModule, options: Options, dump: Dump) -> None:
    """Run the passes of a stage on ``gm`` and on every graph in it. The graphs are changed in place."""
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
    """Yield the argument of the passes of a stage: the module, or the builder that they share on a joint graph."""
    if stage not in ("joint", "partition"):
        yield module
        return
    with joint_graph.building(module.graph) as build:
        yield build
