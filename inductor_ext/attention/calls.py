"""The operands of the flex_attention ops by name, from a node of a graph or from a lowering's arguments."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..torch_api.higher_order import FlexBlockMask
from ..torch_api.ir import realize


class _Call:
    """What both calls have in common: they are made of operands in the order of the op."""

    def operands(self) -> tuple[Any, ...]:
        """The operands in the order of the op."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def mask(self) -> FlexBlockMask:
        """The block mask with names for its parts."""
        return FlexBlockMask.of(self.block_mask)

    def realized(self, *names: str) -> Any:
        """The same call of IR nodes, those in ``names`` and all that is captured or in the block mask in buffers."""
        mask = self.mask
        given = dict(zip(names, realize([getattr(self, name) for name in names]), strict=True))
        return dataclasses.replace(
            self,
            **given,
            block_mask=FlexBlockMask(*realize(mask[:-1]), mask.mask_mod),
            captured=realize(self.captured),
            mask_captured=realize(self.mask_captured),
        )


@dataclass(frozen=True)
class ForwardCall(_Call):
    """The operands of ``flex_attention``.

    score_mod: the node that names its graph, or the graph itself in a lowering. captured, mask_captured: the tensors that
    score_mod and mask_mod read.
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
        """The operands of a node, as they stand in its graph."""
        return cls(*node.args)


@dataclass(frozen=True)
class BackwardCall(_Call):
    """The operands of ``flex_attention_backward``.

    These are the forward's, its results, their gradients (None where there is none) and the joint graph of the score_mod.
    ``logsumexp`` is in base 2.
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
        """The operands of a node, as they stand in its graph."""
        return cls(*node.args)


def lengths(node: Node) -> list[Any]:
    """How many values b, h, q and k take in a node of either op that was traced with fake tensors."""
    query, key = (node.args[i].meta["val"] for i in (0, 1))
    return [query.shape[0], query.shape[1], query.shape[2], key.shape[2]]
