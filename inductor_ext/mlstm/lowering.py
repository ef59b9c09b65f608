"""Lowerings of the ops of mLSTM onto the templates of ``templates/mlstm/``.

For dtypes and widths that the templates do not support, the eager code of the op runs, in blocks of rows or in chunks. On
CPU tensors ``mlstm/cpu.py`` has already replaced the ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch

from ..core import kernels
from ..core.kernel_op import KernelOp, needs_triton
from ..core.report import record, user_line
from ..core.target import Target
from ..core.templates import load, run
from ..torch_api.ir import contiguous_strides, full, node_layout, realize, realize_rows, require_contiguous
from ..torch_api.lowering import V, empty, empty_strided
from ..torch_api.sizes import FloorDiv, Mod
from ..torch_api.template import SymbolicGridFn, Template
from .chunks import fits, mlstm_chunk_sums
from .configs import backward_configs, chunk_sums_config, forward_configs
from .tiles_op import BackwardOperands, ForwardOperands, mlstm_tiles, mlstm_tiles_backward

NAME = "mlstm"
#: The path of a decision for the eager code of the op.
BLOCKS = "blocks of rows or chunks"
#: The widest head of queries, keys or values that the templates can hold in registers, by the size of an element in bytes.
WIDEST = {2: 512, 4: 256}


@SymbolicGridFn
def _forward_grid(slices: Any, length: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    return slices, cdiv(length, meta["BLOCK_M"]), 1


@SymbolicGridFn
def _backward_grid(slices: Any, length: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    key_programs = cdiv(length, meta["BLOCK_N1"]) * (2 if meta["SPLIT"] else 1)
    return slices, key_programs + cdiv(length, meta["BLOCK_M2"]), 1


@SymbolicGridFn
def _chunk_grid(slices: Any, chunks: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    tiles = cdiv(meta["QK_HEAD_DIM"], meta["BLOCK_D"]) * cdiv(meta["V_HEAD_DIM"], meta["BLOCK_V"])
    return slices, chunks, tiles


_forward = Template("gradfuse_mlstm_forward", _forward_grid, load("mlstm/mlstm_forward", "mlstm/states"))
_backward = Template("gradfuse_mlstm_backward", _backward_grid, load("mlstm/mlstm_backward", "mlstm/states"))
_chunk_sums = Template("gradfuse_mlstm_chunk_sums", _chunk_grid, load("mlstm/mlstm_chunk_sums"))


def unsupported(query: Any, key: Any, value: Any, *rest: Any) -> str | None:
    """The reason why the templates do not support these operands, or None if they do."""
    return (_unsupported_chunks if rest[-1] else _unsupported_heads)(query, value)


def _unsupported_chunks(left: Any, right: Any, *_: Any) -> str | None:
    reason = _unsupported_heads(left, right)
    dtype, widths = left.get_dtype(), _head_widths(left, right)
    if reason is None and not fits(left.get_device(), dtype, *widths):
        return f"the kernels with states take no heads of the widths {widths} in {dtype}"
    return reason


def _head_widths(query: Any, value: Any) -> list[int]:
    return [V.graph.sizevars.guard_int(x.get_size()[-1]) for x in (query, value)]


def _unsupported_heads(query: Any, value: Any, *_: Any) -> str | None:
    dtype = query.get_dtype()
    reason = needs_triton(query)
    if reason is not None:
        return reason
    if dtype not in kernels.SUPPORTED_DTYPES:
        return f"dtype {dtype} has no kernel"
    widest, widths = WIDEST[dtype.itemsize], _head_widths(query, value)
    if max(widths) > widest:
        return f"the head widths of queries and values are {widths}; the kernels take at most {widest}"
    return None


def _widths(query: Any, value: Any) -> dict[str, int]:
    return dict(zip(("QK_HEAD_DIM", "V_HEAD_DIM"), _head_widths(query, value), strict=True))


def _template_options(query: Any, value: Any, scale: float, chunk: int) -> dict[str, Any]:
    sizevars = V.graph.sizevars
    length, widths = query.get_size()[2], _widths(query, value)
    rounded = {name.replace("HEAD_DIM", "ROUNDED"): max(16, kernels.next_power_of_two(n)) for name, n in widths.items()}
    return {
        **widths,
        **rounded,
        "CHUNK": chunk,
        # The columns of a state that are loaded at a time. With 32 columns of a state of 256 rows the backward spills more.
        "BLOCK_D": min(32, 4096 // max(rounded.values()), *rounded.values()),
        "SAFE_HEAD_DIM": list(widths.values()) == list(rounded.values()),
        "EVEN": sizevars.statically_known_true(sympy.Eq(Mod(length, kernels.LARGEST_TILE), 0)),
        "LOG2_SCALE": math.log2(scale),
        "EXACT_GATES": query.get_dtype().itemsize == 4,
        "FLOAT32_PRECISION": kernels.float32_precision(Target.of(query.get_device())),
    }


def _empty(layout: Any) -> Any:
    return empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=layout.device)


def _row_numbers(query: Any) -> Any:
    size = list(query.get_size()[:3])
    return empty_strided(size, contiguous_strides(size), dtype=torch.float32, device=query.get_device())


def _grid_sizes(query: Any) -> list[Any]:
    batch, heads, length, _ = query.get_size()
    return [batch * heads, length]


def _none(device: torch.device) -> Any:
    return empty(0, device=device)


def lower_forward(*operands: Any) -> Any:
    """Lower ``mlstm_tiles`` to its kernel. The operands and results are those of the op."""
    given = ForwardOperands(*operands)
    device = given.query.get_device()
    rows = [require_contiguous(x) for x in (given.log_weight, given.log_max, given.floor)]
    affine = [_none(device) if x is None else require_contiguous(x) for x in (given.norm_weight, given.norm_bias)]
    chunks = [require_contiguous(x) for x in (given.before, given.reference) if x is not None]
    query, key, value, *others = [*realize_rows(given[:3]), *realize([*rows, *affine, *chunks])]
    layout = node_layout(0)
    plain = given.norm_weight is None and given.norm_bias is None
    normalised = empty(0, dtype=query.get_dtype(), device=device) if plain else _empty(layout)
    row_sum, rstd = _row_numbers(query), _row_numbers(query)
    if not given.norm:
        rstd = full(list(query.get_size()[:3]), 1, torch.float32, device)
    written = [normalised, row_sum, rstd]
    out = run(
        _forward,
        forward_configs(query, value),
        [query, key, value, *others, *written],
        written,
        layout,
        _grid_sizes(query),
        NORM=given.norm,
        WEIGHT=given.norm_weight is not None,
        BIAS=given.norm_bias is not None,
        EPS=given.eps,
        NORM_EPS=given.norm_eps,
        **_template_options(query, value, given.scale, given.chunk),
    )
    note = f"{_form(given.chunk)}; the query has the shape {tuple(query.get_size())}"
    record(NAME, "mlstm", "mlstm_forward.py.jinja", note, user_line(V.graph.current_node))
    return out, *written


def lower_backward(*operands: Any) -> Any:
    """Lower ``mlstm_tiles_backward`` to its kernel. The operands and results are those of the op."""
    given = BackwardOperands(*operands)
    others = (given.log_weight, given.log_row, given.term, given.before, given.after, given.reference)
    others = [require_contiguous(x) for x in others if x is not None]
    query, key, value, grad, *others = [*realize_rows(given[:4]), *realize(others)]
    written = [_empty(node_layout(0)), _empty(node_layout(2)), _row_numbers(query), _row_numbers(query)]
    later = _row_numbers(query) if given.chunk else empty(0, dtype=torch.float32, device=query.get_device())
    written += [later] if given.chunk else []
    grad_key = run(
        _backward,
        backward_configs(query, value),
        [query, key, value, grad, *others, *written],
        written,
        node_layout(1),
        _grid_sizes(query),
        **_template_options(query, value, given.scale, given.chunk),
    )
    grad_query, grad_value, of_rows, of_columns = written[:4]
    note = f"{_form(given.chunk)}; the kernel takes two passes and uses no atomics"
    record(NAME, "mlstm_backward", "mlstm_backward.py.jinja", note, user_line(V.graph.current_node))
    return grad_query, grad_key, grad_value, of_rows, of_columns, later


def _form(chunk: int) -> str:
    return f"the chunkwise form, {chunk} positions a chunk" if chunk else "the parallel form"


def lower_chunk_sums(*operands: Any) -> Any:
    """Lower ``mlstm_chunk_sums`` to its kernel. The operands and results are those of the op."""
    left, right, column, log_weight, reference, outer, chunk, after = operands
    others = realize([require_contiguous(x) for x in (column, log_weight, reference, outer) if x is not None])
    left, right = realize_rows([left, right])
    batch, heads, length, _ = left.get_size()
    return run(
        _chunk_sums,
        [chunk_sums_config(left, right)],
        [left, right, *others],
        [],
        node_layout(),
        [batch * heads, FloorDiv(length + chunk - 1, chunk)],
        CHUNK=chunk,
        AFTER=after,
        COLUMN=column is not None,
        OUTER=outer is not None,
        FLOAT32_PRECISION=kernels.float32_precision(Target.of(left.get_device())),
        **_widths(left, right),
    )


_WHAT = "the tiles of the op mlstm, in which rows meet columns: fused kernels"
_WHAT_OF_CHUNKS = "the sums over chunks of the op mlstm in its chunkwise form: one kernel"
FORWARD = KernelOp(NAME, _WHAT, mlstm_tiles, lower_forward, unsupported, BLOCKS)
BACKWARD = KernelOp(NAME, _WHAT, mlstm_tiles_backward, lower_backward, unsupported, BLOCKS)
CHUNK_SUMS = KernelOp(NAME, _WHAT_OF_CHUNKS, mlstm_chunk_sums, lower_chunk_sums, _unsupported_chunks)
