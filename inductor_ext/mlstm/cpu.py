"""mLSTM on CPU tensors as blocked dense math, forward and backward.

This pass runs on the forward graph and on the backward graph after AOTAutograd, in which ``gradfuse::mlstm_tiles`` and its
backward are two nodes. Each node becomes ATen ops on a block of queries and a segment of keys, in loops over the blocks and
over the segments up to the diagonal. Inductor compiles them to C++. The memory is linear in the length. No op adds in place
or by atomics, so the results are always deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..core.cpu_loops import QUERY_BLOCK, KeySegments, QueryBlocks, scan
from ..core.fx import fake_tensor, value_of, working_dtype
from ..core.replace_node import replace_node
from ..core.report import record, user_line
from ..options import Options
from ..torch_api.config import uses_triton_on_cpu
from .tiles_op import normalised_rows, tile_gradients, weights_of

NAME = "mlstm"


def rewrite(gm: GraphModule, options: Options) -> None:
    """Replace, in place, the two ops of every mLSTM on CPU tensors."""
    if uses_triton_on_cpu():
        return
    ops = torch.ops.gradfuse
    for op, name, function in (
        (ops.mlstm_tiles.default, "mlstm", forward),
        (ops.mlstm_tiles_backward.default, "mlstm_backward", backward),
    ):
        for node in gm.graph.find_nodes(op="call_function", target=op):
            if value_of(node.args[0]).device.type == "cpu":
                where = user_line(node)
                _expand(gm, node, function)
                record(NAME, name, "blocked dense math", f"the tensors are on a CPU; a block has {QUERY_BLOCK} rows", where)


def _expand(gm: GraphModule, node: Node, function: Callable[..., Any]) -> None:
    tensors = [a for a in node.args if fake_tensor(a) is not None]

    def call(*operands: Tensor) -> Any:
        given = dict(zip(tensors, operands, strict=True))
        return function(*(given.get(a, a) if isinstance(a, Node) else a for a in node.args))

    replace_node(gm, node, tensors, call)


def _loops(query: Tensor) -> tuple[QueryBlocks, KeySegments, list[Tensor]]:
    """The blocks of rows, the segments of columns, and for each block the segments up to its last row (as ``visits``)."""
    length, device = query.shape[2], query.device
    blocks = QueryBlocks(length, device)
    keys = KeySegments(length, 1, 1, device)
    if not keys.looped:
        return blocks, keys, []
    last = blocks.positions()[:, -1]
    order = torch.arange((length + keys.size - 1) // keys.size, device=device).expand(blocks.count, -1)
    return blocks, keys, [order, last // keys.size + 1]


def _visible(rows: Tensor, row_ok: Tensor, columns: Tensor, real: Tensor | None) -> Tensor:
    """The elements [rows, columns] of a tile that are on or below the diagonal and that are not padding."""
    visible = (columns <= rows[:, None]) & row_ok[:, None]
    return visible if real is None else visible & real


# ---------------------------------------------------------------- the functions that are traced


def forward(
    query: Tensor, key: Tensor, value: Tensor, log_weight: Tensor, log_max: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """``mlstm.tiles_op.mlstm_tiles`` in its parallel form. It is traced, and never run eagerly.

    rest: floor, the operands of the norm, and scale.
    """
    floor, norm_weight, norm_bias, _, _, *numbers, scale, _ = rest
    kind = working_dtype(query.dtype)
    blocks, keys, visits = _loops(query)

    def segment(
        state: list[Tensor], keyed: list[Tensor], columns: Tensor, real: Tensor | None, others: list[Any]
    ) -> list[Tensor]:
        hidden, row_sum = state
        k, v, log_weight = keyed
        q, log_max, rows, row_ok = others
        weights = weights_of(log_weight, log_max, _visible(rows, row_ok, columns, real), scale, kind)
        combined = (q @ k.mT) * weights
        return [hidden + combined @ v, row_sum + combined.sum(-1)]

    def block(_: list[Tensor], xs: list[Tensor], others: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
        q, log_max, rows, row_ok, *visits = xs
        *keyed, every = others
        start = [q.new_zeros([*q.shape[:3], keyed[1].shape[3]]), q.new_zeros(q.shape[:3])]
        return [], keys.fold(segment, start, visits, keyed, every, [q, log_max, rows, row_ok])

    xs = [blocks.split(query.to(kind)), blocks.split(log_max), blocks.positions(), blocks.valid(), *visits]
    others = [key.to(kind), value.to(kind), log_weight, _positions(query)]
    hidden, row_sum = (blocks.join(x) for x in scan(block, [], xs, others, blocks.length)[1])
    out, normalised, rstd = normalised_rows(hidden, row_sum, floor, norm_weight, norm_bias, *numbers)
    affine = norm_weight is not None or norm_bias is not None
    kept = normalised.to(query.dtype) if affine else query.new_empty(0)
    return out.to(query.dtype), kept, row_sum, rstd


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    log_weight: Tensor,
    log_row: Tensor,
    term: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """``mlstm.tiles_op.mlstm_tiles_backward`` in its parallel form. It is traced, and never run eagerly."""
    *_, scale, _ = rest
    kind = working_dtype(query.dtype)
    blocks, keys, visits = _loops(query)

    def segment(
        state: list[Tensor], keyed: list[Tensor], columns: Tensor, real: Tensor | None, others: list[Any]
    ) -> list[Tensor]:
        dq, of_rows, dk, dv, of_columns = state
        k, v, log_weight = keyed
        q, e, log_row, term, rows, row_ok = others
        weights = weights_of(log_weight, log_row, _visible(rows, row_ok, columns, real), scale, kind)
        of_query, of_key, of_value, of_log = tile_gradients(q, k, v, e, weights, term)
        added = (of_key, of_value, of_log.sum(-2)[..., None])
        sums = [keys.add(whole, part, columns) for whole, part in zip((dk, dv, of_columns), added, strict=True)]
        return [dq + of_query, of_rows + of_log.sum(-1), *sums]

    def block(carry: list[Tensor], xs: list[Tensor], others: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
        rows, visits = xs[:6], xs[6:]
        *keyed, every = others
        start = [torch.zeros_like(rows[0]), torch.zeros_like(rows[3]), *carry]
        dq, of_rows, *sums = keys.fold(segment, start, visits, keyed, every, rows)
        return sums, [dq, of_rows]

    of_rows = [query.to(kind), grad.to(kind), log_row, term]
    xs = [*(blocks.split(x) for x in of_rows), blocks.positions(), blocks.valid(), *visits]
    init = [torch.zeros(x.shape, dtype=kind, device=x.device) for x in (key, value, key[..., :1])]
    others = [key.to(kind), value.to(kind), log_weight, _positions(query)]
    (dk, dv, of_columns), (dq, row_sums) = scan(block, init, xs, others, blocks.length)
    grads = (x.to(query.dtype) for x in (blocks.join(dq), dk, dv))
    return *grads, blocks.join(row_sums), of_columns[..., 0], of_columns.new_empty(0)


def _positions(query: Tensor) -> Tensor:
    return torch.arange(query.shape[2], device=query.device, dtype=torch.int32)
