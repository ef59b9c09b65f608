"""Inductor's IR: buffers, layouts and strides."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir as inductor_ir
from torch._inductor.lowering import lowerings
from torch._inductor.select_algorithm import realize_inputs
from torch._inductor.virtualized import V

__all__ = ["inductor_ir"]


def full(size: Sequence[Any], value: float, dtype: torch.dtype, device: torch.device) -> Any:
    """Make a contiguous tensor of one value, realized and registered on the graph that is being lowered.

    The layout is fixed immediately. Inductor pads the strides of a flexible layout (from 1024 elements), and a template that
    computes addresses itself would write between the rows.
    """
    return _contiguous(lowerings[torch.ops.aten.full](list(size), value, dtype=dtype, device=device))


def one_kernel(boxes: Sequence[Any]) -> Sequence[Any]:
    """Realize new tensors of one device, none of which reads another, so that one kernel with a part for each computes them.

    Returns the tensors. It is how Inductor lowers ``torch._foreach_add``.
    """
    for box in boxes:
        box.realize()
    V.graph.register_operation_list([box.get_operation_name() for box in boxes])
    return boxes


def zeros_beside(x: Any, dtype: torch.dtype) -> Any:
    """Make contiguous zeros of the shape of ``x``, as ``full`` does, in the kernel that reads ``x`` anyway, if there is one.

    Inductor fuses two loops only if they read the same tensor. So the loop of the zeros reads ``x``, and does not use it.
    """
    aten = torch.ops.aten
    zeros = lowerings[aten.full](list(x.get_size()), 0, dtype=dtype, device=x.get_device())
    return _contiguous(lowerings[aten.where](lowerings[aten.eq](x, x), zeros, zeros))


def _contiguous(box: Any) -> Any:
    """Realize a new tensor with contiguous strides, which are fixed."""
    box.realize()
    size = list(box.get_size())
    box.data.data.layout = inductor_ir.FixedLayout(box.get_device(), box.get_dtype(), size, contiguous_strides(size))
    return box


def as_it_is_now(operand: Any) -> Any:
    """The operand of a kernel in a box of its own.

    An operation of the graph that writes to a tensor computes another buffer and puts it in the tensor's box. A kernel names
    its operands when its code is written, after the whole graph was lowered, and would find the later buffer there.
    """
    if isinstance(operand, inductor_ir.TensorBox):
        return as_it_is_now(operand.data)
    if isinstance(operand, inductor_ir.ReinterpretView):
        return dataclasses.replace(operand, data=as_it_is_now(operand.data))
    return inductor_ir.StorageBox(operand.data) if isinstance(operand, inductor_ir.StorageBox) else operand


def store_at(target: Any, load: Callable[..., Any], size: Sequence[Any], at: Callable[..., Any]) -> Any:
    """Store ``target[at(index)] = load(index)`` for every index of ``size``. Changes ``target``."""
    target.realize()
    scatter = inductor_ir.Scatter(
        device=target.get_device(),
        dtype=target.get_dtype(),
        inner_fn=load,
        ranges=list(size),
        output_indexer=at,
        scatter_mode=None,
    )
    layout = inductor_ir.MutationLayoutSHOULDREMOVE(as_it_is_now(target))
    buffer = inductor_ir.ComputedBuffer(name=None, layout=layout, data=scatter)
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)
    return target


def add_in_order(target: Any, offsets: Any, values: Any) -> Any:
    """Compute ``target[offsets] += values`` in place, by ATen's sorted index_put, whose order of additions is fixed."""
    operands = [inductor_ir.ExternKernel.realize_input(x) for x in (offsets, values)]
    inductor_ir.IndexPutFallback(torch.ops.aten.index_put_.default, target, [operands[0]], operands[1], True)
    return target


def realize(nodes: Sequence[Any]) -> list[Any]:
    """Give every IR node of the list a buffer with a frozen layout. None and symbolic integers do not change."""
    out = [realize_inputs(_by_pointer(x)) if isinstance(x, inductor_ir.IRNode) else x for x in nodes]
    for node in out:
        if isinstance(node, inductor_ir.IRNode):
            with contextlib.suppress(NotImplementedError):
                node.freeze_layout()
    return out


def realize_rows(nodes: Sequence[Any]) -> list[Any]:
    """Realize IR nodes with consecutive elements in their last dim, by a copy if they are not.

    A kernel that loads tiles of rows would be right without it, but it would load single elements. In a graph with
    convolutions Inductor stores 4-D tensors with dim 1 innermost, which is the dim of the heads.
    """
    return [
        realize([in_order_of(x, dense_strides(x.get_size(), x.get_stride()))])[0] if _is_strided(x, -1) else x
        for x in realize(nodes)
    ]


def _is_strided(x: Any, dim: int) -> bool:
    """Return whether it is known that the elements along a dim are not consecutive in memory."""
    if not isinstance(x, inductor_ir.IRNode):
        return False
    known = V.graph.sizevars.statically_known_true
    return known(sympy.Gt(x.get_size()[dim], 1)) and known(sympy.Ne(x.get_stride()[dim], 1))


