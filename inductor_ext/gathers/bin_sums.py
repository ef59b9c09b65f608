"""Lowering of ``gradfuse::bin_sums`` onto ``bin_sums.py.jinja``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.kernel_op import KernelOp, needs_triton
from ..core.templates import load, run
from ..torch_api.ir import contiguous_strides, fixed_layout, realize
from ..torch_api.template import SymbolicGridFn, make_template
from .row_sums import bin_sums as op

#: Slices, values and bins of a tile: one tile of values and one of sums fit into registers.
BLOCK = 64
_TRITON = {torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32"}


@SymbolicGridFn
def _grid(rows: Any, slices: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    return rows, cdiv(slices, meta["BLOCK_L"]), 1


_template = make_template("gradfuse_bin_sums", _grid, load("gathers/bin_sums"))


def unsupported(values: Any, index: Any, bins: Any) -> str | None:
    """Return why the kernel cannot take the operands, or None."""
    if values.get_dtype() not in _TRITON:
        return f"there is no kernel for {values.get_dtype()}"
    return needs_triton(values)


def lower(values: Any, index: Any, bins: Any) -> Any:
    """Lower the op. The operands and the result are those of ``gathers.row_sums.bin_sums``."""
    dtype, (slices, rows, _) = values.get_dtype(), values.get_size()
    values, index = realize([values, index])
    size = [slices, rows, bins]
    return run(
        _template,
        [{}],
        [values, index],
        [],
        fixed_layout(values.get_device(), torch.float32, size, contiguous_strides(size)),
        [rows, slices],
        VALUE_DTYPE=_TRITON[dtype],
        # A one-hot matrix is exact in any dtype. Three TF32 products of fp32 values are as exact as one in fp32.
        PRECISION="'tf32x3'" if dtype is torch.float32 else "'ieee'",
        BLOCK_L=BLOCK,
        BLOCK_N=BLOCK,
        BLOCK_J=BLOCK,
        num_warps=4,
        num_stages=2,
    )


KERNEL = KernelOp(
    "bin_sums", "gradients of lookups in rows: the values of each bin added by matmuls", op, lower, unsupported
)
