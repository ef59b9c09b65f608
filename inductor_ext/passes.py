"""The passes over graphs, in order, and the one driver that runs them: every graph is visited, every step can be dumped.

    stage "dynamo"     Dynamo's graph, before autograd
    stage "joint"      the joint graph of AOTAutograd (the whole graph, in inference), before it is partitioned
    stage "post_aot"   a forward or backward graph right before Inductor lowers it

A graph may hold others, as the body of a checkpoint, a branch, a loop or a compiled region: the passes run on each of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from .attention import canonical, hoisting
from .attention import cpu as dense_attention
from .casts import rewrite as casts
from .core import joint_graph
from .core.dynamo_graph import graphs_in
from .dump import Dump
from .gathers import gathers, scatters
from .mlstm import cpu as dense_mlstm
from .mlstm import rewrite as mlstm
from .options import PASSES, Options
from .scan import rewrite as scans


@dataclass(frozen=True)
class Pass:
    """One rewrite: its name, as ``disable`` and reports have it, its stage, and what rewrites one graph in place.

    ``run`` takes a GraphModule and the options; on the joint graph a ``joint_graph.Builder`` in place of the module.
    """

    name: str
    stage: str
    run: Callable[[Any, Options], None]

    @property
    def what(self) -> str:
        """What the pass does, in one line."""
        return PASSES[self.name]


#: The rewrites are looked up when they run, so that a test can watch one.
ORDER: tuple[Pass, ...] = (
    Pass("score_mods", "dynamo", lambda gm, own: canonical.rewrite(gm, own)),
    Pass("hoisting", "dynamo", lambda gm, own: hoisting.rewrite(gm, own)),
    Pass("scans", "dynamo", lambda gm, own: scans.rewrite(gm, own)),
    Pass("mlstm_pattern", "dynamo", lambda gm, own: mlstm.rewrite(gm, own)),
    Pass("scatters", "joint", lambda build, own: scatters.rewrite(build, own)),
    Pass("gathers", "joint", lambda build, own: gathers.rewrite(build, own)),
    Pass("casts", "joint", lambda build, own: casts.rewrite(build, own)),
    Pass("dense_attention", "post_aot", lambda gm, own: dense_attention.rewrite(gm, own)),
    Pass("mlstm", "post_aot", lambda gm, own: dense_mlstm.rewrite(gm, own)),
)


def run(stage: str, gm: GraphModule, own: Options, dump: Dump) -> None:
    """Run the passes of a stage, in place, on ``gm`` and on every graph in it."""
    dump.graph(gm, stage)
    for module in graphs_in(gm):
        with _target(stage, module) as target:
            for each in ORDER:
                if each.stage == stage and target is not None:
                    each.run(target, own)
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
