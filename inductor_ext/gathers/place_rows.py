"""Lowering of ``gradfuse::place_rows``: a store whose places are proven to be a permutation, in Inductor's own IR.

What makes the rows fuses in. ``index_put`` would do the same with a check of every place, and not at all under
``deterministic``, where Inductor sorts the places first because two could be one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.kernel_op import KernelOp, runs_anywhere
from ..torch_api.config import uses_triton_on_cpu
from ..torch_api.ir import contiguous_strides, store_at
from ..torch_api.lowering import empty_strided, ops
from .row_sums import place_rows as op


def lower(values: Any, places: Any) -> Any:
    """The replacement of the op; its operands and result are those of ``gathers.row_sums.place_rows``."""
    device, dtype, size = values.get_device(), values.get_dtype(), values.get_size()
    place = places.make_loader()
    # Beside a checked read, torch 2.13 emits C++ that does not compile for an unchecked one.
    in_cpp = device.type == "cpu" and not uses_triton_on_cpu()

    def at(index: Sequence[Any]) -> list[Any]:
        return [ops.indirect_indexing(place([index[0]]), size[0], check=in_cpp, wrap_neg=in_cpp), *index[1:]]

    out = empty_strided(size, contiguous_strides(size), dtype=dtype, device=device)
    return store_at(out, values.make_loader(), size, at)


KERNEL = KernelOp("place_rows", "scatters by a permutation, as plain stores", op, lower, runs_anywhere)
