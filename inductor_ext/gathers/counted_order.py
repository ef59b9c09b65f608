"""Lowering of ``gradfuse::counted_order`` onto ``key_counts.py.jinja``, ``key_starts.py.jinja`` and ``key_places.py.jinja``.

PyTorch's sort of 65536 keys has fourteen launches (seven kernels, six memsets and a copy), and this one three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from ..core.kernel_op import KernelOp, needs_triton
from ..core.kernels import next_power_of_two
from ..core.templates import load, run
from ..torch_api.ir import contiguous_strides, fixed_layout, realize, require_contiguous
from ..torch_api.lowering import empty_strided
from ..torch_api.template import SymbolicGridFn, Template
from .row_sums import counted_order as op

#: The name that ``disable`` takes.
NAME = "counted_order"
#: The keys of a block: the fewest of these with which there are at most so many blocks, or the most.
BLOCKS, FEW_BLOCKS = (256, 512, 1024), 64
#: A program of the first kernel sets so many columns to 0 at a time.
BLOCK_COLUMNS = 2048
#: A program of the second kernel handles so many columns, and so many blocks at a time.
BLOCK_T = BLOCK_P = 64
#: A program of the third kernel handles so many keys, and loads so many others before it compares them. Four such programs
#: for each block of keys compare as much as one would, on four times as many multiprocessors.
BLOCK_OWN, UNROLL = 256, 32
#: PyTorch sorts up to 4096 keys in one block. Up to 32768 keys this takes less of a GPU's time than a radix sort. 65536 keys
#: take 14 us more, for which eleven launches are saved.
FEWEST, MOST = 4097, 2**16
#: The last kernel adds all tiles of columns before each one, and the counts take memory: bytes.
MOST_ROWS, MOST_BYTES = 4096 * BLOCK_T - 2, 2**25


@SymbolicGridFn
def _grid(programs: Any, meta: dict[str, Any], *, cdiv: Callable[..., Any]) -> tuple:
    return programs, 1, 1


_counts = Template("gradfuse_key_counts", _grid, load("gathers/key_counts"))
_starts = Template("gradfuse_key_starts", _grid, load("gathers/key_starts"))
_places = Template("gradfuse_key_places", _grid, load("gathers/key_places"))


def suits(count: Any, rows: Any) -> bool:
    """Whether to sort so many keys of so many rows by counting. PyTorch sorts dynamic numbers of them."""
    if not all(isinstance(n, (int, sympy.Integer)) for n in (count, rows)):
        return False
    if not FEWEST <= count <= MOST or rows > MOST_ROWS:
        return False
    return -(-count // _block(count)) * (rows + 2) * torch.int32.itemsize <= MOST_BYTES


def unsupported(keys: Any, rows: Any) -> str | None:
    """Return why the kernels cannot take the operands, or None."""
    (count,) = keys.get_size()
    if not suits(count, rows):
        return f"there are {count} keys of {rows} rows"
    return needs_triton(keys)


def _block(count: int) -> int:
    return next((n for n in BLOCKS if n * FEW_BLOCKS >= count), BLOCKS[-1])


def lower(keys: Any, rows: int) -> tuple[Any, Any]:
    """Lower the op. The operand and the results are those of ``gathers.row_sums.counted_order``."""
    device, count = keys.get_device(), int(keys.get_size()[0])
    (keys,) = realize([require_contiguous(keys)])
    block = _block(count)
    blocks, columns = -(-count // block), rows + 2
    tiles = -(-columns // BLOCK_T)

    def empty(dtype: torch.dtype, *size: int) -> Any:
        return empty_strided(size, contiguous_strides(size), dtype=dtype, device=device)

    def kernel(template: Template, operands: list[Any], mutated: list[Any], size: int, programs: int, **options: int) -> Any:
        layout = fixed_layout(device, torch.int32, [size], [1])
        return run(template, [{}], operands, mutated, layout, [programs], **options, num_stages=1)

    counts, first = empty(torch.int32, blocks, columns), empty(torch.int32, columns)
    order, ascending = empty(torch.int64, count), empty(torch.int32, count)
    kernel(_counts, [keys, counts], [counts], blocks, blocks, BLOCK=block, BLOCK_COLUMNS=BLOCK_COLUMNS, num_warps=8)
    totals = kernel(_starts, [counts, first], [counts, first], tiles, tiles, BLOCK_T=BLOCK_T, BLOCK_P=BLOCK_P, num_warps=4)
    own = min(block, BLOCK_OWN)
    sizes = {"BLOCK": block, "BLOCK_OWN": own, "BLOCK_T": BLOCK_T, "TILES": max(16, next_power_of_two(tiles))}
    operands = [keys, counts, first, totals, order, ascending]
    kernel(_places, operands, [order, ascending], count, -(-count // own), **sizes, UNROLL=UNROLL, num_warps=8)
    return order, ascending


KERNEL = KernelOp(NAME, "sorts an index by counting: three launches, whatever its values are", op, lower, unsupported)
