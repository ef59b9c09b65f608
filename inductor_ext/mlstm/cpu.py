"""mLSTM on CPU tensors as blocked dense math, forward and backward.

This pass runs on the forward graph and on the backward graph after AOTAutograd, in which ``gradfuse::mlstm_tiles`` and its
backward are two nodes. In the parallel form each node becomes ATen ops on a block of queries and a segment of keys, in loops
over the blocks and over the segments up to the diagonal. In the chunkwise form it becomes ATen ops on all chunks at once.
Inductor compiles them to C++. The memory is linear in the length. No op adds in place or by atomics, so the results are
always deterministic.
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
from . import chunk_tiles
from .tile_math import normalised_rows, tile_gradients, weights_of
from .tiles_op import BackwardOperands, ForwardOperands

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
                where, chunk = user_line(node), node.args[-1]
                _expand(gm, node, function)
                of = f"a chunk has {chunk} positions" if chunk else f"a block has {QUERY_BLOCK} rows"
                record(NAME, name, "blocked dense math", f"the tensors are on a CPU; {of}", where)


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


def forward(*operands: Any) -> tuple[Tensor, ...]:
    """``mlstm.tiles_op.mlstm_tiles``. It is traced, and never run eagerly."""
    given = ForwardOperands(*operands)
    of_rows = given[:5]
    if given.chunk:
        hidden, row_sum = chunk_tiles.row_sums(*of_rows, given.before, given.reference, given.scale, given.chunk)
    else:
        hidden, row_sum = _row_sums(*of_rows, given.scale)
    affine = (given.norm_weight, given.norm_bias)
    out, normalised, rstd = normalised_rows(hidden, row_sum, given.floor, *affine, given.norm, given.eps, given.norm_eps)
    dtype = given.query.dtype
    kept = given.query.new_empty(0) if affine == (None, None) else normalised.to(dtype)
    return out.to(dtype), kept, row_sum, rstd


def _row_sums(
    query: Tensor, key: Tensor, value: Tensor, log_weight: Tensor, log_max: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``sum_s C_ts v_s`` and ``sum_s C_ts`` in the parallel form."""
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
    hidden, row_sum = scan(block, [], xs, others, blocks.length)[1]
    return blocks.join(hidden), blocks.join(row_sum)


def backward(*operands: Any) -> tuple[Tensor, ...]:
    """``mlstm.tiles_op.mlstm_tiles_backward``. It is traced, and never run eagerly."""
    given = BackwardOperands(*operands)
    of_pairs = given[:7]
    if given.chunk:
        states = (given.before, given.after, given.reference)
        *grads, of_rows, of_columns, of_later = chunk_tiles.gradients(*of_pairs, *states, given.scale, given.chunk)
    else:
        *grads, of_rows, of_columns = _gradients(*of_pairs, given.scale)
        of_later = of_columns.new_empty(0)
    return *(x.to(given.query.dtype) for x in grads), of_rows, of_columns, of_later


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, log_weight: Tensor, log_row: Tensor, term: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """What ``mlstm_tiles_backward`` returns in the parallel form, before it is rounded and without the last sums."""
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
    return blocks.join(dq), dk, dv, blocks.join(row_sums), of_columns[..., 0]


def _positions(query: Tensor) -> Tensor:
    return torch.arange(query.shape[2], device=query.device, dtype=torch.int32)
