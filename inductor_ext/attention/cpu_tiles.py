"""score_mods, mask_mods and their joint graphs as functions of tiles, for the blocked dense math on the CPU.

Each is a scalar FX graph that ``vmap`` evaluates over index grids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..core.fx import HALF, value_of
from .bounds import in_range, safe_reads
from .calls import lengths
from .captured_grads import JointGraph
from .score_mod import ScoreMod, output_nodes, returning

aten = torch.ops.aten


def without_narrowing(module: GraphModule) -> GraphModule:
    """Return ``module`` without casts from fp32 to half precision.

    The module was traced in the query's dtype, and the scores are fp32 here. Other casts become ``_to_copy``, because
    Inductor's ``convert_element_type`` has no vmap rule.
    """
    module = returning(module, output_nodes(module.graph))
    for node in list(module.graph.nodes):
        if node.target is aten._to_copy.default:
            dtype = node.kwargs.get("dtype")
        elif node.target is torch.ops.prims.convert_element_type.default:
            dtype = node.args[1]
            node.target, node.args, node.kwargs = aten._to_copy.default, node.args[:1], {"dtype": dtype}
        else:
            continue
        if dtype in HALF and value_of(node.args[0]).is_floating_point():
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    _widen_reads(module)
    module.recompile()
    return module


def _widen_reads(module: GraphModule) -> None:
    """Cast what is read from half-precision tensors to fp32, because everything here is computed in fp32."""
    for read in list(module.graph.find_nodes(op="call_function", target=aten.index.Tensor)):
        if value_of(read).dtype in HALF:
            with module.graph.inserting_after(read):
                wide = module.graph.call_function(aten._to_copy.default, (read,), {"dtype": torch.float32})
            wide.meta = {**read.meta, "val": value_of(read).float()}
            read.replace_all_uses_with(wide, delete_user_cb=lambda user, new=wide: user is not new)


def _guard_reads(module: GraphModule, extents: dict[Node, Any]) -> None:
    """Add an input ``visible``. Where it is False, read at index 0, so that masked positions cannot be out of range."""
    placeholders = module.graph.find_nodes(op="placeholder")
    with module.graph.inserting_after(placeholders[-1]):
        visible = module.graph.placeholder("visible")
    safe_reads(module, extents, lambda index, _: module.graph.call_function(torch.where, (visible, index, 0)))


def scalar_graph(gm: GraphModule, graph: Node, node: Node, inputs_of: Callable[[Graph], ScoreMod]) -> GraphModule:
    """Turn a score_mod (``ScoreMod.of``) or mask_mod (``ScoreMod.of_mask``) into ``function(..., *captured, visible)``."""
    module = without_narrowing(getattr(gm, graph.target))
    _guard_reads(module, inputs_of(module.graph).ranges(lengths(node)))
    return module


@dataclass(frozen=True)
class JointFunction:
    """The joint graph as one function that returns the gradient of the score, and value and indices of each contribution.

    owners: the captured tensor of each contribution. ranks: the number of its indices. reduced: the axes of (b, h, q, k) on
    which its indices do not depend. trusted: for each index, whether it is proven to be in range. wanted: whether each
    captured tensor needs a gradient.
    """

    module: GraphModule
    owners: tuple[int, ...]
    ranks: tuple[int, ...]
    reduced: tuple[tuple[int, ...], ...]
    trusted: tuple[tuple[bool, ...], ...]
    wanted: tuple[bool, ...]

    @classmethod
    def of(cls, joint: JointGraph, node: Node) -> JointFunction:
        """Make the function from the joint graph of one flex_attention_backward node."""
        ranges = joint.inputs.ranges(lengths(node))
        flat = [(i, c) for i, contributions in enumerate(joint.captured) for c in contributions or ()]
        outputs: list[Any] = [joint.grad_score]
        for _, contribution in flat:
            outputs += [contribution.value, *contribution.indices]
        module = returning(joint.module, outputs)
        _guard_reads(module, ScoreMod.of_joint(module.graph).ranges(lengths(node)))
        return cls(
            module,
            owners=tuple(i for i, _ in flat),
            ranks=tuple(len(c.indices) for _, c in flat),
            reduced=tuple(tuple(axis for axis, used in enumerate(c.axes) if not used) for _, c in flat),
            trusted=tuple(tuple(in_range(x, s, ranges) for x, s in zip(c.indices, c.shape, strict=True)) for _, c in flat),
            wanted=tuple(c is not None for c in joint.captured),
        )


def over_grid(function: Callable[..., Any], tiles: Sequence[Tensor], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
    """Evaluate a scalar ``function(*tiles, b, h, q, k)`` on tiles [B, H, Q, K] and the four index vectors."""
    t = (0,) * len(tiles)
    for in_dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=t + in_dims)
    return function(*tiles, b, h, q, k)
