"""Lowerings of ``gradfuse::entry_sums`` and ``gradfuse::bin_sums`` onto ``entry_sums.py.jinja``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..core.kernel_op import KernelOp, needs_triton
from ..core.kernels import SUPPORTED_DTYPES, next_power_of_two
from ..core.templates import load, run
from ..torch_api.ir import contiguous_strides, fixed_layout, realize, require_contiguous
from ..torch_api.lowering import lowerings
from ..torch_api.sizes import hint
from ..torch_api.template import SymbolicGridFn, Template
from .row_sums import bin_sums, entry_sums

aten = torch.ops.aten

#: The most entries of a tile, the fewest (a matmul has at least 64 rows), and the most heads.
BLOCK_E, FEWEST_ENTRIES, BLOCK_H = 512, 64, 64
#: How many indices of a row are looked at at a time, in the search for those with entries of a tile.
BLOCK_SEARCH = 512
#: The kernel compares entries by two digits of 8 bits. The largest number is for values without an entry.
MOST_ENTRIES = 2**16 - 1
#: How many programs there should be, if each then has at least so many values.
PROGRAMS, FEWEST = 512, 512


@SymbolicGridFn
def grid(parts: Any, heads: Any, entries: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    """One axis for parts, tiles of heads and tiles of entries, because the others end at 65535."""
    return parts * cdiv(heads, meta["BLOCK_H"]) * cdiv(entries, meta["BLOCK_E"]), 1, 1


_template = Template("gradfuse_entry_sums", grid, load("gathers/entry_sums"))


def unsupported(values: Any, index: Any, entries: Any, parts: Any) -> str | None:
    """Return why the kernel cannot take the operands of either op, or None."""
    if values.get_dtype() not in SUPPORTED_DTYPES:
        return f"there is no kernel for {values.get_dtype()}"
    if index.get_dtype() not in (torch.int32, torch.int64):
        return f"there is no kernel for an index of {index.get_dtype()}"
    if len(values.get_size()) < 3 or 0 in (*values.get_size(), entries):
        return f"there is no kernel for values of shape {tuple(values.get_size())} and {entries} entries"
    if isinstance(entries, int) and entries > MOST_ENTRIES:
        return f"there are {entries} entries; the kernel takes at most {MOST_ENTRIES}"
    # Inductor stores a single element without the template's mask.
    if entries == 1 and all(n == 1 for n in values.get_size()[:-1]):
        return "there is one sum"
    return needs_triton(values)


def lower(values: Any, index: Any, entries: Any, parts: int) -> Any:
    """Lower ``gathers.row_sums.entry_sums``."""
    (values,) = realize([values])
    batch, heads, count = values.get_size()
    tile = _tile(hint(entries), hint(heads), parts if values.get_dtype() is torch.float32 else 1)
    tiles = -(-entries // tile["BLOCK_E"]) * -(-heads // tile["BLOCK_H"])
    span = _span(batch * tiles, count, tile["BLOCK_N"])
    size = [batch * -(-count // span), heads, entries]
    sums = _sums(values, index, parts, size, size, SLICE_DIMS=0, SPAN=span, num_stages=3, **tile)
    return lowerings[aten.sum](sums, axis=[0])


def lower_bins(values: Any, index: Any, bins: Any, parts: int) -> Any:
    """Lower ``gathers.row_sums.bin_sums``.

    The template stores the result in its final shape, so that Inductor can fuse what follows into the kernel.
    """
    (values,) = realize([values])
    if values.get_stride()[-1] != 1:
        values = require_contiguous(values)
    *slices, rows, _ = values.get_size()
    heads = math.prod(slices)
    # 64 entries take 0.15 ms for DeBERTa's 512 bins of 192 slices, and 0.20 in two to four stages or with 128 entries.
    tile = {"BLOCK_E": FEWEST_ENTRIES, "BLOCK_H": _block_of_heads(hint(heads)), "BLOCK_N": 32, "num_warps": 4}
    fixed = {"SLICE_DIMS": len(slices), "num_stages": 1}
    return _sums(values, index, parts, [*slices, rows, bins], [rows, heads, bins], **fixed, **tile)


def _sums(values: Any, index: Any, parts: int, size: list[Any], programs: list[Any], **options: Any) -> Any:
    """Return the template's output of that size. programs: the numbers of parts, heads and entries."""
    dtype = values.get_dtype()
    return run(
        _template,
        [{}],
        [values, *realize([require_contiguous(index)])],
        [],
        fixed_layout(values.get_device(), torch.float32, size, contiguous_strides(size)),
        programs,
        PARTS=parts if dtype is torch.float32 else 1,
        PART_DTYPE="tl.float16" if dtype is torch.float16 else "tl.bfloat16",
        LARGEST=torch.finfo(torch.bfloat16).max,
        BLOCK_SEARCH=BLOCK_SEARCH,
        **options,
    )


def _block_of_heads(heads: int) -> int:
    return max(16, min(BLOCK_H, next_power_of_two(heads)))


def _tile(entries: int, heads: int, parts: int) -> dict[str, int]:
    """The tile, and the warps of a program.

    For 512 entries of 32 heads the tiles take 0.89 ms, and others 0.91 to 1.43. Those of more heads would spill.
    """
    tile_heads = _block_of_heads(heads)
    most = BLOCK_E if tile_heads < BLOCK_H else BLOCK_E // 2
    tile_entries = min(most, max(FEWEST_ENTRIES, next_power_of_two(entries)))
    wide = tile_entries == 512 or (tile_entries == 256 and tile_heads == BLOCK_H and parts == 3)
    return {
        "BLOCK_E": tile_entries,
        "BLOCK_H": tile_heads,
        "BLOCK_N": 32 if tile_entries == 256 else 64,
        "num_warps": 8 if wide else 4,
    }


def _span(programs: int, count: int, block: int) -> int:
    """The number of values of a program: a multiple of a tile. programs: how many there are for each span."""
    span = max(FEWEST, -(-count // -(-PROGRAMS // programs)))
    return -(-span // block) * block


KERNEL = KernelOp(
    "entry_sums",
    "gradients of lookups in few entries: the values of each entry added by matmuls",
    entry_sums,
    lower,
    unsupported,
)
BINS = KernelOp(
    "bin_sums",
    "gradients of lookups within rows, by an index that is the same in many slices: the values of each bin added by matmuls",
    bin_sums,
    lower_bins,
    unsupported,
)
