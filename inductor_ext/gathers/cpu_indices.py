"""Builds an index on the GPU that the graph computes on the CPU from constants alone, and that an op on the GPU reads.

Models build relative positions by ``torch.arange`` and by writes to slices, without a device. Each step then runs kernels on
the CPU, and waits for them and for a copy to the GPU. Inductor moves such constructors to the GPU in a forward or backward
graph, but not if the index is saved for the backward, because it is an output of the forward then. Here the graph is still
whole.

The nodes are copied for the GPU. The originals, unless something else reads them, are then dead code. Only integers and
booleans are moved, and only ops with one right result: they have the same values on both devices, but a floating-point
function may round differently, and a sort may order equal values differently.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from ..core.dynamo_graph import attribute
from ..core.fx import CASTS_AND_COPIES, MOVES, SPLITS, cone, fake_tensor, value_or_none
from ..core.joint_graph import Builder
from ..core.purity import is_random, written
from ..core.report import record, user_line
from ..options import Options
from ..torch_api.graph import pytree
from ..torch_api.tracing import real_tensors

NAME = "cpu_indices"

aten = torch.ops.aten
prims = torch.ops.prims

_CPU = torch.device("cpu")
_CONSTRUCTORS = {aten.full.default, aten.empty.memory_format, aten.arange.start_step, prims.iota.default}
_CONSTRUCTORS |= {aten.arange.default, aten.arange.start, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default}
#: Ops that are not pointwise and have one right result.
_EXACT = MOVES | CASTS_AND_COPIES | SPLITS | {operator.getitem, aten.cat.default, aten.stack.default, aten.copy.default}
_EXACT |= {aten.fill.Scalar, aten.fill.Tensor, aten.constant_pad_nd.default, aten.tril.default, aten.triu.default}
_EXACT |= {aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default}
_EXACT |= {aten.sum.default, aten.sum.dim_IntList, aten.cumsum.default, aten.floor_divide.default}


def rewrite(build: Builder, options: Options) -> None:
    """Move the computation of indices of a joint graph, in place, to the device of the ops that read them."""
    moves = _Moves(build)
    for reader in list(build.graph.nodes):
        result = fake_tensor(reader)
        if reader.op != "call_function" or result is None or result.device == _CPU:
            continue
        for index in reader.all_input_nodes:
            tensor = fake_tensor(index)
            # A kernel on the GPU takes a 0-d tensor of the CPU as a number.
            is_copied = reader.target is prims.device_put.default
            if tensor is None or tensor.device != _CPU or not (tensor.dim() or is_copied):
                continue
            moved = moves.moved(index, result.device)
            if moved is not None:
                reader.replace_input_with(index, moved)
                if is_copied:
                    reader.target, reader.args, reader.kwargs = aten.clone.default, (moved,), {}
                record(NAME, str(reader.target), "moved", f"its operand {index} is built on the GPU", user_line(reader))


class _Moves:
    """Copies nodes of the CPU for another device, each once."""

    def __init__(self, build: Builder) -> None:
        self.build = build
        self._sizes = [n for n in build.graph.nodes if n.op != "get_attr" and not _tensors(n)]
        self._written = written(build.graph)
        self._copies: dict[tuple[Node, torch.device], Node] = {}

    def moved(self, index: Node, device: torch.device) -> Node | None:
        """A node on ``device`` with the values of ``index``; None if these are not certain to be the same, or are inputs."""
        needed = cone(index, until=self._sizes) - set(self._sizes)
        if self._written & needed or not all(map(_is_exact, needed)):
            return None
        for node in [n for n in self.build.graph.nodes if n in needed]:
            if (node, device) not in self._copies:
                with self.build.before(node):
                    self._copies[node, device] = self._copy(node, device)
        return self._copies[index, device]

    def _copy(self, node: Node, device: torch.device) -> Node:
        if node.op == "get_attr":
            (constant,) = _tensors(node)
            with real_tensors():
                value = constant.item()
            return self.build.full((), value, constant.dtype, device)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self._copies.get((n, device), n))
        if node.target in _CONSTRUCTORS or "device" in kwargs:
            kwargs = kwargs | {"device": device}
        return self.build.call(node.target, *args, **kwargs)


def _is_exact(node: Node) -> bool:
    """Whether a node computes integers or booleans on the CPU that are the same on every device."""
    tensors = _tensors(node)
    if not tensors or any(x.device != _CPU or x.is_floating_point() or x.is_complex() for x in tensors):
        return False
    if node.op == "get_attr":
        return type(tensors[0]) is torch.Tensor and tensors[0].dim() == 0
    known = node.target in _CONSTRUCTORS | _EXACT or torch.Tag.pointwise in getattr(node.target, "tags", ())
    return node.op == "call_function" and known and not is_random(node)


def _tensors(node: Node) -> list[torch.Tensor]:
    """The tensor or tensors of a node. That of a constant is real, and the others are fake."""
    found = attribute(node.graph.owning_module, node.target) if node.op == "get_attr" else value_or_none(node)
    return [x for x in pytree.tree_leaves(found) if isinstance(x, torch.Tensor)]
