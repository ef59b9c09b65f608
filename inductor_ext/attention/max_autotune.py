"""The tiles of an attention kernel that are timed under max-autotune: ours, and those of stock for which there is room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ..torch_api.config import inductor_config

Direction = Literal["forward", "backward"]

#: The registers of a thread that tiles may take, and the preferred number of stages, which most tiles of tiles.py have.
REGISTERS, STAGES = 224, 3


def timed(
    choices: Sequence[dict[str, Any]], direction: Direction, itemsize: int, shared_memory: int
) -> list[dict[str, Any]]:
    """Return the template's options that are timed, of those for several configs, with ours first.

    A backward kernel takes about 4 s to build. So of each tile and number of warps only one number of stages is timed, and
    only if the tiles fit. What ours needs counts as fitting. With the search space EXHAUSTIVE, all that differ are timed.

    itemsize: of an element of the operands, in bytes. shared_memory: what a program may use, in bytes.
    """
    ours, *others = {_identity(choice): choice for choice in choices}.values()
    if inductor_config.max_autotune_flex_search_space == "EXHAUSTIVE":
        return [ours, *others]
    registers = max(REGISTERS, _registers(ours, direction))
    memory = max(shared_memory, _bytes(ours, direction, itemsize))
    chosen: dict[Any, dict[str, Any]] = {}
    for choice in sorted(others, key=lambda choice: abs(choice["num_stages"] - STAGES)):
        if _registers(choice, direction) <= registers and _bytes(choice, direction, itemsize) <= memory:
            chosen.setdefault(_identity(choice)[:-1], choice)
    return [ours, *chosen.values()]


def _identity(choice: dict[str, Any]) -> tuple[Any, ...]:
    """The sizes of the tiles, the warps and the stages."""
    tiles = sorted((name, size) for name, size in choice.items() if name.startswith("BLOCK_"))
    return *tiles, choice["num_warps"], choice["num_stages"]


def _registers(choice: dict[str, Any], direction: Direction) -> float:
    """The registers of a thread for the tiles that a loop keeps: sums over it, and tiles of scores."""
    value_dim, threads = choice["V_HEAD_DIM_ROUNDED"], 32 * choice["num_warps"]
    if direction == "forward":
        return choice["BLOCK_M"] * (value_dim + choice["BLOCK_N"]) / threads
    both_dims = choice["QK_HEAD_DIM_ROUNDED"] + value_dim
    return choice["BLOCK_N1"] * (both_dims + 2 * choice["BLOCK_M1"]) / threads


def _bytes(choice: dict[str, Any], direction: Direction, itemsize: int) -> int:
    """The bytes of the tiles of operands that a program has in shared memory: those it keeps, and those of each stage."""
    key_dim, both_dims = choice["QK_HEAD_DIM_ROUNDED"], choice["QK_HEAD_DIM_ROUNDED"] + choice["V_HEAD_DIM_ROUNDED"]
    if direction == "forward":
        elements = choice["BLOCK_M"] * key_dim + choice["num_stages"] * choice["BLOCK_N"] * both_dims
    else:
        elements = (choice["BLOCK_N1"] + choice["num_stages"] * choice["BLOCK_M1"]) * both_dims
    return elements * itemsize
