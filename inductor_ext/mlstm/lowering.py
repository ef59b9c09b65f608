"""Lowerings of ``gradfuse::mlstm_tiles`` and its backward onto ``mlstm_forward.py.jinja`` and ``mlstm_backward.py.jinja``.

For dtypes and widths that the templates do not take the op's eager code runs, in blocks of rows. (On CPU tensors
``mlstm/cpu.py`` has replaced the ops before.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch

from ..core import kernels
from ..core.report import record, user_line
from ..core.templates import load, run
from ..torch_api.config import uses_triton_on_cpu
from ..torch_api.ir import contiguous_strides, full, node_layout, realize, require_contiguous
from ..torch_api.lowering import V, empty, empty_strided, fallback
from ..torch_api.sizes import Mod
from ..torch_api.template import SymbolicGridFn, make_template
from .configs import backward_configs, forward_configs
from .tiles_op import mlstm_tiles, mlstm_tiles_backward

NAME = "mlstm"
#: The path of a decision for the op's own code.
BLOCKS = "blocks of rows"
#: Widest head of queries, keys or values that the templates hold in registers, by the size of an element in bytes.
WIDEST = {2: 512, 4: 256}


@SymbolicGridFn
def _forward_grid(planes: Any, length: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    return planes, cdiv(length, meta["BLOCK_M"]), 1


@SymbolicGridFn
def _backward_grid(planes: Any, length: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    key_programs = cdiv(length, meta["BLOCK_N1"]) * (2 if meta["SPLIT"] else 1)
    return planes, key_programs + cdiv(length, meta["BLOCK_M2"]), 1


_forward = make_template("gradfuse_mlstm_forward", _forward_grid, load("mlstm/mlstm_forward"))
_backward = make_template("gradfuse_mlstm_backward", _backward_grid, load("mlstm/mlstm_backward"))


def why_not(query: Any, value: Any) -> str | None:
    """Why these operands cannot go to the templates, or None where they can."""
    device, dtype = query.get_device(), query.get_dtype()
    if device.type != "cuda" and not (device.type == "cpu" and uses_triton_on_cpu()):
        return f"device {device.type!r} has no kernel"
    if dtype not in kernels.SUPPORTED_DTYPES:
        return f"dtype {dtype}"
    widest, widths = WIDEST[dtype.itemsize], [V.graph.sizevars.guard_int(x.get_size()[-1]) for x in (query, value)]
    if max(widths) > widest:
        return f"head widths {widths}, over {widest}"
    return None


def _options(query: Any, value: Any, scale: float) -> dict[str, Any]:
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
        "FLOAT32_PRECISION": kernels.float32_precision(),
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


def lower_forward(
    query: Any,
    key: Any,
    value: Any,
    log_weight: Any,
    log_max: Any,
    floor: Any,
    norm_weight: Any,
    norm_bias: Any,
    norm: bool,
    eps: float,
    norm_eps: float,
    scale: float,
) -> Any:
    """The replacement of the op; its operands and results are those of ``ops.mlstm_tiles.mlstm_tiles``."""
    where, reason = user_line(V.graph.current_node), why_not(query, value)
    if reason is not None:
        record(NAME, "mlstm", BLOCKS, reason, where)
        operands = (query, key, value, log_weight, log_max, floor, norm_weight, norm_bias, norm, eps, norm_eps, scale)
        return fallback(mlstm_tiles)(*operands)
    device = query.get_device()
    rows = [require_contiguous(x) for x in (log_weight, log_max, floor)]
    affine = [_none(device) if x is None else require_contiguous(x) for x in (norm_weight, norm_bias)]
    query, key, value, *rows_and_affine = realize([query, key, value, *rows, *affine])
    layout = node_layout(0)
    plain = norm_weight is None and norm_bias is None
    normalised = empty(0, dtype=query.get_dtype(), device=device) if plain else _empty(layout)
    row_sum, rstd = _row_numbers(query), _row_numbers(query)
    if not norm:
        rstd = full(list(query.get_size()[:3]), 1, torch.float32, device)
    written = [normalised, row_sum, rstd]
    out = run(
        _forward,
        forward_configs(query, value),
        [query, key, value, *rows_and_affine, *written],
        written,
        layout,
        _grid_sizes(query),
        NORM=norm,
        WEIGHT=norm_weight is not None,
        BIAS=norm_bias is not None,
        EPS=eps,
        NORM_EPS=norm_eps,
        **_options(query, value, scale),
    )
    record(NAME, "mlstm", "mlstm_forward.py.jinja", f"query {tuple(query.get_size())}", where)
    return out, *written


def lower_backward(
    query: Any,
    key: Any,
    value: Any,
    grad: Any,
    log_weight: Any,
    log_row: Any,
    term: Any,
    place: Any,
    through_max: Any,
    scale: float,
    has_max_term: bool,
) -> Any:
    """The replacement of the op; its operands and results are those of ``ops.mlstm_tiles.mlstm_tiles_backward``."""
    where, reason = user_line(V.graph.current_node), why_not(query, value)
    if reason is not None:
        record(NAME, "mlstm_backward", BLOCKS, reason, where)
        operands = (query, key, value, grad, log_weight, log_row, term, place, through_max, scale, has_max_term)
        return fallback(mlstm_tiles_backward)(*operands)
    rows = [require_contiguous(x) for x in (log_weight, log_row, term, place, through_max)]
    query, key, value, grad, *rows = realize([query, key, value, grad, *rows])
    written = [_empty(node_layout(0)), _empty(node_layout(2)), _row_numbers(query), _row_numbers(query)]
    grad_key = run(
        _backward,
        backward_configs(query, value),
        [query, key, value, grad, *rows, *written],
        written,
        node_layout(1),
        _grid_sizes(query),
        HAS_MAX_TERM=has_max_term,
        **_options(query, value, scale),
    )
    grad_query, grad_value, of_rows, of_columns = written
    record(NAME, "mlstm_backward", "mlstm_backward.py.jinja", "two passes, no atomics", where)
    return grad_query, grad_key, grad_value, of_rows, of_columns
