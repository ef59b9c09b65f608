"""What a pass is: a rewrite of one graph, with a name. Everything else about it is done by whoever runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch.fx import GraphModule

from ..options import Options
from .joint_graph import Builder

Stage = Literal["dynamo", "joint", "post_aot"]


@dataclass(frozen=True)
class Pass:
    """One rewrite.

    name: as ``disable``, reports, dumps and the documents have it. stage: when it runs. what: one line for the documents.
    run: rewrites a graph in place; it takes a GraphModule, or on the joint graph the ``Builder`` that passes share there,
    and the options. It need not ask whether it is enabled, check the graph, or compile its code again.
    """

    name: str
    stage: Stage
    what: str
    run: Callable[[Any, Options], None]

    def __call__(self, target: GraphModule | Builder, options: Options) -> None:
        """Rewrite ``target`` if the pass is enabled, and check what came out. Raises a RuntimeError for a broken graph."""
        if not options.enabled(self.name):
            return
        self.run(target, options)
        target.graph.lint()
        if isinstance(target, GraphModule):
            target.recompile()
