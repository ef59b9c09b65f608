"""Default tiles of the flex_attention templates. They are stock's, with changes where our kernels would spill registers.

Stock's tables were tuned for its own kernels. Under max-autotune its configs compete with these tiles (max_autotune.py).
The measurements are in docs/notes/attention.md, on an H200 with bf16, and tests/test_offline_build.py checks that nothing
spills.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from ..core.target import FAMILIES, Family
from .captured import CapturedGradients

#: The forms of the kernels. In one pass, the backward adds dQ in memory; in two passes, it sums dQ in registers.
Form = Literal["forward", "one pass", "two passes"]


@dataclasses.dataclass(frozen=True)
class Row:
    """A change of stock's config for the kernels of these forms, families and head dims.

    having: the feature that a kernel must have, or None if the row is for all. combine: makes the new value of stock's value
    and ours. values: ours, by the attribute of the config.
    """

    forms: Collection[Form]
    families: Collection[Family]
    head_dims: range
    having: str | None
    combine: Callable[[int, int], int]
    values: Mapping[str, int]


def _exactly(stock: int, ours: int) -> int:
    return ours


_at_most, _at_least = min, max
_FORWARD, _ONE_PASS, _TWO_PASSES, _BACKWARD = ("forward",), ("one pass",), ("two passes",), ("one pass", "two passes")
_AMPERE, _CONSUMER, _HOPPER, _BLACKWELL = ("ampere", "consumer"), ("consumer",), ("hopper",), ("blackwell",)
_LONGEST = 2**31
_EVERY_DIM, _TO_64, _ABOVE_64, _FROM_128 = range(_LONGEST), range(65), range(65, _LONGEST), range(128, _LONGEST)
_TO_32, _33_TO_64 = range(33), range(33, 65)
_ABOVE_128 = range(129, _LONGEST)
_AMPERE_TILES = {"block_m1": 32, "block_n1": 64, "block_m2": 64, "block_n2": 32, "num_stages": 2}
_TILES_OF_64 = {**dict.fromkeys(("block_m1", "block_n1", "block_m2", "block_n2"), 64), "num_warps": 4}
_LONG_TILE = {"block_m": 64, "block_n": 128, "num_warps": 4, "num_stages": 2}
_TILES_OF_32 = dict.fromkeys(("block_m1", "block_n1", "block_m2", "block_n2"), 32)

#: All rows that are for a kernel change its config, in this order. The functions below explain the features.
TABLE = (
    # In four warps the temporaries do not fit beside 128 x 128 scores: s + t[h, k] takes 24.4 ms, and with 64 keys 0.40 ms.
    Row(_FORWARD, FAMILIES, _EVERY_DIM, "a mod", _at_most, {"block_n": 64}),
    # 128 keys spill even if nothing is inlined.
    Row(_FORWARD, _BLACKWELL, _EVERY_DIM, None, _at_most, {"block_n": 64}),
    # Four warps spill even with 64 keys.
    Row(_FORWARD, _AMPERE, _EVERY_DIM, "a mod", _at_least, {"num_warps": 8}),
    # Four warps spill on every architecture.
    Row(_FORWARD, FAMILIES, _EVERY_DIM, "chained reads", _at_least, {"num_warps": 8}),
    # AlphaFold's pairs take 0.156 ms, and 0.171 with 64 x 64.
    Row(_FORWARD, _HOPPER, _TO_32, "blocks", _exactly, {"block_m": 128}),
    # The values that a score_mod reads for each score wait in registers: DeBERTa's biases take 0.51 ms, and 0.55 with 128.
    Row(_FORWARD, _HOPPER, _TO_64, "reads", _at_most, {"block_m": 64}),
    # Graphormer's lookup takes 0.69 ms, and 0.89 ms with 128 x 64 in eight warps. At head dim 32 it takes 0.25 ms, and 0.27
    # with 64 x 32 in three stages.
    Row(_FORWARD, _HOPPER, _TO_64, "chained reads", _exactly, {"block_m": 64, "block_n": 32, "num_warps": 4}),
    Row(_FORWARD, _HOPPER, _TO_32, "chained reads", _exactly, {"block_n": 64, "num_stages": 2}),
    # Pairs of segments take 0.28 ms, and 0.37 with 64 x 32 in three stages.
    Row(_FORWARD, _HOPPER, _33_TO_64, "rows and columns", _exactly, {"block_n": 128, "num_stages": 2}),
    # Tiles of 64 rows need four warps: at head dim 128 the distances of 64 x 64 places take 0.74 ms, in three stages 0.84,
    # and 2.03 in eight warps. At head dim 64 they take 0.41 ms, and 0.45 in three stages.
    Row(_FORWARD, _HOPPER, _EVERY_DIM, "images", _exactly, {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}),
    # BEiT's pairs of 197 tokens take 0.13 ms, 0.15 ms with 64 x 64, and 0.22 ms in three stages.
    Row(_FORWARD, _HOPPER, _TO_64, "few tiles", _at_most, {"block_m": 64, "num_stages": 2}),
    Row(_FORWARD, _HOPPER, _33_TO_64, "few blocks", _at_most, {"block_n": 32}),
    # There is nothing to prefetch, and less shared memory leaves room for more programs: Swin takes 0.18 instead of 0.28 ms.
    Row(_FORWARD, FAMILIES, _EVERY_DIM, "one tile", _exactly, {"num_stages": 1}),
    # 4096 x 4 windows of Swin take 0.14 ms, and 0.18 in eight warps.
    Row(_FORWARD, _HOPPER, _TO_32, "one tile", _exactly, {"num_warps": 4}),
    # They take 0.08 ms, and 0.10 in one stage. With a mask that is read for each score one stage takes 0.15, and three 0.25.
    Row(_FORWARD, _HOPPER, _TO_32, "slices", _exactly, {"num_stages": 3}),
    # Three programs fit on a multiprocessor: a causal mask takes 0.210 ms, and 0.235 with 128 x 64 in three stages; T5's
    # buckets take 0.39 ms, and 0.42.
    Row(_FORWARD, _HOPPER, _33_TO_64, "only a mask", _exactly, _LONG_TILE),
    Row(_FORWARD, _HOPPER, _33_TO_64, "only a diagonal", _exactly, _LONG_TILE),
    # ALiBi takes 0.405 ms, and 0.432 with 128 queries; it takes 0.414 with 128 keys.
    Row(
        _FORWARD,
        _HOPPER,
        _33_TO_64,
        "only a function",
        _exactly,
        {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 3},
    ),
    # Small tiles in four warps are the fastest at head dim 64: 1.01 ms, and 1.11 ms with stock's.
    Row(_ONE_PASS, FAMILIES, _TO_64, None, _exactly, {"block_m1": 64, "block_n1": 64, "num_warps": 4, "num_stages": 3}),
    # The arithmetic of the indices spills 152 bytes beside 64 x 64 scores. BEiT's pairs, whose rows are not aligned, take
    # 0.73 ms, and 1.15 with 64 x 64.
    Row(_ONE_PASS, FAMILIES, _TO_64, "gathers", _exactly, {"block_m1": 32}),
    # Graphormer's lookups take 2.6 ms, and 3.5 ms in three stages.
    Row(_ONE_PASS, _HOPPER, _TO_32, "gathers", _at_most, {"num_stages": 2}),
    # Graphormer's scores take 0.39 ms, and 0.41 in three stages.
    Row(_ONE_PASS, _HOPPER, _TO_32, "stored scores", _at_most, {"num_stages": 2}),
    # 1.42 ms although it spills; 1.44 ms with 64 x 64, and 1.70 ms with 32 x 64, which does not spill.
    Row(_ONE_PASS, _HOPPER, _TO_64, "strips", _exactly, {"block_m1": 32, "block_n1": 128}),
    # 32 x 64 takes 1.60 ms for the distances of 64 x 64 places; 128 keys are more than a row of that image.
    Row(_ONE_PASS, _HOPPER, _TO_64, "strips of images", _exactly, {"block_m1": 64, "block_n1": 64}),
    # T5's 2048 tokens take 0.72 ms, and 1.84 with 32 x 128, of which only one program fits beside the random numbers.
    Row(_ONE_PASS, _HOPPER, _TO_64, "strips and dropout", _exactly, {"block_m1": 64, "block_n1": 64}),
    # T5's buckets in packed documents take 0.56 ms, 0.67 with 32 x 64, and 0.83 in three stages.
    Row(_ONE_PASS, _HOPPER, _TO_64, "conditional adds", _exactly, {"block_m1": 64, "block_n1": 64, "num_stages": 2}),
    # Moving wide tiles takes 1.84 ms, and 2.44 ms with 64 x 64.
    Row(_ONE_PASS, FAMILIES, _TO_64, "blocks", _exactly, {"block_n1": 128, "num_warps": 8}),
    # BEiT's take 0.40 ms, 0.43 with wide tiles, and 0.64 in three stages.
    Row(_ONE_PASS, _HOPPER, _33_TO_64, "few blocks", _exactly, {"block_n1": 64, "num_warps": 4, "num_stages": 2}),
    # Conformer's relative shift takes 0.52 ms, and 0.58 with 64 x 128 in eight warps.
    Row(_ONE_PASS, _HOPPER, _TO_64, "descending keys", _exactly, {"block_m1": 32, "num_warps": 4}),
    # 4096 x 4 windows of Swin take 0.34 ms, and 0.41 in eight warps.
    Row(_ONE_PASS, _HOPPER, _TO_32, "one tile", _exactly, {"num_warps": 4}),
    # Stock's tile for Hopper, which has eight warps on Blackwell too.
    Row(_ONE_PASS, FAMILIES, _ABOVE_64, None, _exactly, {"block_m1": 64, "block_n1": 128, "num_warps": 8, "num_stages": 3}),
    # AlphaFold's pairs take 0.55 ms, and 0.59 with 64 x 64.
    Row(_TWO_PASSES, _HOPPER, _TO_32, "blocks", _at_most, {**_TILES_OF_64, "block_m1": 32, "block_n2": 32}),
    # DeBERTa's biases take 2.0 ms, and 2.6 with 64 x 64.
    Row(_TWO_PASSES, _HOPPER, _TO_64, "gathers", _at_most, {**_TILES_OF_64, "block_n2": 32}),
    # The table of distances in an image takes 2.1 ms, and 2.6 in one pass.
    Row(_TWO_PASSES, _HOPPER, _TO_64, "large tables", _exactly, {**_TILES_OF_64, "num_stages": 2}),
    # ViTDet's biases take 1.43 ms, and 1.57 with stock's tiles in eight warps.
    Row(_TWO_PASSES, _HOPPER, _TO_64, "repeats", _at_most, _TILES_OF_64),
    # Four warps spill 80 bytes with a causal mask, and 1688 with gathers.
    Row(_TWO_PASSES, _BLACKWELL, _EVERY_DIM, None, _at_least, {"num_warps": 8}),
    # 64 x 64 spills 32 bytes with a diagonal and 88 with gathers.
    Row(_TWO_PASSES, _AMPERE, _EVERY_DIM, "captured gradients", _at_most, _AMPERE_TILES),
    # A mask_mod has temporaries too. A causal one alone does not spill at 64 x 64, and neither tile was ever timed.
    Row(_TWO_PASSES, _AMPERE, _EVERY_DIM, "a mask_mod", _at_most, _AMPERE_TILES),
    # As in the forward: Swin takes 0.31 instead of 0.42 ms.
    Row(_BACKWARD, FAMILIES, _EVERY_DIM, "one tile", _exactly, {"num_stages": 1}),
    # They take 0.18 ms, and 0.26 in one stage.
    Row(_ONE_PASS, _HOPPER, _TO_32, "slices", _exactly, {"num_stages": 3}),
    # As in the forward: 2.65 ms.
    Row(_TWO_PASSES, _HOPPER, _ABOVE_64, "strips of images", _exactly, _TILES_OF_64),
    # A captured tile is pipelined too, and three stages of it do not fit into the shared memory of an H200.
    Row(_BACKWARD, FAMILIES, _FROM_128, "wide tiles", _at_most, {"num_stages": 2}),
    # The random numbers of a tile spill 8 bytes in four warps, and 72 in the backward on Ampere. Only the tiles of an H200
    # are timed (benchmarks/dropout.py).
    Row(_FORWARD, FAMILIES, _EVERY_DIM, "dropout", _at_least, {"num_warps": 8}),
    Row(_TWO_PASSES, _AMPERE, _EVERY_DIM, "dropout", _at_least, {"num_warps": 8}),
    Row(_TWO_PASSES, _CONSUMER, _EVERY_DIM, "dropout", _at_most, _TILES_OF_32),
    # The rows below fit kernels into 99 KB of shared memory. Their tiles have been built for sm_120, and never run.
    # Three stages of 128 x 64 take 96 to 99 KB, before the tiles of captured tensors.
    Row(_FORWARD, _CONSUMER, _FROM_128, None, _at_most, {"num_stages": 2}),
    # 128 x 32 takes 113 KB.
    Row(_FORWARD, _CONSUMER, _ABOVE_64, "fp32", _at_most, {"block_m": 64, "block_n": 32}),
    # 64 x 64 takes 104 KB.
    Row(_FORWARD, _CONSUMER, _ABOVE_128, None, _at_most, {"block_m": 32}),
    # 32 x 64 takes 168 KB.
    Row(_FORWARD, _CONSUMER, _ABOVE_128, "fp32", _at_most, {"block_n": 16}),
    # Three stages of 64 x 64 take 105 to 113 KB.
    Row(_TWO_PASSES, _CONSUMER, _FROM_128, None, _at_most, {"num_stages": 2}),
    # 64 x 32 spills 48 bytes in four warps and 16 bytes in eight, and 32 x 32 spills 8 bytes in four.
    # So does 32 x 64 on sm_80.
    Row(_TWO_PASSES, _CONSUMER, _TO_64, "gathers", _at_most, _TILES_OF_32),
    Row(_TWO_PASSES, _AMPERE, _TO_64, "gathers", _at_least, {"num_warps": 8}),
    # Sums for 16 entries spill 24 bytes in four warps.
    Row(_TWO_PASSES, _CONSUMER, _TO_64, "entries", _at_least, {"num_warps": 8}),
    # 64 x 64 takes 144 KB in one stage, and 32 x 64 takes 112 KB.
    Row(_TWO_PASSES, _CONSUMER, _ABOVE_128, None, _at_most, {**_TILES_OF_32, "num_stages": 1}),
    # Four warps spill 700 to 980 bytes, and eight warps none.
    Row(_TWO_PASSES, _CONSUMER, _ABOVE_128, None, _at_least, {"num_warps": 8}),
)


def forward_config(config: Any, family: Family, features: Collection[str], *, head_dim: int) -> Any:
    """Adapt stock's forward config to a family of GPUs and to the functions that are inlined into the kernel.

    features: "a mod": a score_mod or a mask_mod is inlined. "only a mask", "only a diagonal", "only a function": sequences
    are longer than four tiles, in half precision, without dropout and with values as wide as keys, and nothing is inlined
    but a mask_mod that reads nothing, or a score_mod that reads one diagonal, or one that reads nothing at a query or a key.
    """
    return _adapted(config, "forward", family, head_dim, features)


def backward_config(
    config: Any,
    family: Family,
    captured: CapturedGradients,
    *,
    one_pass: bool,
    mask_mod: bool,
    head_dim: int,
    one_tile: bool = False,
    few_tiles: bool = False,
    slices: bool = False,
    dropout: bool = False,
) -> Any:
    """Adapt stock's backward config to the way in which the kernel reduces the gradients of captured tensors.

    one_pass: dQ is added in memory. one_tile, few_tiles: no sequence is longer than a tile, or than four. slices: none is
    longer than a tile, a program has several batch elements, and nothing is read for each score by itself. dropout:
    probabilities are dropped.

    The feature "gathers": there is one add for each score, and no tile repeats. "repeats": a sum of whole tiles is held in
    registers. "strips": TMA adds tiles to a strip. "strips of images": those of images with short rows. "blocks": TMA moves
    blocks of a table of pairs. "few blocks": those of sequences of few tiles. "descending keys": those of a relative shift.
    "conditional adds": single elements are added on some tiles only. "large tables": there are gathers whose scores never
    share an entry. "entries": key programs sum by entry. "stored scores": the kernel stores one number for each score. "wide
    tiles": captured tiles are pipelined.
    """
    has = {
        "one tile": one_tile,
        "slices": slices,
        "dropout": dropout,
        "a mask_mod": mask_mod,
        "captured gradients": bool(captured.plans),
        "gathers": captured.gathers and not captured.repeats,
        "repeats": captured.repeats,
        "strips": captured.has_strips,
        "strips of images": captured.has_strips_of_short_rows,
        "strips and dropout": captured.has_strips and dropout,
        "blocks": captured.moves_blocks,
        "few blocks": captured.moves_blocks and few_tiles,
        "descending keys": captured.keys_descend,
        "conditional adds": captured.adds_conditionally,
        "large tables": captured.in_large_tables,
        "entries": captured.by_entry,
        "stored scores": captured.stores_scores,
        "wide tiles": captured.wide_tiles,
    }
    features = {name for name, there in has.items() if there}
    return _adapted(config, "one pass" if one_pass else "two passes", family, head_dim, features)


def _adapted(config: Any, form: Form, family: Family, head_dim: int, features: Collection[str]) -> Any:
    for row in TABLE:
        meant = form in row.forms and family in row.families and head_dim in row.head_dims
        if meant and (row.having is None or row.having in features):
            values = {name: row.combine(getattr(config, name), ours) for name, ours in row.values.items()}
            config = dataclasses.replace(config, **values)
    return config
