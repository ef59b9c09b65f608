"""Default tiles of the flex_attention templates. They are stock's, with changes where our kernels would spill registers.

Stock's tables were tuned for its own kernels. Under max-autotune all of its configs compete, and nothing is changed here.
The measurements behind each rule are in benchmarks/NOTES.md, and tests/test_offline_build.py checks that nothing spills.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..core.target import Family
from .captured import CapturedGradients

#: The largest number of keys in a forward tile if a score_mod or a mask_mod is inlined.
WIDEST_WITH_MODS = 64


def forward_config(config: Any, family: Family, *, score_mod: bool, mask_mod: bool, chained_reads: bool) -> Any:
    """Adapt stock's forward config to a family of GPUs and to the functions that are inlined into the kernel.

    In four warps, the temporaries of a score_mod do not fit beside 128 x 128 scores: on an H200 ``s + t[h, k]`` then takes
    24.4 ms, and 0.40 ms with 64 keys. In four warps Ampere spills even with 64 keys, Blackwell spills even if nothing is
    inlined, and every architecture spills if an index is itself read (``t[doc[q] - doc[k]]``).
    """
    if score_mod or mask_mod or family == "blackwell":
        config = dataclasses.replace(config, block_n=min(config.block_n, WIDEST_WITH_MODS))
    if chained_reads or ((score_mod or mask_mod) and family == "ampere"):
        config = dataclasses.replace(config, num_warps=max(config.num_warps, 8))
    return config


def backward_config(
    config: Any, family: Family, captured: CapturedGradients, *, one_pass: bool, mask_mod: bool, head_dim: int
) -> Any:
    """Adapt stock's backward config to the way in which the kernel reduces the gradients of captured tensors.

    one_pass: dQ is added in memory. On an H200 at head dim 64, small tiles in four warps are then the fastest (1.01 ms, and
    1.11 ms with stock's tiles). Wide tiles are used if TMA moves blocks of pairs (1.84 ms instead of 2.44 ms) or if tiles
    are added to a strip (1.42 ms instead of 1.44 ms, and 1.70 ms with the tile that does not spill). Small tiles are used if
    there is one add for each score at a computed index, because that arithmetic would spill otherwise.
    """
    if one_pass and head_dim > 64:
        config = dataclasses.replace(config, block_m1=64, block_n1=128, num_warps=8, num_stages=3)
    elif one_pass:
        strips_on_hopper = captured.has_strips and family == "hopper"
        queries = 32 if captured.gathers or strips_on_hopper else 64
        keys = 128 if captured.moves_blocks or strips_on_hopper else 64
        warps = 8 if captured.moves_blocks else 4
        config = dataclasses.replace(config, block_m1=queries, block_n1=keys, num_warps=warps, num_stages=3)
    elif family == "blackwell":
        config = dataclasses.replace(config, num_warps=max(config.num_warps, 8))
    elif family == "ampere" and (captured.plans or mask_mod):
        tiles = {"block_m1": 32, "block_n1": 64, "block_m2": 64, "block_n2": 32}
        smaller = {name: min(getattr(config, name), size) for name, size in tiles.items()}
        config = dataclasses.replace(config, **smaller, num_stages=min(config.num_stages, 2))
    if captured.wide_tiles and head_dim >= 128:
        # A captured tile is pipelined too, and three stages of it do not fit into the shared memory of an H200.
        config = dataclasses.replace(config, num_stages=min(config.num_stages, 2))
    return config
