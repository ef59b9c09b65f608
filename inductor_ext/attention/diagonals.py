"""How the diagonals of a (query, key) plane lie in memory.

A **table** of a diagonal has Q + K - 1 elements: that of ``d = k - q`` at ``d`` (negative distances at the end, where a
negative index finds them), that of ``q + k`` at ``q + k``. A tile of M queries and N keys needs M + N - 1 neighbours of it,
which a kernel loads once and spreads over the tile.

A **strip** is where the backward kernel adds whole tiles: R rows, skewed so that a tile of at most R queries that starts at
a multiple of its own length is one aligned block. Distance ``d`` of query ``q`` stands at ``[q % R, d + q % R + offset]``,
and ``s = q + k`` at ``[q % R, s - q % R + R]``. Summed along its own diagonals, a strip is a table.
"""

from __future__ import annotations

#: Rows of a strip, a power of two.
STRIP_ROWS = 64
#: Kernel options by which the lowering knows which captured tensors (bit i: the i-th) hold diagonals.
DIAGONAL_OPTION = "GRADFUSE_DIAGONALS"
ANTIDIAGONAL_OPTION = "GRADFUSE_ANTIDIAGONALS"
#: Elements that a strip's rows are padded to.
ALIGNMENT = 16


def _round_up(n: int) -> int:
    return (n + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def strip_shape(queries: int, keys: int) -> tuple[int, int]:
    """The offset of a strip (the column of key 0 of query 0) and the length of its rows, tiles at the ends included."""
    offset = _round_up(queries + STRIP_ROWS)
    return offset, offset + _round_up(keys + 3 * STRIP_ROWS)
