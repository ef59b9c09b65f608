"""The names that a kernel in Gluon uses. Some have moved between versions of Triton."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

__all__ = [
    "gl",
    "gluon",
    "maximum",
    "mbarrier",
    "minimum",
    "result_layout",
    "tma",
    "tma_load",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

#: Triton 3.9 renamed the load.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.constexpr_function
def result_layout(columns: int) -> Any:
    """The layout of a matmul's result of 64 rows in one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


# Triton 3.7 and older take an annotation of a kernel's argument for the name of a dtype.
@gluon.jit
def minimum(x, y):  # noqa: ANN001, ANN201
    """The smaller one, NaN if one of them is."""
    return gl.where((x < y) | (x != x), x, y)


@gluon.jit
def maximum(x, y):  # noqa: ANN001, ANN201
    """The larger one, NaN if one of them is."""
    return gl.where((x > y) | (x != x), x, y)
