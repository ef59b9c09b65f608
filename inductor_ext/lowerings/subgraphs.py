"""score_mods, mask_mods and their gradients as scalar subgraphs that a template inlines.

A subgraph takes the score (and its gradient) and b, h, q, k as 0-d placeholders, which the template replaces by tiles, and
the captured tensors as ordinary buffers. Whatever buffer its lowering needs (it depends on captured tensors only) is
registered on the base graph, so that its name is unique in the whole model.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ..analysis.bounds import call, clamp, in_range, interval, safe_reads, wrap_negative
from ..analysis.captured_grads import Contribution, returning, shape_of
from ..compat import PointwiseSubgraphLowering, V, input_buffer, ir, lowerings, trace
from ..ops.sources import function_of

aten = torch.ops.aten

_INDICES = tuple((name, torch.int32) for name in ("b", "h", "m", "n"))
#: Index arithmetic is widened when a tensor has more elements than this.
INT32_ELEMENTS = 2**31 - 1


class _ScalarLowering(PointwiseSubgraphLowering):
    """Lowers a scalar FX graph; buffers that do not depend on a placeholder go to the base graph."""

    def __init__(self, module: GraphModule, placeholders: Sequence[Any]) -> None:
        super().__init__(module, root_graph_lowering=V.graph)
        self.placeholder_names = frozenset(p.get_name() for p in placeholders)
        self.device = placeholders[0].get_device()

    def register_buffer(self, buffer: Any, *, set_name: bool = False) -> str:
        reads = {dep.name for dep in buffer.get_reads()} if isinstance(buffer, ir.ComputedBuffer) else set()
        if reads & self.placeholder_names:
            return super().register_buffer(buffer, set_name=set_name)
        base = self.root_graph
        while isinstance(base, PointwiseSubgraphLowering):
            base = base.root_graph
        return base.register_buffer(buffer, set_name=set_name)

    def get_attr(self, target: str, args: Any, kwargs: dict[str, Any]) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return lowerings[aten.full]([], value.item(), dtype=value.dtype, device=self.device)
        return value


def score_placeholders(device: torch.device, dtype: torch.dtype, gradient: bool = False) -> list[Any]:
    """Placeholders ``score, b, h, m, n`` and, for a joint graph, ``grad_score_mod``."""
    names = [("score", dtype), *_INDICES] + ([("grad_score_mod", dtype)] if gradient else [])
    return [input_buffer(name, kind, device) for name, kind in names]


def mask_placeholders(device: torch.device) -> list[Any]:
    """Placeholders ``b, h, m, n``."""
    return [input_buffer(name, kind, device) for name, kind in _INDICES]


def inline(module: GraphModule, placeholders: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
    """Lower ``module(*placeholders, *captured)`` to one nameless ComputedBuffer an output, ready to be inlined."""
    lowering = _ScalarLowering(module, placeholders)
    with V.set_graph_handler(lowering):
        lowering.run(*placeholders, *captured)
    return [_computed(out, lowering.device) for out in pytree.tree_leaves(lowering.graph_outputs)]


def of_source(source: str, operands: Mapping[str, torch.dtype], device: torch.device) -> list[Any]:
    """The results of a function given as its source (``ops.sources``) as subgraphs of its operands, which are tiles."""
    with V.fake_mode:
        examples = [torch.empty((), dtype=dtype, device=device) for dtype in operands.values()]
        module = trace(function_of(source, device), examples)
    return inline(module, [input_buffer(name, dtype, device) for name, dtype in operands.items()], [])


def _computed(box: Any, device: torch.device) -> Any:
    data = box.data.data if isinstance(box.data, ir.StorageBox) else None
    if (
        not isinstance(data, (ir.Pointwise, ir.InputBuffer))
        or box.get_size()
        or (isinstance(data, ir.InputBuffer) and data.get_name() in V.graph.graph_inputs)
    ):
        loader, rank = box.make_loader(), len(box.get_size())
        data = ir.Pointwise.create(
            device=device,
            dtype=box.get_dtype(),
            inner_fn=functools.partial(lambda load, rank, _: load([sympy.Integer(0)] * rank), loader, rank),
            ranges=[],
        ).data.data
    buffer = ir.ComputedBuffer(
        name=None,
        layout=ir.FlexibleLayout(device=device, dtype=box.get_dtype(), size=[]),
        data=data,
    )
    buffer.freeze_layout()
    return buffer


def expression(size: Any) -> Any:
    """A size as the lowering takes it: an int, or the sympy expression of a symbolic one."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


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


class _OverTensors(torch.fx.Interpreter):
    """Runs an FX graph on Inductor's tensors, in the graph that is being lowered."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return V.graph.call_function(target, args, kwargs)

    def get_attr(self, target: str, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return lowerings[aten.full]([], value.item(), dtype=value.dtype, device=self.device)


def over_tensors(module: GraphModule, inputs: Sequence[Any], device: torch.device) -> Any:
    """What ``module`` computes, for whole tensors in place of the scalars that it was traced with."""
    interpreter = _OverTensors(module)
    interpreter.device = device
    return interpreter.run(*inputs)


def _device(node: Node) -> torch.device:
    return node.meta["val"].device


def is_wide(buffers: Sequence[Any]) -> bool:
    """Whether some captured buffer has more elements than a 32-bit index can count."""
    for buffer in buffers:
        if isinstance(buffer, ir.IRNode):
            numel = sympy.prod(buffer.get_size())
            if not V.graph.sizevars.statically_known_leq(numel, INT32_ELEMENTS):
                return V.graph.sizevars.shape_env is None or not numel.free_symbols or _hint_is_wide(numel)
    return False


def _hint_is_wide(numel: Any) -> bool:
    from ..compat import hint

    return hint(numel) > INT32_ELEMENTS


__all__ = [
    "address",
    "clamp_reads",
    "expression",
    "inline",
    "is_always_true",
    "is_identity",
    "is_wide",
    "mask_placeholders",
    "of_source",
    "over_tensors",
    "score_placeholders",
    "shape_of",
]
