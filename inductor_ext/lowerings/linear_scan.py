"""Lowering of ``gradfuse::linear_scan`` onto ``scan.py.jinja``; on CPU tensors the op's loop runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import compat
from ..compat import SymbolicGridFn
from ..ops.linear_scan import linear_scan
from .templates import load, run

#: Times and lanes of a tile; its loads are all in flight at once (benchmarks/NOTES.md).
BLOCK_T = 256
BLOCK_L = 16
NUM_WARPS = 8


@SymbolicGridFn
def _grid(planes: Any, lanes: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    return cdiv(lanes, meta["BLOCK_L"]), planes, 1


_template = compat.make_template("gradfuse_scan", _grid, load("scan"))


def lower(coefficients: Any, inputs: Any, reverse: bool, dtype: torch.dtype) -> Any:
    """The replacement of the op; its operands and result are those of ``ops.linear_scan.linear_scan``."""
    if inputs.get_device().type == "cpu" and not compat.uses_triton_on_cpu():
        return compat.fallback(linear_scan)(coefficients, inputs, reverse, dtype)
    dtypes = (coefficients.get_dtype(), inputs.get_dtype())
    wide = torch.promote_types(torch.promote_types(*dtypes), torch.float32)
    coefficients, inputs = compat.realize([coefficients, inputs])
    config = {"BLOCK_T": BLOCK_T, "BLOCK_L": BLOCK_L, "num_warps": NUM_WARPS, "num_stages": 1}
    accumulator = "tl.float64" if wide is torch.float64 else "tl.float32"
    sizes = inputs.get_size()[1:]
    operands = [coefficients, inputs]
    return run(_template, [config], operands, [], compat.node_layout(), sizes, REVERSE=reverse, ACC_DTYPE=accumulator)
