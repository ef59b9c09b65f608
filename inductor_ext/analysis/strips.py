"""Skewed strips: how the diagonals of a (query, key) plane are laid out so that tiles are aligned blocks.

A strip of R rows holds a function of ``d = k - q`` as ``strip[q % R, k - (q - q % R) + offset]``, and one of ``q + k`` as
``strip[q % R, k + (q - q % R)]``. Two neighbouring queries read neighbouring rows at the same column: a tile of at most R
queries that starts at a multiple of its own length is one block of the strip.

Score_mods read a strip of ``TABLE_ROWS`` rows, small enough for the caches. The backward kernel adds whole tiles into one of
``TILE_ROWS`` rows, which is folded to the table's.
"""

from __future__ import annotations

#: Rows of the strip that a score_mod reads, and of the one that the backward kernel adds to. Powers of two.
TABLE_ROWS = 8
TILE_ROWS = 64
#: Kernel options by which the lowering knows which captured tensors (bit i: the i-th) hold diagonals, mostly as strips.
DIAGONAL_OPTION = "GRADFUSE_DIAGONAL_STRIPS"
ANTIDIAGONAL_OPTION = "GRADFUSE_ANTIDIAGONAL_STRIPS"
#: Elements that a strip's rows are padded to.
ALIGNMENT = 16


def _round_up(n: int) -> int:
    return (n + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def table_shape(queries: int, keys: int) -> tuple[int, int]:
    """The offset of a table's strip (where key 0 of query 0 stands) and the length of its rows."""
    offset = _round_up(queries)
    return offset, offset + _round_up(keys + TABLE_ROWS)


def tile_shape(queries: int, keys: int) -> tuple[int, int]:
    """The same for the strip that the kernel adds tiles to; the padding holds what folding reads beyond the ends."""
    offset = _round_up(queries + TILE_ROWS)
    return offset, offset + _round_up(keys + 3 * TILE_ROWS)


def fold_start(queries: int, keys: int, group: int, antidiagonal: bool) -> int:
    """The column of the tile strip's rows ``group * TABLE_ROWS ...`` that folds onto column 0 of the table's strip."""
    if antidiagonal:
        return TILE_ROWS - group * TABLE_ROWS
    return tile_shape(queries, keys)[0] - table_shape(queries, keys)[0] + group * TABLE_ROWS
