"""Lowering of ``gradfuse::entry_sums`` onto ``entry_sums.py.jinja``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.kernel_op import KernelOp, needs_triton
from ..core.kernels import next_power_of_two
from ..core.templates import load, run
from ..torch_api.ir import contiguous_strides, fixed_layout, realize, require_contiguous
from ..torch_api.lowering import lowerings
from ..torch_api.template import SymbolicGridFn, Template
from .row_sums import entry_sums as op

aten = torch.ops.aten

#: The values of one batch element that a program adds; the entries, heads and values of a tile; warps and stages.
SPAN, BLOCK_E, BLOCK_H, BLOCK_N = 8192, 256, 32, 64
WARPS, STAGES = 8, 3


@SymbolicGridFn
def grid(parts: Any, heads: Any, entries: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    """One program for each part of a batch element, tile of entries and tile of heads."""
    return parts, cdiv(entries, meta["BLOCK_E"]), cdiv(heads, meta["BLOCK_H"])


_template = Template("gradfuse_entry_sums", grid, load("gathers/entry_sums"))


def unsupported(values: Any, index: Any, entries: Any, parts: Any) -> str | None:
    """Return why the kernel cannot take the operands, or None."""
    if values.get_dtype() is not torch.float32:
        return f"there is no kernel for {values.get_dtype()}"
    return needs_triton(values)


def lower(values: Any, index: Any, entries: Any, parts: Any) -> Any:
    """Lower the op. The operands and the result are those of ``gathers.row_sums.entry_sums``."""
    values, index = realize([require_contiguous(values), require_contiguous(index)])
    batch, heads, count = values.get_size()
    spans = (count + SPAN - 1) // SPAN
    size = [batch * spans, heads, entries]
    sums = run(
        _template,
        [{}],
        [values, index],
        [],
        fixed_layout(values.get_device(), torch.float32, size, contiguous_strides(size)),
        size,
        SPAN=SPAN,
        PARTS=parts,
        LARGEST=torch.finfo(torch.bfloat16).max,
        BLOCK_E=min(BLOCK_E, max(64, next_power_of_two(entries))),
        BLOCK_H=max(16, min(BLOCK_H, next_power_of_two(int(heads)))),
        BLOCK_N=BLOCK_N,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return lowerings[aten.sum](sums, axis=[0])


KERNEL = KernelOp(
    "entry_sums", "gradients of small tables by an index of pairs: values added by matmuls", op, lower, unsupported
)
