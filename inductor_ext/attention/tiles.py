"""Default tiles of the flex_attention templates: stock's, changed where our kernels would spill registers.

Stock's tables were tuned for its own kernels. Under max-autotune all of its configs compete and nothing is changed here.
What led to each rule is in benchmarks/NOTES.md; tests/test_offline_build.py holds them to "no spills".
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..core.target import Family
from .captured import CapturedGradients

#: Keys a forward tile holds at most where anything is inlined into it.
WIDEST_WITH_MODS = 64


def forward_config(config: Any, family: Family, *, score_mod: bool, mask_mod: bool, chained_reads: bool) -> Any:
    """Stock's forward config for a family of GPUs and what is inlined into the kernel.

    A score_mod's temporaries do not fit beside 128 x 128 scores in four warps: on an H200 ``s + t[h, k]`` then takes
    24.4 ms, and 0.40 ms with 64 keys. Ampere spills even so in four warps, Blackwell even with nothing inlined, and every
    architecture where an index is itself read (``t[doc[q] - doc[k]]``).
    """
    if score_mod or mask_mod or family == "blackwell":
        config = dataclasses.replace(config, block_n=min(config.block_n, WIDEST_WITH_MODS))
    if chained_reads or ((score_mod or mask_mod) and family == "ampere"):
        config = dataclasses.replace(config, num_warps=max(config.num_warps, 8))
    return config


def backward_config(
    config: Any, family: Family, captured: CapturedGradients, *, one_pass: bool, mask_mod: bool, head_dim: int
) -> Any:
    """Stock's backward config for what the kernel does with the gradients of captured tensors.

    one_pass: dQ is added in memory, where on an H200 small tiles in four warps are fastest at head dim 64 (1.01 ms; 1.11
    with stock's). Wide ones where blocks of pairs are moved by TMA (1.84 ms; 2.44) or tiles are added to a strip (1.42 ms;
    1.44, and 1.70 in the tile that spills nothing); small ones where there is an add for each score at a computed place,
    whose arithmetic spills otherwise.
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
        # A captured tile is pipelined as well: three stages of it do not fit into an H200's shared memory.
        config = dataclasses.replace(config, num_stages=min(config.num_stages, 2))
    return config
