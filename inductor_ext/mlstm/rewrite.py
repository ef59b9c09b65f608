"""Replace an mLSTM in its plain form on Dynamo's graph by ``gradfuse::mlstm``. ``mlstm/pattern.py`` recognises the form.

A headwise norm that follows becomes a part of the op: ``group_norm`` over heads, or ``layer_norm`` over the value width. If
another op uses an S x S tensor of the plain form, or the maximum or the normaliser of a row, the plain form stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..core.fx import cone, requires_grad, shape_of, value_of, working_dtype
from ..core.outside import Outside, copied, is_returned
from ..core.report import leave_to_stock, record, user_line
from ..core.terms import arg, calls_torch, is_one, is_tensor, number, op, reads_shape, view_of, whole
from ..core.writes import VIEWS, Writes
from ..options import Options
from ..torch_api.graph import assert_async
from .op import mlstm_op
from .pattern import Cell, NotMLSTM, causal, find

NAME = "mlstm_pattern"
_AUTOCAST = "_enter_autocast"
#: Inductor writes this into C++ between quotation marks, and escapes none that are in it.
_CHANGED = (
    "A buffer that was the causal mask of an mLSTM when gradfuse compiled it is no causal mask any more. Compile such a"
    " model with mlstm_pattern in the option disable."
)


def rewrite(gm: GraphModule, options: Options) -> None:
    """Replace, in place, every mLSTM in plain form by the op.

    Raises Refused under ``options.strict`` for code that looks like an mLSTM and is left to stock.
    """
    changed = False
    for node in list(gm.graph.nodes):
        if op(node) not in ("matmul", "div") or not is_tensor(node):
            continue
        try:
            cell = find(node)
            if cell is None:
                continue
            norm = _headwise_norm(node) if len(shape_of(node)) == 4 else None
            _check(node, cell)
            _check_effects(cell, node if norm is None else norm.node)
        except NotMLSTM as error:
            leave_to_stock(options.strict, NAME, "mlstm", str(error), user_line(node), "Call inductor_ext.mlstm.mlstm.")
            continue
        note = _replace(gm, node, cell, norm)
        record(NAME, "mlstm", "gradfuse::mlstm", note, user_line(node))
        changed = True
    if changed:
        # AOTAutograd removes the rest of the plain form. Dead code elimination at this point would also remove in-place ops.
        gm.graph.lint()
        gm.recompile()


def _check(product: Node, cell: Cell) -> None:
    """Raise NotMLSTM if the op cannot replace the cell."""
    for node in cell.inside:
        outside = [u for u in node.users if u not in cell.inside and u is not product and not _ignores_values(u, node)]
        if outside:
            raise NotMLSTM(f"{node.name} is also used by {outside[0].name}")
    operands = (cell.query, cell.key, cell.value)
    values = [value_of(x) for x in operands if is_tensor(x)]
    if len(values) < 3 or any(v.dim() != 4 for v in values):
        raise NotMLSTM("queries, keys and values are not [B, N, S, D]")
    if len({v.dtype for v in values} | {value_of(product).dtype}) > 1:
        raise NotMLSTM("queries, keys, values and the result differ in dtype")
    if values[1].shape != values[0].shape or values[2].shape[:3] != values[0].shape[:3]:
        raise NotMLSTM("queries, keys and values are broadcast against each other")
    if tuple(value_of(product).shape) != (*values[0].shape[:3], values[2].shape[3]):
        raise NotMLSTM("queries, keys and values are broadcast against the gates")
    for gate in (cell.input_gate, cell.forget_gate):
        if _without_ones(gate.shape) != _without_ones(values[0].shape[:3]):
            raise NotMLSTM(f"a gate of shape {shape_of(gate.tensor)} does not have one number for each head and position")
    if not cell.scale > 0:
        raise NotMLSTM(f"the scale {cell.scale} is not positive")
    autocast = any(getattr(n.target, "__name__", "") == _AUTOCAST for n in product.graph.nodes)
    if autocast or any(torch.is_autocast_enabled(v.device.type) for v in values):
        raise NotMLSTM("it may run under autocast, which decides the dtype of each product")


def _check_effects(cell: Cell, last: Node) -> None:
    """Raise NotMLSTM if an effect stands between the parts of the cell, all of which the op computes at its last node."""
    operands = (cell.query, cell.key, cell.value, cell.input_gate.tensor, cell.forget_gate.tensor)
    writes, parts = Writes(last.graph), cone(last, until=operands)
    if any(writes.between(node, last) for node in parts):
        raise NotMLSTM("a tensor is changed in place between its parts")
    if not all(calls_torch(node) for node in parts if node.op == "call_function" and is_tensor(node)):
        raise NotMLSTM("it calls a function that is not of torch")
    computed = set(operands)
    for node in sorted(parts - computed):
        if is_tensor(node) and not computed.isdisjoint(node.all_input_nodes):
            computed.add(node)
    if len({node in writes.without_gradient for node in computed.difference(operands)}) > 1:
        raise NotMLSTM("some of its parts are computed without gradients, and some with gradients")


def _ignores_values(user: Node, node: Node) -> bool:
    """Whether ``user`` reads only the shape of ``node``, or is a view that nobody uses (the indices of ``max``)."""
    return reads_shape(user, node) or (op(user) in VIEWS and not user.users)


def _without_ones(sizes: Sequence[Any]) -> list[Any]:
    return [size for size in sizes if not is_one(size)]


# ---------------------------------------------------------------- graph surgery


@dataclass(frozen=True)
class _Norm:
    """A headwise norm: the node that computes it, and its operands.

    by_group: whether it is computed over groups of [B * S, N * Dv]; otherwise it is over the last dim of h.
    """

    node: Node
    by_group: bool
    weight: Node | None
    bias: Node | None
    eps: float


def _replace(gm: GraphModule, product: Node, cell: Cell, norm: _Norm | None) -> str:
    last = product if norm is None else norm.node
    gates = (cell.input_gate, cell.forget_gate)
    operands = (cell.query, cell.key, cell.value, *(gate.tensor for gate in gates))
    keywords: dict[str, Any] = {"norm": norm is not None, "eps": cell.eps, "scale": cell.scale}
    keywords["orders"] = tuple(gate.order for gate in gates)
    keywords["masks"] = tuple((mask.buffer, mask.negated) for mask in cell.masks)
    trains, outside = requires_grad(last), Outside(gm.graph)
    keywords["returned"] = trains and is_returned(last)
    keywords["given"] = tuple(trains and outside.has(gate.tensor) for gate in gates)
    if norm is not None:
        operands += (norm.weight, norm.bias)
        keywords |= {"norm_eps": norm.eps, "by_group": norm.by_group}
    with gm.graph.inserting_before(last):
        fused = gm.graph.call_function(fused_cell, operands, keywords)
    fused.meta = dict(last.meta)
    fused.meta["stack_trace"] = product.meta.get("stack_trace")
    last.replace_all_uses_with(fused)
    return "no headwise norm follows" if norm is None else "its headwise norm is included"


def fused_cell(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    input_gate: Tensor,
    forget_gate: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: bool,
    eps: float,
    scale: float,
    orders: tuple[tuple[int, ...], tuple[int, ...]],
    masks: tuple[tuple[Tensor, bool], ...],
    returned: bool,
    given: tuple[bool, bool],
    norm_eps: float = 0.0,
    by_group: bool = False,
) -> Tensor:
    """The result of a recognised cell and its norm. weight and bias are those of the norm, for one head or for all heads.

    orders: of the dims of the two gates (pattern.Gate). masks: buffers that were causal masks when this was compiled, and
    whether they are negated. Raises an error, on a GPU by a device-side assertion, if one of them is none any more.
    returned, given: whether the result, and each gate, can be changed outside of the graph before the backward. The op saves
    them for it, and the plain form does not.
    """
    for mask, negated in masks:
        assert_async((mask == causal(mask, negated)).all(), _CHANGED)
    batch, heads, length, _ = query.shape
    gates = (copied(x) if outside else x for x, outside in zip((input_gate, forget_gate), given, strict=True))
    gates = (x.permute(order).reshape(batch, heads, length) for x, order in zip(gates, orders, strict=True))
    affine = (_of_heads(x, heads, value.shape[-1]) for x in (weight, bias))
    norm_weight, norm_bias = affine
    norm_weight = None if norm_weight is None else norm_weight - 1
    y = mlstm_op(query, key, value, *gates, norm_weight, norm_bias, None, None, norm, eps, norm_eps, scale, False)[0]
    y = copied(y) if returned else y
    return y.transpose(1, 2).reshape(batch * length, -1) if by_group else y


def _of_heads(vector: Tensor | None, heads: int, width: int) -> Tensor | None:
    if vector is None:
        return None
    wide = vector.to(working_dtype(vector.dtype))
    return wide.reshape(heads, width) if wide.numel() == heads * width else wide.expand(heads, width)


def _headwise_norm(hidden: Node) -> _Norm | None:
    """The norm over the value width of each head, if no other op uses ``hidden`` [B, N, S, Dv]; None otherwise."""
    _, heads, _, width = shape_of(hidden)
    node = _only_user(hidden)
    if op(node) == "layer_norm":
        weight, bias = (arg(node, i, name) for i, name in ((2, "weight"), (3, "bias")))
        sizes = [number(size) for size in arg(node, 1, "normalized_shape")]
        over_width = sizes == [number(width)] and arg(node, 0, "input") is hidden
        return _Norm(node, False, weight, bias, number(arg(node, 4, "eps", 1e-5))) if over_width else None
    moved = hidden
    while op(node) in ("transpose", "contiguous"):
        moved, node = node, _only_user(node)
    if op(node) != "view" or len(shape_of(node)) != 2 or shape_of(node)[1] != heads * width or node.args[0] is not moved:
        return None
    straight = whole(hidden).dims
    if view_of(moved).base is not hidden or view_of(moved).dims != tuple(straight[d] for d in (0, 2, 1, 3)):
        return None
    groups = _only_user(node)
    if (
        op(groups) != "group_norm"
        or arg(groups, 0, "input") is not node
        or number(arg(groups, 1, "num_groups")) != number(heads)
    ):
        return None
    weight, bias = (arg(groups, i, name) for i, name in ((2, "weight"), (3, "bias")))
    return _Norm(groups, True, weight, bias, number(arg(groups, 4, "eps", 1e-5)))


def _only_user(node: Any) -> Any:
    users = [u for u in node.users if not reads_shape(u, node)] if isinstance(node, Node) else []
    return users[0] if len(users) == 1 else None
