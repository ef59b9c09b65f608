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
from collections.abc import Collection, Iterable

import torch
from torch.fx import Node

from ..core.dynamo_graph import attribute
from ..core.fx import CASTS_AND_COPIES, MOVES, SPLITS, fake_tensor, value_or_none
from ..core.joint_graph import Builder
from ..core.purity import is_random, written
from ..core.report import record, user_line
from ..options import Options
from ..torch_api.graph import OpOverload, pytree
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
_ALLOWED = _CONSTRUCTORS | _EXACT
#: A shift by more bits than there are has another result on a GPU.
_UNDEFINED = {aten.bitwise_left_shift, aten.bitwise_right_shift, aten.__lshift__, aten.__rshift__}
_DENSE = (None, torch.strided)
#: Ops on a GPU that take a tensor of the CPU. Any other op that gets one may need it there, as a custom op that reads sizes.
_READERS = {prims.device_put.default, aten.index.Tensor, aten.index_put.default, aten._unsafe_index.Tensor}
_READERS |= {aten._to_copy.default, aten._unsafe_index_put.default, aten.copy.default, aten.slice_scatter.default}


def rewrite(build: Builder, options: Options) -> None:
    """Move the computation of indices of a joint graph, in place, to the device of the ops that read them."""
    moves = _Moves(build)
    for reader in list(build.graph.nodes):
        result = fake_tensor(reader)
        if reader.target not in _READERS or result is None or result.device == _CPU:
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
        nodes = build.graph.nodes
        self._sizes = {n for n in nodes if n.op != "get_attr" and not _tensors(n)}
        self._movable = _movable(nodes, self._sizes, written(build.graph))
        self._copies: dict[tuple[Node, torch.device], Node] = {}

    def moved(self, index: Node, device: torch.device) -> Node | None:
        """A node on ``device`` with the values of ``index``; None if these are not certain to be the same, or are inputs."""
        if index not in self._movable:
            return None
        pending = [index]
        while pending:
            node = pending[-1]
            missing = [n for n in node.all_input_nodes if n not in self._sizes and (n, device) not in self._copies]
            pending += missing
            if not missing:
                pending.pop()
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


def _movable(nodes: Iterable[Node], sizes: Collection[Node], changed: Collection[Node]) -> set[Node]:
    """The nodes whose values are the same on every device, and are computed from nodes of this kind and sizes alone."""
    found: set[Node] = set()
    for node in nodes:
        known = all(n in found or n in sizes for n in node.all_input_nodes)
        if known and node not in sizes and node not in changed and _is_exact(node):
            found.add(node)
    return found


def _is_exact(node: Node) -> bool:
    """Whether a node computes integers or booleans on the CPU that are the same on every device.

    A tensor whose size depends on values stays, and so does pinned memory, which is memory of the CPU.
    """
    tensors = _tensors(node)
    if not tensors or any(x.device != _CPU or x.is_floating_point() or x.is_complex() for x in tensors):
        return False
    if node.op == "get_attr":
        return type(tensors[0]) is torch.Tensor and tensors[0].dim() == 0
    if "unbacked_bindings" in node.meta or node.kwargs.get("pin_memory") or node.kwargs.get("layout") not in _DENSE:
        return False
    if node.target in _ALLOWED:
        return node.op == "call_function"
    pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    return pointwise and node.target.overloadpacket not in _UNDEFINED and not is_random(node)


def _tensors(node: Node) -> list[torch.Tensor]:
    """The tensor or tensors of a node. That of a constant is real, and the others are fake."""
    found = attribute(node.graph.owning_module, node.target) if node.op == "get_attr" else value_or_none(node)
    return [x for x in pytree.tree_leaves(found) if isinstance(x, torch.Tensor)]
