"""The tiles of the mLSTM templates, by head width and dtype. Measurements are in benchmarks/NOTES.md."""

from __future__ import annotations

from typing import Any

from ..core.kernels import next_power_of_two
from ..core.target import Target
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


#: The tiles by the size of an element in bytes, and then by the widest head (a power of two) for which a tile is used. A
#: tile has 64 rows with 4 warps and 128 rows with 8 warps: Hopper's matmuls give 64 rows to each group of four warps.
FORWARD = {
    2: {
        64: _forward(128, 64, 8, 3),
        128: _forward(64, 64, 4, 3),
        256: _forward(128, 64, 8, 2),
        512: _forward(32, 32, 8, 1),
    },
    4: {64: _forward(32, 32, 4, 1), 128: _forward(32, 16, 4, 1), 256: _forward(32, 16, 8, 1)},
}
BACKWARD = {
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
#: The tiles that replace those above on architectures other than Hopper, where those above would spill registers. These
#: tiles have never been timed.
FORWARD_ELSEWHERE = {2: {128: _forward(64, 32, 4, 3), 256: _forward(64, 32, 8, 2)}, 4: {}}
BACKWARD_ELSEWHERE = {
    2: {
        64: _backward(64, 32, 64, 32, 4, 2),
        128: _backward(64, 32, 64, 32, 8, 2),
        256: _backward(64, 32, 64, 32, 8, 2, split=True),
    },
    4: {},
}

_Table = dict[int, dict[int, dict[str, Any]]]


def _choices(table: _Table, elsewhere: _Table, query: Any, value: Any) -> list[dict[str, Any]]:
    size, width = query.get_dtype().itemsize, _width(query, value)
    by_width = dict(table[size])
    if Target.of(query.get_device()).family != "hopper":
        by_width.update(elsewhere[size])
    fitting = [tile for widest, tile in by_width.items() if width <= widest]
    return fitting if inductor_config.max_autotune else fitting[:1]


def forward_configs(query: Any, value: Any) -> list[dict[str, Any]]:
    """The tiles that the forward template is tried with.

    This is one tile; under max-autotune the tiles of wider heads are tried too.
    """
    return _choices(FORWARD, FORWARD_ELSEWHERE, query, value)


def backward_configs(query: Any, value: Any) -> list[dict[str, Any]]:
    """The tiles for the backward template, chosen as in ``forward_configs``."""
    return _choices(BACKWARD, BACKWARD_ELSEWHERE, query, value)
