"""Lowerings of ``gradfuse::mlstm_tiles`` and its backward onto ``mlstm_forward.py.jinja`` and ``mlstm_backward.py.jinja``.

For dtypes and widths that the templates do not support, the eager code of the op runs, in blocks of rows. On CPU tensors
``mlstm/cpu.py`` has already replaced the ops.
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
from ..torch_api.sizes import Mod
from ..torch_api.template import SymbolicGridFn, Template
from .configs import backward_configs, forward_configs
from .tiles_op import BackwardOperands, ForwardOperands, mlstm_tiles, mlstm_tiles_backward

NAME = "mlstm"
#: The path of a decision for the eager code of the op.
BLOCKS = "blocks of rows"
#: The widest head of queries, keys or values that the templates can hold in registers, by the size of an element in bytes.
WIDEST = {2: 512, 4: 256}


@SymbolicGridFn
def _forward_grid(slices: Any, length: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    return slices, cdiv(length, meta["BLOCK_M"]), 1


@SymbolicGridFn
def _backward_grid(slices: Any, length: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    key_programs = cdiv(length, meta["BLOCK_N1"]) * (2 if meta["SPLIT"] else 1)
    return slices, key_programs + cdiv(length, meta["BLOCK_M2"]), 1


_forward = Template("gradfuse_mlstm_forward", _forward_grid, load("mlstm/mlstm_forward"))
_backward = Template("gradfuse_mlstm_backward", _backward_grid, load("mlstm/mlstm_backward"))


def unsupported(query: Any, key: Any, value: Any, *_: Any) -> str | None:
    """The reason why the templates do not support these operands, or None if they do."""
    dtype = query.get_dtype()
    reason = needs_triton(query)
    if reason is not None:
        return reason
    if dtype not in kernels.SUPPORTED_DTYPES:
        return f"dtype {dtype} has no kernel"
    widest, widths = WIDEST[dtype.itemsize], [V.graph.sizevars.guard_int(x.get_size()[-1]) for x in (query, value)]
    if max(widths) > widest:
        return f"the head widths of queries and values are {widths}; the kernels take at most {widest}"
    return None


def _template_options(query: Any, value: Any, scale: float) -> dict[str, Any]:
    sizevars = V.graph.sizevars
    length = query.get_size()[2]
    widths = {"QK": sizevars.guard_int(query.get_size()[-1]), "V": sizevars.guard_int(value.get_size()[-1])}
    rounded = {name: max(16, kernels.next_power_of_two(width)) for name, width in widths.items()}
    return {
        **{f"{name}_HEAD_DIM": width for name, width in widths.items()},
        **{f"{name}_ROUNDED": width for name, width in rounded.items()},
        "SAFE_HEAD_DIM": widths == rounded,
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
    query, key, value, *rows_and_affine = [*realize_rows(given[:3]), *realize([*rows, *affine])]
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
        [query, key, value, *rows_and_affine, *written],
        written,
        layout,
        _grid_sizes(query),
        NORM=given.norm,
        WEIGHT=given.norm_weight is not None,
        BIAS=given.norm_bias is not None,
        EPS=given.eps,
        NORM_EPS=given.norm_eps,
        **_template_options(query, value, given.scale),
    )
    note = f"the query has the shape {tuple(query.get_size())}"
    record(NAME, "mlstm", "mlstm_forward.py.jinja", note, user_line(V.graph.current_node))
    return out, *written


def lower_backward(*operands: Any) -> Any:
    """Lower ``mlstm_tiles_backward`` to its kernel. The operands and results are those of the op."""
    given = BackwardOperands(*operands)
    rows = [require_contiguous(x) for x in given[4:9]]
    query, key, value, grad, *rows = [*realize_rows(given[:4]), *realize(rows)]
    written = [_empty(node_layout(0)), _empty(node_layout(2)), _row_numbers(query), _row_numbers(query)]
    grad_key = run(
        _backward,
        backward_configs(query, value),
        [query, key, value, grad, *rows, *written],
        written,
        node_layout(1),
        _grid_sizes(query),
        HAS_MAX_TERM=given.has_max_term,
        **_template_options(query, value, given.scale),
    )
    grad_query, grad_value, of_rows, of_columns = written
    note = "the kernel takes two passes and uses no atomics"
    record(NAME, "mlstm_backward", "mlstm_backward.py.jinja", note, user_line(V.graph.current_node))
    return grad_query, grad_key, grad_value, of_rows, of_columns


_WHAT = "what is quadratic in the length of the op mlstm: fused kernels"
FORWARD = KernelOp(NAME, _WHAT, mlstm_tiles, lower_forward, unsupported, BLOCKS)
BACKWARD = KernelOp(NAME, _WHAT, mlstm_tiles_backward, lower_backward, unsupported, BLOCKS)
