"""Captured tables of which a kernel reads whole tiles instead of single elements.

The tile is a further input of the score_mod's subgraphs (``table_0``, ``table_1``...) and replaces their reads. The kinds:

    diagonal   M + N - 1 elements of a hoisted diagonal, loaded as a vector and spread over the tile
    image      the same of a hoisted table of distances in an image, for tiles that lie in one row of it
    pair       ``t[b?, h?, q, k]``, a block of the captured tensor itself, by TMA if the GPU and the strides allow it. Or
               ``t[b?, h?, q, q - k + c]``, whose blocks have the keys in descending order (attention/blocks.py)

The code for each kind is in attention/kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..core.fx import dtype_of
from ..core.integers import holds_integers
from ..core.kernels import longest_tile, tiles_asked_for
from ..core.target import TMA_ALIGNMENT, Target
from ..core.templates import Listed
from ..torch_api.ir import is_aligned
from . import descriptor
from .blocks import Block, block
from .kinds import PAIR, TiledKind
from .kinds.base import ANY_LENGTH
from .score_mod import ScoreMod

aten = torch.ops.aten

_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)


@dataclass(frozen=True)
class TileTable:
    """One table of a kernel.

    number: its number in the kernel. owner: the number of the captured tensor that it is. by_batch, by_head: whether it has
    an axis for these. block: the matrices in which its pairs are in memory, or None if they are its last two dims.
    """

    number: int
    owner: int
    kind: TiledKind
    by_batch: bool
    by_head: bool
    block: Block | None = None

    @property
    def name(self) -> str:
        """The name of its tile in a kernel, which is an input of the score_mod's subgraphs."""
        return f"table_{self.number}"

    @property
    def pointer(self) -> str:
        """The name of the kernel's argument."""
        return self.name.upper()


@dataclass(frozen=True)
class TileTables:
    """The tables that one score_mod reads by tile (``table_0``, ``table_1``..., in order), and the captured tensors."""

    tables: tuple[TileTable, ...]
    captured: Sequence[Any]

    def options(self) -> dict[str, Any]:
        """Return the template option with the tables, over which the templates iterate."""
        descending = any(table.block is not None for table in self.tables)
        return {"TABLES": Listed(self.tables), "KEYS_DESCEND": descending}

    def of(self, owner: int) -> TileTable | None:
        """Return the table that a captured tensor is, or None if it is none."""
        return next((t for t in self.tables if t.owner == owner), None)

    @property
    def longest_tile(self) -> int:
        """The largest number of queries, and of keys, in a tile."""
        return min((table.kind.longest_tile for table in self.tables), default=ANY_LENGTH)

    @property
    def has_pairs(self) -> bool:
        """Whether a table has a number for each pair of a query and a key."""
        return any(table.kind is PAIR for table in self.tables)

    def buffers(self) -> list[Any]:
        """Return the buffers of the tables, which are inputs of the template."""
        return [self.captured[t.owner] for t in self.tables]


def tile_tables(
    score_mod: GraphModule, kernel_options: dict[str, Any], captured: Sequence[Any], lengths: Sequence[Any]
) -> TileTables:
    """Return the tables that a score_mod reads by tile: those made by hoisting, and the user's tensors that are pairs.

    ``lengths``: the lengths of b, h, q and k.
    """
    described = descriptor.read(kernel_options)
    inputs = ScoreMod.of(score_mod.graph)
    found = []
    for owner, placeholder in enumerate(inputs.captured):
        ranges = inputs.ranges(lengths)
        reads = [[_root(index, ranges) for index in read.args[1]] for read in reads_of(placeholder)]
        # An index is computed from a table of integers, so a tile of that is not a term of the scores.
        if not reads or not captured[owner].get_dtype().is_floating_point:
            continue
        axes = [inputs.b in reads[0], inputs.h in reads[0]]
        pair = [p for p, used in zip((inputs.b, inputs.h), axes, strict=True) if used] + [inputs.q, inputs.k]
        kind = described.get(owner) or (PAIR if all(read == pair for read in reads) else None)
        fits = kind is not None and all(n <= kind.longest_tile for n in tiles_asked_for(kernel_options))
        if fits and kind.readable(captured[owner]):
            found.append(TileTable(len(found), owner, kind, *axes))
    # The keys of a tile are in ascending order for the other tables.
    # A tile of descending keys begins at a multiple of its length only if the last key is the last of a tile. At other
    # columns TMA raises an illegal instruction on an H200: loads that are not at a multiple of 16 bytes, and more stores.
    aligned = isinstance(lengths[3], int) and lengths[3] % longest_tile(kernel_options) == 0
    return TileTables(tuple(found or (_with_descending_keys(inputs, captured, lengths) if aligned else ())), captured)


def _with_descending_keys(inputs: ScoreMod, captured: Sequence[Any], lengths: Sequence[Any]) -> list[TileTable]:
    found = []
    for owner, placeholder in enumerate(inputs.captured):
        tensor = captured[owner]
        blocks = {
            block(read.args[1], tensor.get_size(), tensor.get_stride(), inputs, lengths) for read in reads_of(placeholder)
        }
        if len(blocks) != 1 or None in blocks or not tensor.get_dtype().is_floating_point:
            continue
        (only,) = blocks
        by_tma = Target.of(tensor.get_device()).tma and is_aligned(tensor, TMA_ALIGNMENT)
        if by_tma and only.aligned(tensor.get_dtype().itemsize):
            found.append(TileTable(len(found), owner, PAIR, only.strides[0] > 0, only.strides[1] > 0, only))
    return found


def reads_of(table: Node) -> list[Node]:
    """Return the reads of a captured tensor in its graph."""
    return [user for user in list(table.users) if user.target is aten.index.Tensor and user.args[0] is table]


def _root(index: Any, ranges: dict[Node, Any]) -> Any:
    """Return the position of which an index is a cast that keeps its values, otherwise the index itself."""
    root, dtypes = index, []
    while isinstance(root, Node) and root.target in _CASTS:
        dtypes.append(dtype_of(root))
        root = root.args[0]
    # Positions are 32-bit integers. A narrower dtype may have fewer values.
    narrow = [d for d in dtypes if d not in (torch.int32, torch.int64)]
    return root if root in ranges and all(holds_integers(d, 0, ranges[root] - 1) for d in narrow) else index
