"""Functions for lowerings on the graphs of score_mods and mask_mods: placeholders, properties, reads and addresses."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from ..core.fx import value_of
from ..core.subgraphs import expression
from ..torch_api.ir import inductor_ir, input_buffer
from ..torch_api.lowering import V
from ..torch_api.sizes import hint
from .bounds import call, clamp, in_range, interval, safe_reads, wrap_negative
from .captured_grads import Contribution, returning

aten = torch.ops.aten

_INDICES = tuple((name, torch.int32) for name in ("b", "h", "m", "n"))
#: If a tensor has more elements than this, its index arithmetic is done in 64 bits.
INT32_ELEMENTS = 2**31 - 1


def score_placeholders(device: torch.device, dtype: torch.dtype, gradient: bool = False) -> list[Any]:
    """Return the placeholders ``score, b, h, m, n`` and, for a joint graph, ``grad_score_mod``."""
    names = [("score", dtype), *_INDICES] + ([("grad_score_mod", dtype)] if gradient else [])
    return [input_buffer(name, kind, device) for name, kind in names]


def mask_placeholders(device: torch.device) -> list[Any]:
    """Return the placeholders ``b, h, m, n``."""
    return [input_buffer(name, kind, device) for name, kind in _INDICES]


def clamp_reads(module: GraphModule, extents: dict[Node, Any]) -> None:
    """Make every read of a captured tensor stay inside the tensor. Changes ``module``."""

    def inside(index: Node, size: Any) -> Node:
        return clamp(module.graph, index, size, expression(size), interval(index, extents))

    safe_reads(module, extents, inside)


def is_identity(module: GraphModule) -> bool:
    """Return whether a score_mod graph returns its score unchanged."""
    (out,) = module.graph.find_nodes(op="output")[0].args
    out = out[0] if isinstance(out, (list, tuple)) else out
    return out is module.graph.find_nodes(op="placeholder")[0]


def has_chained_reads(module: GraphModule) -> bool:
    """Return whether some captured tensor is read at an index that is computed from another read."""
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
    """Return whether a mask_mod graph is the one that BlockMask uses if there is no mask_mod (a constant True)."""
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
    """Return a graph that computes ``(offset, in_bounds)`` of a contribution, and whether ``in_bounds`` must be checked.

    The graph has the inputs of ``module``. ``offset`` is the offset of the element in a contiguous gradient of ``shape``.
    ``in_bounds`` is False if an index is outside, and then nothing may be written. The second result is False if it is
    proven that ``in_bounds`` is always True.
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
    return value_of(node).device


def is_wide(buffers: Sequence[Any]) -> bool:
    """Return whether some captured buffer has more elements than a 32-bit index can count."""
    for buffer in buffers:
        if isinstance(buffer, inductor_ir.IRNode):
            numel = sympy.prod(buffer.get_size())
            if not V.graph.sizevars.statically_known_leq(numel, INT32_ELEMENTS):
                return V.graph.sizevars.shape_env is None or not numel.free_symbols or _hint_is_wide(numel)
    return False


def _hint_is_wide(numel: Any) -> bool:
    return hint(numel) > INT32_ELEMENTS
