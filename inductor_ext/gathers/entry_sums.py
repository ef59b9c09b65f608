"""Lowering of ``gradfuse::entry_sums`` onto ``entry_sums.py.jinja``."""

from __future__ import annotations

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
from .row_sums import entry_sums as op

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


def unsupported(values: Any, index: Any, entries: Any, parts: Any, each: bool = False) -> str | None:
    """Return why the kernel cannot take the operands, or None."""
    if values.get_dtype() not in SUPPORTED_DTYPES:
        return f"there is no kernel for {values.get_dtype()}"
    if isinstance(entries, int) and entries > MOST_ENTRIES:
        return f"there are {entries} entries; the kernel takes at most {MOST_ENTRIES}"
    return needs_triton(values)


def lower(values: Any, index: Any, entries: Any, parts: int, each: bool = False) -> Any:
    """Lower the op. The operands and the result are those of ``gathers.row_sums.entry_sums``."""
    dtype, (batch, heads, count) = values.get_dtype(), values.get_size()
    values, index = realize([values, require_contiguous(index)])
    parts = parts if dtype is torch.float32 else 1
    tile = _tile(hint(entries), hint(heads), parts, each)
    tiles = -(-entries // tile["BLOCK_E"]) * -(-heads // tile["BLOCK_H"])
    span = None if each else _span(batch * tiles, count, tile["BLOCK_N"])
    programs = [batch if each else batch * -(-count // span), heads, entries]
    size = [heads, batch, entries] if each else programs
    sums = run(
        _template,
        [{}],
        [values, index],
        [],
        fixed_layout(values.get_device(), torch.float32, size, contiguous_strides(size)),
        programs,
        SPAN=span,
        PARTS=parts,
        PART_DTYPE="tl.float16" if dtype is torch.float16 else "tl.bfloat16",
        LARGEST=torch.finfo(torch.bfloat16).max,
        BLOCK_SEARCH=BLOCK_SEARCH,
        **tile,
        num_stages=3,
    )
    return sums if each else lowerings[aten.sum](sums, axis=[0])


def _tile(entries: int, heads: int, parts: int, each: bool) -> dict[str, int]:
    """The tile, and the warps of a program.

    For 512 entries of 32 heads the tiles take 0.89 ms, and others 0.91 to 1.43. Those of more heads would spill.

    each: the values of a tile's entries are searched first. For DeBERTa's 512 bins, 64 entries take 0.23 ms, 128 take 0.24,
    and 64 with 64 values at a time 0.32.
    """
    tile_heads = max(16, min(BLOCK_H, next_power_of_two(heads)))
    if each:
        return {"BLOCK_E": FEWEST_ENTRIES, "BLOCK_H": tile_heads, "BLOCK_N": 32, "num_warps": 4}
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
    "gradients of lookups in few entries, or within rows: the values of each entry added by matmuls",
    op,
    lower,
    unsupported,
)
