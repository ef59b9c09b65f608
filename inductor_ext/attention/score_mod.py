"""The inputs of a score_mod's graph by name, for each of the forms of that graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node


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
