"""What the Gluon prototypes share: names that moved between versions of Triton, layouts, and memory for descriptors."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from inductor_ext.core.gluon_names import result_layout, tma_load

__all__ = ["allow_descriptors", "result_layout", "tma_add", "tma_load", "tma_store"]

#: Triton 3.9 made a function of the addition, which is only an operation of the IR before.
if hasattr(tma, "async_atomic_add"):
    tma_add = tma.async_atomic_add
else:

    @builtin
    def tma_add(desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
        """Add a tile in shared memory to the memory of a descriptor."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


#: Triton 3.9 renamed the store.
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def allow_descriptors() -> None:
    """Give Triton the memory that descriptors made in a kernel need."""
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))
