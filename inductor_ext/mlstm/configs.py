"""The tiles of the mLSTM templates, by family, head width and dtype. Measurements are in docs/notes/mlstm.md."""

from __future__ import annotations

from typing import Any

from ..core.kernels import next_power_of_two
from ..core.target import Family, Target
from ..torch_api.config import inductor_config
from ..torch_api.lowering import V


def _width(query: Any, value: Any) -> int:
    sizes = (V.graph.sizevars.guard_int(x.get_size()[-1]) for x in (query, value))
    return next_power_of_two(max(sizes))


def _forward(block_m: int, block_n: int, num_warps: int, num_stages: int) -> dict[str, Any]:
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}


def _backward(
    block_n1: int, block_m1: int, block_m2: int, block_n2: int, num_warps: int, num_stages: int, split: bool = False
) -> dict[str, Any]:
    blocks = {"BLOCK_N1": block_n1, "BLOCK_M1": block_m1, "BLOCK_M2": block_m2, "BLOCK_N2": block_n2}
    return {**blocks, "SPLIT": split, "num_warps": num_warps, "num_stages": num_stages}


#: Tiles by the size of an element in bytes, and then by the widest head (a power of two) for which a tile is used.
_Table = dict[int, dict[int, dict[str, Any]]]

#: A tile has 64 rows with 4 warps and 128 rows with 8 warps: Hopper's matmuls give 64 rows to each group of four warps.
_FORWARD: _Table = {
    2: {
        64: _forward(128, 64, 8, 3),
        128: _forward(64, 64, 4, 3),
        256: _forward(128, 64, 8, 2),
        512: _forward(32, 32, 8, 1),
    },
    4: {64: _forward(32, 32, 4, 1), 128: _forward(32, 16, 4, 1), 256: _forward(32, 16, 8, 1)},
}
_BACKWARD: _Table = {
    2: {
        64: _backward(64, 64, 64, 64, 4, 3),
        128: _backward(64, 32, 64, 32, 4, 3),
        256: _backward(128, 32, 128, 32, 8, 2, split=True),
        512: _backward(32, 32, 32, 32, 8, 1, split=True),
    },
    4: {
        64: _backward(32, 16, 32, 16, 4, 1),
        128: _backward(16, 16, 16, 16, 8, 1, split=True),
        256: _backward(16, 16, 16, 16, 8, 1, split=True),
    },
}
#: Where there are no such matmuls, the tiles above would spill registers. These tiles have never been timed.
_FORWARD_ELSEWHERE: _Table = {2: {128: _forward(64, 32, 4, 3), 256: _forward(64, 32, 8, 2)}, 4: {}}
_BACKWARD_ELSEWHERE: _Table = {
    2: {
        64: _backward(64, 32, 64, 32, 4, 2),
        128: _backward(64, 32, 64, 32, 8, 2),
        256: _backward(64, 32, 64, 32, 8, 2, split=True),
    },
    4: {},
}
#: The tiles above need 101 KB and 128 KB of shared memory. These have been built, and never run.
_BACKWARD_IN_99_KB: _Table = {
    2: {256: _backward(64, 32, 64, 32, 8, 1, split=True), 512: _backward(32, 16, 32, 16, 8, 1, split=True)},
    4: {},
}

#: The tables of each family. The tiles of a table replace those of the tables before it.
FORWARD: dict[Family, tuple[_Table, ...]] = {
    "ampere": (_FORWARD, _FORWARD_ELSEWHERE),
    "consumer": (_FORWARD, _FORWARD_ELSEWHERE),
    "hopper": (_FORWARD,),
    "blackwell": (_FORWARD, _FORWARD_ELSEWHERE),
}
BACKWARD: dict[Family, tuple[_Table, ...]] = {
    "ampere": (_BACKWARD, _BACKWARD_ELSEWHERE),
    "consumer": (_BACKWARD, _BACKWARD_ELSEWHERE, _BACKWARD_IN_99_KB),
    "hopper": (_BACKWARD,),
    "blackwell": (_BACKWARD, _BACKWARD_ELSEWHERE),
}


def _choices(tables: dict[Family, tuple[_Table, ...]], query: Any, value: Any) -> list[dict[str, Any]]:
    size, width = query.get_dtype().itemsize, _width(query, value)
    by_width: dict[int, dict[str, Any]] = {}
    for table in tables[Target.of(query.get_device()).family]:
        by_width.update(table[size])
    fitting = [tile for widest, tile in by_width.items() if width <= widest]
    return fitting if inductor_config.max_autotune else fitting[:1]


def forward_configs(query: Any, value: Any) -> list[dict[str, Any]]:
    """The tiles that the forward template is tried with.

    This is one tile; under max-autotune the tiles of wider heads are tried too.
    """
    return _choices(FORWARD, query, value)


def backward_configs(query: Any, value: Any) -> list[dict[str, Any]]:
    """The tiles for the backward template, chosen as in ``forward_configs``."""
    return _choices(BACKWARD, query, value)


def chunk_sums_config(left: Any, right: Any) -> dict[str, Any]:
    """The tile for the template of the sums over chunks. It has never been timed."""
    itemsize = left.get_dtype().itemsize
    block_d, block_v = (min(n, max(16, _width(x, x))) for n, x in ((128 if itemsize == 2 else 32, left), (64, right)))
    warps = 8 if block_d * block_v >= 128 * 64 else 4
    return {
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "BLOCK_S": 64 if itemsize == 2 else 16,
        "num_warps": warps,
        "num_stages": 2,
    }
