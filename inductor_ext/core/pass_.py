"""A pass: one rewrite of a graph, with a name. The driver (``passes.py``) does everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch.fx import GraphModule

from ..options import Options
from .joint_graph import Builder

Stage = Literal["dynamo", "joint", "partition", "post_aot"]


@dataclass(frozen=True)
class Pass:
    """One rewrite.

    name: the name in ``disable``, reports, dumps and the documents. stage: when it runs. what: one line for the documents.
    run: rewrites a graph in place. It takes a GraphModule, or for the joint graph the ``Builder`` that the passes of a
    stage share there, and the options. It does not have to ask whether it is enabled, check the graph, or recompile it.
    check: raises an error if the result would be wrong with these options, whether the pass is enabled or not.
    """

    name: str
    stage: Stage
    what: str
    run: Callable[[Any, Options], None]
    check: Callable[[Any, Options], None] | None = None

    def __call__(self, target: GraphModule | Builder, options: Options) -> None:
        """Rewrite ``target`` if the pass is enabled, and check the new graph. Raises a RuntimeError if that is broken."""
        if self.check is not None:
            self.check(target, options)
        if not options.enabled(self.name):
            return
        self.run(target, options)
        target.graph.lint()
        if isinstance(target, GraphModule):
            target.recompile()
