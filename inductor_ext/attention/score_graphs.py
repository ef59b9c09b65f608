"""Graphs of score_mods and mask_mods as a lowering sees them: placeholders, what they are, where they read and write."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from ..core.subgraphs import expression
from ..torch_api.ir import inductor_ir, input_buffer
from ..torch_api.lowering import V
from ..torch_api.sizes import hint
from .bounds import call, clamp, in_range, interval, safe_reads, wrap_negative
from .captured_grads import Contribution, returning

aten = torch.ops.aten

_INDICES = tuple((name, torch.int32) for name in ("b", "h", "m", "n"))
#: Index arithmetic is widened when a tensor has more elements than this.
INT32_ELEMENTS = 2**31 - 1


def score_placeholders(device: torch.device, dtype: torch.dtype, gradient: bool = False) -> list[Any]:
    """Placeholders ``score, b, h, m, n`` and, for a joint graph, ``grad_score_mod``."""
    names = [("score", dtype), *_INDICES] + ([("grad_score_mod", dtype)] if gradient else [])
    return [input_buffer(name, kind, device) for name, kind in names]


def mask_placeholders(device: torch.device) -> list[Any]:
    """Placeholders ``b, h, m, n``."""
    return [input_buffer(name, kind, device) for name, kind in _INDICES]


def clamp_reads(module: GraphModule, extents: dict[Node, Any]) -> None:
    """Make every read of a captured tensor stay inside it, in place."""

    def inside(index: Node, size: Any) -> Node:
        return clamp(module.graph, index, size, expression(size), interval(index, extents))

    safe_reads(module, extents, inside)


def is_identity(module: GraphModule) -> bool:
    """Whether a score_mod graph returns its score unchanged."""
    (out,) = module.graph.find_nodes(op="output")[0].args
    out = out[0] if isinstance(out, (list, tuple)) else out
    return out is module.graph.find_nodes(op="placeholder")[0]


def has_chained_reads(module: GraphModule) -> bool:
    """Whether some captured tensor is read at an index that is itself computed from a read."""
    read: set[Node] = set()
    for node in module.graph.nodes:
        inputs = node.all_input_nodes
        if node.target is aten.index.Tensor:
            if any(n in read for n in inputs):
                return True
            read.add(node)
        elif any(n in read for n in inputs):
            read.add(node)
    return False


def is_always_true(module: GraphModule) -> bool:
    """Whether a mask_mod graph is the one that BlockMask makes up when there is none (a constant True)."""
    (out,) = module.graph.find_nodes(op="output")[0].args
    out = out[0] if isinstance(out, (list, tuple)) else out
    constants = {aten.full.default, aten.new_full.default, aten.full_like.default}
    ones = {aten.ones.default, aten.new_ones.default, aten.ones_like.default}
    if out.op != "call_function":
        return False
    if out.target in constants:
        return bool(out.args[-1] if out.target is not aten.full_like.default else out.args[1])
    return out.target in ones


def address(
    module: GraphModule, contribution: Contribution, shape: Sequence[Any], extents: dict[Node, Any]
) -> tuple[GraphModule, bool]:
    """A graph of ``module``'s inputs that returns ``(offset, in_bounds)`` of a contribution, and whether to ask it.

    ``offset`` is the element's place in a contiguous gradient of ``shape``; ``in_bounds`` is False where an index lies
    outside, so that nothing is written there whatever the index says; the second result is False where it never is.
    """
    graph_module = returning(module, list(contribution.indices))
    graph = graph_module.graph
    output = graph.find_nodes(op="output")[0]
    placeholders = graph.find_nodes(op="placeholder")
    ranges = {
        p: extents[q] for p, q in zip(placeholders, module.graph.find_nodes(op="placeholder"), strict=True) if q in extents
    }
    checked = False
    wide = any(isinstance(s, torch.SymInt) for s in shape) or functools.reduce(lambda a, b: a * b, shape, 1) > INT32_ELEMENTS
    with graph.inserting_before(output):
        like = placeholders[1]
        in_bounds = graph.call_function(aten.full.default, ([], True), {"dtype": torch.bool, "device": _device(like)})
        offset = graph.call_function(
            aten.full.default, ([], 0), {"dtype": torch.int64 if wide else torch.int32, "device": _device(like)}
        )
        stride: Any = 1
        for index, size in reversed(list(zip(output.args[0], shape, strict=True))):
            proven = in_range(index, size, ranges)
            size = expression(size)
            if isinstance(index, Node):
                if not proven:
                    checked = True
                    index = wrap_negative(graph, index, size)
                    for bound, compare in ((0, aten.ge.Scalar), (size, aten.lt.Scalar)):
                        inside = call(graph, compare, index, bound, like=index, dtype=torch.bool)
                        in_bounds = call(graph, aten.logical_and.default, in_bounds, inside, like=inside)
                if wide:
                    index = graph.call_function(torch.ops.prims.convert_element_type.default, (index, torch.int64))
                index = graph.call_function(aten.mul.Tensor, (index, stride))
                offset = graph.call_function(aten.add.Tensor, (offset, index))
            else:
                offset = graph.call_function(aten.add.Tensor, (offset, (index + size if index < 0 else index) * stride))
            stride = stride * size
        output.args = ([offset, in_bounds],)
    graph.eliminate_dead_code()
    return graph_module, checked


def _device(node: Node) -> torch.device:
    return node.meta["val"].device


def is_wide(buffers: Sequence[Any]) -> bool:
    """Whether some captured buffer has more elements than a 32-bit index can count."""
    for buffer in buffers:
        if isinstance(buffer, inductor_ir.IRNode):
            numel = sympy.prod(buffer.get_size())
            if not V.graph.sizevars.statically_known_leq(numel, INT32_ELEMENTS):
                return V.graph.sizevars.shape_env is None or not numel.free_symbols or _hint_is_wide(numel)
    return False


def _hint_is_wide(numel: Any) -> bool:
    return hint(numel) > INT32_ELEMENTS
