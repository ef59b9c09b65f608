"""``store_flipped(x, dim)``: x flipped along a dim, by the kernel that computes x: it stores each element in its place.

Inductor computes a ``flip`` where the result is read. Loops in opposite orders are not fused, so a kernel that scans would
store x in the order of the scan, and a second kernel would read it from the other end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_api.ir import contiguous_strides, store_at
from ..torch_api.lowering import empty_strided


@torch.library.custom_op("gradfuse::store_flipped", mutates_args=())
def store_flipped(x: Tensor, dim: int) -> Tensor:
    """``x`` flipped along ``dim``, which counts from 0. The result is contiguous."""
    return x.flip(dim).contiguous()


@store_flipped.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def lower(x: Any, dim: int) -> Any:
    """Lower the op. The operands and the result are those of ``store_flipped``."""
    size = x.get_size()

    def at(index: Sequence[Any]) -> list[Any]:
        return [size[d] - 1 - i if d == dim else i for d, i in enumerate(index)]

    out = empty_strided(size, contiguous_strides(size), dtype=x.get_dtype(), device=x.get_device())
    return store_at(out, x.make_loader(), size, at)
