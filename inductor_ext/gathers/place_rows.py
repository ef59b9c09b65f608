"""Lowering of ``gradfuse::place_rows`` into Inductor's own IR: a store by an index that is proven to be a permutation.

Inductor fuses the computation of the rows into the store. ``index_put`` would do the same, but it checks every index. Under
``deterministic`` it would not fuse at all: there Inductor sorts the indices first, because two of them could be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.kernel_op import KernelOp, runs_anywhere
from ..torch_api.config import uses_triton_on_cpu
from ..torch_api.ir import contiguous_strides, store_at
from ..torch_api.lowering import empty_strided, ops
from .row_sums import place_rows as op


def lower(values: Any, indices: Any) -> Any:
    """Lower the op. The operands and the result are those of ``gathers.row_sums.place_rows``."""
    device, dtype, size = values.get_device(), values.get_dtype(), values.get_size()
    load_index = indices.make_loader()
    # If a kernel also has a checked read, the C++ that torch 2.13 emits for an unchecked one does not compile.
    in_cpp = device.type == "cpu" and not uses_triton_on_cpu()

    def at(index: Sequence[Any]) -> list[Any]:
        return [ops.indirect_indexing(load_index([index[0]]), size[0], check=in_cpp, wrap_neg=in_cpp), *index[1:]]

    out = empty_strided(size, contiguous_strides(size), dtype=dtype, device=device)
    return store_at(out, values.make_loader(), size, at)


KERNEL = KernelOp("place_rows", "scatters by a permutation, as plain stores", op, lower, runs_anywhere)