def with_heads_outside(nodes: Sequence[Any]) -> list[Any]:
    """Realize IR nodes, those as copies that Inductor has stored with dim 1 of four innermost (see ``realize_rows``)."""
    return [realize_rows([x])[0] if _has_heads_innermost(x) else x for x in realize(nodes)]


def _has_heads_innermost(x: Any) -> bool:
    return isinstance(x, inductor_ir.IRNode) and len(x.get_size()) == 4 and _is_strided(x, -1) and not _is_strided(x, 1)


def stored(x: Any) -> Any:
    """Put the value of an IR node into a separate buffer. Its users then load the value and do not compute it again."""
    x.realize()
    buffer = x.data.data
    if isinstance(buffer, inductor_ir.ComputedBuffer):
        # Without this, a value that is computed from positions only becomes a sympy expression inside its users.
        buffer._force_realize = True
    return x


def rounded(nodes: Sequence[Any]) -> list[Any]:
    """Realize the IR nodes of a list, so that a subgraph loads their values, rounded to their dtypes.

    A buffer that reads nothing is computed again by Inductor wherever it is read, and there a number of half precision keeps
    its fp32 value (torch 2.11). The backward, which gets the buffer as an input, would see other numbers than the forward.
    """
    out = realize(nodes)
    for node in out:
        inner = node
        while isinstance(inner, inductor_ir.IRNode) and not isinstance(inner, inductor_ir.Buffer):
            inner = getattr(inner, "data", None)
        if isinstance(inner, inductor_ir.ComputedBuffer) and inner.get_dtype().itemsize <= 2:
            inner._force_realize = True
    return out


def _by_pointer(node: Any) -> Any:
    """Copy a one-element CPU tensor: Inductor passes it to a Triton kernel by value, and a template needs its address."""
    one_on_cpu = node.get_device().type == "cpu" and sympy.prod(node.get_size()) == 1
    return inductor_ir.ExternKernel.copy_input(node) if one_on_cpu else node


def require_contiguous(node: Any) -> Any:
    """Return ``node`` in a contiguous buffer."""
    return inductor_ir.ExternKernel.require_contiguous(node)


def in_order_of(node: Any, strides: Sequence[Any]) -> Any:
    """Return ``node`` with its dims in the memory order of ``strides``, without a copy if its layout is not yet fixed."""
    return inductor_ir.ExternKernel.require_stride_order(
        node, inductor_ir.get_stride_order(strides, V.graph.sizevars.shape_env)
    )


def input_buffer(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Make a 0-d placeholder that a template replaces by a tile when it inlines the subgraph."""
    return inductor_ir.TensorBox.create(
        inductor_ir.InputBuffer(name=name, layout=inductor_ir.FixedLayout(device, dtype, [], []))
    )


def fixed_layout(device: torch.device, dtype: torch.dtype, size: Sequence[Any], stride: Sequence[Any]) -> Any:
    """Make a layout that Inductor may not change."""
    return inductor_ir.FixedLayout(device, dtype, list(size), stride=[sympy.sympify(s) for s in stride])


def node_layout(output: int | None = None) -> Any:
    """Return the layout that its fake implementation gives the node that is being lowered, or one of its outputs."""
    value = V.graph.current_node.meta["val"]
    value = value if output is None else value[output]
    size, stride = ([x.node.expr if isinstance(x, torch.SymInt) else x for x in xs] for xs in (value.shape, value.stride()))
    return fixed_layout(value.device, value.dtype, size, stride)


def dense_strides(size: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Return dense strides of ``size`` in the dimension order of ``like``, with the last dimension innermost.

    flex_attention's fake implementation gives outputs and gradients this layout.
    """
    order = list(inductor_ir.get_fill_order(like, V.graph.sizevars.shape_env))
    last = len(size) - 1
    if sympy.sympify(size[last]) != 1 or order[0] != last:
        order = [last, *(d for d in order if d != last)] if order[0] != last else order
    strides: list[Any] = [0] * len(size)
    running: Any = sympy.Integer(1)
    for d in order:
        strides[d] = running
        running = running * size[d]
    return strides


def is_aligned(node: Any, alignment: int) -> bool:
    """Return whether the address of the first element of a buffer or view is a multiple of ``alignment`` (at most 16) bytes.

    Inductor knows the alignment of inputs on GPUs only, and the interpreter does not need it.
    """
    offset = node.get_layout().offset * node.get_dtype().itemsize
    if node.get_device().type != "cpu" and node.get_name() in V.graph.unaligned_buffers:
        return False
    return V.graph.sizevars.statically_known_true(sympy.Eq(offset % alignment, 0))


def rows_are_aligned(node: Any, alignment: int) -> bool:
    """Return whether the rows of a tensor have consecutive elements, and begin at multiples of ``alignment`` bytes."""
    known, itemsize = V.graph.sizevars.statically_known_true, node.get_dtype().itemsize
    *outer, inner = node.get_stride()
    aligned = all(known(sympy.Eq(stride * itemsize % alignment, 0)) for stride in outer)
    return aligned and known(sympy.Eq(inner, 1)) and is_aligned(node, alignment)


def contiguous_strides(size: Sequence[Any]) -> list[Any]:
    """Return the strides of a contiguous tensor."""
    return list(inductor_ir.FlexibleLayout.contiguous_strides(list(size)))
