"""Lowering of ``gradfuse::segment_sum`` onto ``segment_sum.py.jinja`` and ``segment_totals.py.jinja``.

The rewrite does not create this op where Triton kernels cannot run (CPU tensors).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from ..core.fx import working_dtype
from ..core.kernel_op import KernelOp
from ..core.templates import load, run
from ..torch_api.ir import contiguous_strides, fixed_layout, full, realize
from ..torch_api.lowering import empty_strided
from ..torch_api.sizes import CeilDiv, known_at_most
from ..torch_api.template import SymbolicGridFn, Template
from .row_sums import segment_sum as op

aten = torch.ops.aten

#: CHUNK: how many sorted keys each program handles. UNROLL: how many rows it loads at the same time
#: (benchmarks/NOTES.md).
CHUNK = 64
UNROLL = 4
#: The largest number of columns of a program in the first pass and in the second pass, and the number of chunks that the
#: second pass adds at a time.
WIDEST_BLOCK = 1024
WIDEST_TOTALS = 128
BLOCK_C = 64


@SymbolicGridFn
def _grid(chunks: Any, width: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    return chunks, cdiv(width, meta["BLOCK_H"]), 1


_sums = Template("gradfuse_segment_sum", _grid, load("gathers/segment_sum"))
_totals = Template("gradfuse_segment_totals", _grid, load("gathers/segment_totals"))


def _block(width: Any, widest: int) -> int:
    """The number of columns of a tile: ``widest``, or a smaller power of two if the row is known to fit into it."""
    block = 16
    while block < widest and not known_at_most(width, block):
        block *= 2
    return block


def lower(values: Any, order: Any, keys: Any, offset: int, rows: Any, dtype: torch.dtype) -> Any:
    """Lower the op. The operands and the result are those of ``gathers.row_sums.segment_sum``."""
    device, (count, width) = values.get_device(), values.get_size()
    wide = working_dtype(values.get_dtype())
    values, order, keys = realize([values, order, keys])
    out = full([rows, width], 0, dtype, device)
    chunks = sympy.Max(1, CeilDiv(count, CHUNK))
    partial_strides = contiguous_strides([chunks, width])
    tail = empty_strided([chunks, width], partial_strides, dtype=wide, device=device)
    template_options = {
        "CHUNK": CHUNK,
        "OFFSET": offset,
        "LEFT_OUT": -1 - offset,
        "ACC_DTYPE": "tl.float64" if wide is torch.float64 else "tl.float32",
        "num_stages": 1,
    }

    block = _block(width, WIDEST_BLOCK)
    head = run(
        _sums,
        [{}],
        [values, order, keys, out, tail],
        [out, tail],
        fixed_layout(device, wide, [chunks, width], partial_strides),
        [chunks, width],
        **template_options,
        BLOCK_H=block,
        UNROLL=UNROLL,
        num_warps=max(1, min(4, block // 256)),
    )
    run(
        _totals,
        [{}],
        [keys, head, tail, out],
        [out],
        fixed_layout(device, torch.int32, [chunks], [1]),
        [chunks, width],
        **template_options,
        BLOCK_H=_block(width, WIDEST_TOTALS),
        BLOCK_C=BLOCK_C,
        num_warps=4,
    )
    return out


KERNEL = KernelOp("segment_sum", "scatter-adds by a sorted index: the rows of each segment added in order", op, lower)
