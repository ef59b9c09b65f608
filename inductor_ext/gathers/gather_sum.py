"""Lowering of ``gradfuse::gather_sum`` into Inductor's own IR.

Inductor can therefore fuse the op with the computation of its rows and with the users of its sums. If only a few rows are
added, the lowering writes one pointwise expression, because Inductor's reduction over a short dim that is not the innermost
runs at a fourth of the bandwidth (benchmarks/NOTES.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core.fx import working_dtype
from ..core.kernel_op import KernelOp, runs_anywhere
from ..torch_api.ir import inductor_ir
from ..torch_api.lowering import lowerings, ops
from .row_sums import gather_sum as op

#: The largest number of rows that are added without a loop.
MOST_UNROLLED = 16


def lower(values: Any, indices: Any, rows: Any, times: Any, strided: bool) -> Any:
    """Lower the op. The operands and the result are those of ``gathers.row_sums.gather_sum``."""
    count, *rest = values.get_size()
    dtype = working_dtype(values.get_dtype())
    load, load_index = values.make_loader(), indices.make_loader() if indices is not None else None

    def read(row: Any, column: Sequence[Any], j: Any) -> Any:
        at = j * rows + row if strided else row * times + j
        if load_index is not None:
            # The rewrite has proven that the index is in range, so it needs no check and no wrapping of negative indices.
            at = ops.indirect_indexing(load_index([at]), count, check=False, wrap_neg=False)
        return ops.to_dtype(load([at, *column]), dtype)

    common = {"device": values.get_device(), "dtype": dtype}
    if not isinstance(times, int) or times > MOST_UNROLLED:
        chosen = inductor_ir.Pointwise.create(
            inner_fn=lambda i: read(i[0], i[2:], i[1]), ranges=[rows, times, *rest], **common
        )
        return lowerings[torch.ops.aten.sum](chosen, axis=[1])

    def total(index: Sequence[Any]) -> Any:
        result = read(index[0], index[1:], 0)
        for j in range(1, times):
            result = ops.add(result, read(index[0], index[1:], j))
        return result

    return inductor_ir.Pointwise.create(inner_fn=total, ranges=[rows, *rest], **common)


KERNEL = KernelOp("gather_sum", "scatter-adds that are sums of k gathered rows", op, lower, runs_anywhere)
