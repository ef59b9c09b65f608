"""The operands of the flex_attention ops by name. They come from a node of a graph or from the arguments of a lowering."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..core.fx import value_of
from ..torch_api.higher_order import FlexBlockMask
from ..torch_api.ir import realize, realize_rows, rounded, with_heads_outside


class _Call:
    """The base of both calls. Their fields are the operands in the order of the op."""

    def operands(self) -> tuple[Any, ...]:
        """The operands in the order of the op."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def mask(self) -> FlexBlockMask:
        """The parts of the block mask by name."""
        return FlexBlockMask.of(self.block_mask)

    def realized(self, *names: str, mask: bool) -> Any:
        """Return the same call of IR nodes, after realizing those in ``names`` and the captured tensors.

        ``mask``: also those of the block mask.
        """
        parts = self.mask
        given = dict(zip(names, realize_rows([getattr(self, name) for name in names]), strict=True))
        return dataclasses.replace(
            self,
            **given,
            block_mask=FlexBlockMask(*realize(parts[:-1]), parts.mask_mod) if mask else parts,
            captured=rounded(with_heads_outside(self.captured)),
            mask_captured=rounded(self.mask_captured),
        )


@dataclass(frozen=True)
class ForwardCall(_Call):
    """The operands of ``flex_attention``.

    score_mod: the node that refers to its graph, or in a lowering the graph itself. captured, mask_captured: the tensors
    that score_mod and mask_mod read.
    """

    query: Any
    key: Any
    value: Any
    score_mod: Any
    block_mask: Any
    scale: float
    kernel_options: dict[str, Any]
    captured: Any = ()
    mask_captured: Any = ()

    @classmethod
    def of(cls, node: Node) -> ForwardCall:
        """Return the operands of a node of a graph."""
        return cls(*node.args)

    @property
    def extents(self) -> list[Any]:
        """The numbers of values of b, h, q and k, for the operands of a node of Dynamo's graph."""
        query, key = value_of(self.query), value_of(self.key)
        return [*query.shape[:3], key.shape[2]]


@dataclass(frozen=True)
class BackwardCall(_Call):
    """The operands of ``flex_attention_backward``.

    They are the operands of the forward, its results, the gradients of the results (None if there is no gradient) and the
    joint graph of the score_mod. ``logsumexp`` is in base 2.
    """

    query: Any
    key: Any
    value: Any
    out: Any
    logsumexp: Any
    grad_out: Any
    grad_logsumexp: Any
    score_mod: Any
    joint_graph: Any
    block_mask: Any
    scale: float
    kernel_options: dict[str, Any]
    captured: Any
    mask_captured: Any

    @classmethod
    def of(cls, node: Node) -> BackwardCall:
        """Return the operands of a node of a graph."""
        return cls(*node.args)


def lengths(node: Node) -> list[Any]:
    """Return the numbers of values of b, h, q and k, for a node of either op that was traced with fake tensors."""
    query, key = (value_of(node.args[i]) for i in (0, 1))
    return [query.shape[0], query.shape[1], query.shape[2], key.shape[2]]
