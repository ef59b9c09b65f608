"""Lowering of ``gradfuse::bin_sums`` onto ``bin_sums.py.jinja``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.kernel_op import KernelOp, needs_triton
from ..core.kernels import SUPPORTED_DTYPES
from ..core.templates import load, run
from ..torch_api.ir import contiguous_strides, fixed_layout, realize
from ..torch_api.template import SymbolicGridFn, Template
from .row_sums import bin_sums as op

#: The slices, values and bins of a tile, and the warps of a program. Making one-hot matrices takes most of the time, and
#: with 128 values and bins a program makes twice as many numbers of them (docs/notes/attention.md).
TILES = {"BLOCK_L": 64, "BLOCK_N": 64, "BLOCK_J": 64, "num_warps": 4}


@SymbolicGridFn
def grid(rows: Any, slices: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    """One axis for rows and tiles of slices, because the others end at 65535."""
    return rows * cdiv(slices, meta["BLOCK_L"]), 1, 1


_template = Template("gradfuse_bin_sums", grid, load("gathers/bin_sums"))


def unsupported(values: Any, index: Any, bins: Any) -> str | None:
    """Return why the kernel cannot take the operands, or None."""
    if values.get_dtype() not in SUPPORTED_DTYPES:
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
        # A one-hot matrix is exact in any dtype, and three numbers of 8 bits are one of 24.
        PART_DTYPE="tl.float16" if dtype is torch.float16 else "tl.bfloat16",
        PARTS=3 if dtype is torch.float32 else 1,
        LARGEST=torch.finfo(torch.bfloat16).max,
        **TILES,
        num_stages=2,
    )


KERNEL = KernelOp(
    "bin_sums", "gradients of lookups in rows: the values of each bin added by matmuls", op, lower, unsupported
)
