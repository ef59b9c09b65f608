"""The graphs of score_mods, mask_mods and their gradients: inputs by name, results, and copies that return other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node


@dataclass(frozen=True)
class ScoreMod:
    """The placeholders of a graph over one score.

    A score_mod takes ``(score, b, h, q, k, *captured)``. A mask_mod takes the same without the score. The joint graph of a
    score_mod returns gradients, and takes the gradient of the modified score after ``k``. An input that a graph does not
    take is None.
    """

    score: Node | None
    b: Node
    h: Node
    q: Node
    k: Node
    grad_score: Node | None
    captured: tuple[Node, ...]

    @classmethod
    def of(cls, graph: Graph) -> ScoreMod:
        """Return the inputs of a score_mod."""
        score, b, h, q, k, *captured = graph.find_nodes(op="placeholder")
        return cls(score, b, h, q, k, None, tuple(captured))

    @classmethod
    def of_mask(cls, graph: Graph) -> ScoreMod:
        """Return the inputs of a mask_mod."""
        b, h, q, k, *captured = graph.find_nodes(op="placeholder")
        return cls(None, b, h, q, k, None, tuple(captured))

    @classmethod
    def of_joint(cls, graph: Graph) -> ScoreMod:
        """Return the inputs of a joint graph."""
        score, b, h, q, k, grad_score, *captured = graph.find_nodes(op="placeholder")
        return cls(score, b, h, q, k, grad_score, tuple(captured))

    @property
    def positions(self) -> tuple[Node, Node, Node, Node]:
        """The inputs b, h, q and k."""
        return self.b, self.h, self.q, self.k

    def ranges(self, lengths: Sequence[Any]) -> dict[Node, Any]:
        """Return a dict from b, h, q and k to the number of values of each."""
        return dict(zip(self.positions, lengths, strict=True))


def output_nodes(graph: Graph) -> list[Any]:
    """Return the nodes that a graph returns, as a flat list."""
    (out,) = graph.find_nodes(op="output")[0].args
    return list(out) if isinstance(out, (list, tuple)) else [out]


def returning(module: GraphModule, outputs: Sequence[Any]) -> GraphModule:
    """Return a copy of ``module`` without dead code, with the same inputs, that returns ``outputs`` (nodes of it)."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.graph_copy(module.graph, copies)
    graph.output([copies[o] if isinstance(o, Node) else o for o in outputs])
    graph.eliminate_dead_code()
    return GraphModule(module, graph)
