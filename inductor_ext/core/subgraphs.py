"""Functions of numbers (score_mods, combine_fns) as scalar subgraphs that a template inlines.

A subgraph takes 0-d placeholders, which the template replaces by tiles, and captured tensors as ordinary buffers. If its
lowering needs other buffers, which then depend on captured tensors only, they are registered on the base graph, so that
their names are unique in the whole model.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule

from ..torch_api.graph import pytree
from ..torch_api.ir import inductor_ir, input_buffer
from ..torch_api.lowering import PointwiseSubgraphLowering, V, lowerings
from ..torch_api.tracing import trace
from .sources import function_of

aten = torch.ops.aten


class _ScalarLowering(PointwiseSubgraphLowering):
    """Lowers a scalar FX graph. Buffers that do not depend on a placeholder are registered on the base graph."""

    def __init__(self, module: GraphModule, placeholders: Sequence[Any]) -> None:
        super().__init__(module, root_graph_lowering=V.graph)
        self.placeholder_names = frozenset(p.get_name() for p in placeholders)
        self.device = placeholders[0].get_device()

    def register_buffer(self, buffer: Any, *, set_name: bool = False) -> str:
        reads = {dep.name for dep in buffer.get_reads()} if isinstance(buffer, inductor_ir.ComputedBuffer) else set()
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


def inline(module: GraphModule, placeholders: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
    """Lower ``module(*placeholders, *captured)`` to a ComputedBuffer without a name for each output, ready to be inlined."""
    lowering = _ScalarLowering(module, placeholders)
    with V.set_graph_handler(lowering):
        lowering.run(*placeholders, *captured)
    return [_computed(out, lowering.device) for out in pytree.tree_leaves(lowering.graph_outputs)]


def of_source(source: str, operands: Mapping[str, torch.dtype], device: torch.device) -> list[Any]:
    """Lower the results of a function, given by its source (``core.sources``), to subgraphs of its operands (tiles)."""
    with V.fake_mode:
        examples = [torch.empty((), dtype=dtype, device=device) for dtype in operands.values()]
        module = trace(function_of(source, device), examples)
    return inline(module, [input_buffer(name, dtype, device) for name, dtype in operands.items()], [])


def _computed(box: Any, device: torch.device) -> Any:
    data = box.data.data if isinstance(box.data, inductor_ir.StorageBox) else None
    if (
        not isinstance(data, (inductor_ir.Pointwise, inductor_ir.InputBuffer))
        or box.get_size()
        or (isinstance(data, inductor_ir.InputBuffer) and data.get_name() in V.graph.graph_inputs)
    ):
        loader, rank = box.make_loader(), len(box.get_size())
        data = inductor_ir.Pointwise.create(
            device=device,
            dtype=box.get_dtype(),
            inner_fn=functools.partial(lambda load, rank, _: load([sympy.Integer(0)] * rank), loader, rank),
            ranges=[],
        ).data.data
    buffer = inductor_ir.ComputedBuffer(
        name=None,
        layout=inductor_ir.FlexibleLayout(device=device, dtype=box.get_dtype(), size=[]),
        data=data,
    )
    buffer.freeze_layout()
    return buffer


def expression(size: Any) -> Any:
    """Return a size in the form that lowerings take: an int, or the sympy expression of a symbolic size."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


class _OverTensors(torch.fx.Interpreter):
    """Runs an FX graph on Inductor's tensors, inside the graph that is being lowered."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return V.graph.call_function(target, args, kwargs)

    def get_attr(self, target: str, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return lowerings[aten.full]([], value.item(), dtype=value.dtype, device=self.device)


def over_tensors(module: GraphModule, inputs: Sequence[Any], device: torch.device) -> Any:
    """Compute ``module`` on whole tensors instead of the scalars with which it was traced."""
    interpreter = _OverTensors(module)
    interpreter.device = device
    return interpreter.run(*inputs)
