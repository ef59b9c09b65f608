"""Captured tables that a kernel reads a tile at a time instead of an element at a time.

The tile reaches the score_mod's subgraphs as one more input (``table_0``, ``table_1``...) in place of their reads. Kinds:

    diagonal   M + N - 1 elements of a hoisted diagonal, loaded as a vector and spread over the tile
    pair       ``t[b?, h?, q, k]``, a block of the captured tensor itself, by TMA where the GPU has it and strides allow it

What is particular to a kind is in attention/kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..core.templates import Listed
from ..torch_api.ir import input_buffer
from . import descriptor
from .kinds import PAIR, TiledKind
from .score_mod import ScoreMod

aten = torch.ops.aten

_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)


@dataclass(frozen=True)
class TileTable:
    """Table ``number`` of a kernel: which captured tensor it is (``owner``), its kind, and whether by batch and by head."""

    number: int
    owner: int
    kind: TiledKind
    by_batch: bool
    by_head: bool


@dataclass(frozen=True)
class TileTables:
    """The tables that one score_mod reads by tile, in the order of ``table_0``, ``table_1``..., and the captured tensors."""

    tables: tuple[TileTable, ...]
    captured: Sequence[Any]

    def options(self) -> dict[str, Any]:
        """What the templates go through."""
        return {"TABLES": Listed(self.tables)}

    def of(self, owner: int) -> TileTable | None:
        """The table that a captured tensor is, if it is one."""
        return next((t for t in self.tables if t.owner == owner), None)

    def buffers(self) -> list[Any]:
        """The tables themselves, which the template takes as inputs."""
        return [self.captured[t.owner] for t in self.tables]

    def read_by_tile(self, module: GraphModule, inputs: ScoreMod) -> list[Any]:
        """Replace, in place, the reads of the tables by inputs of their own; return the placeholders to lower these with."""
        graph = module.graph
        last = graph.find_nodes(op="placeholder")[-1]
        made = []
        for table in self.tables:
            buffer = self.captured[table.owner]
            with graph.inserting_after(last):
                tile = last = graph.placeholder(f"table_{table.number}")
            made.append(input_buffer(f"table_{table.number}", buffer.get_dtype(), buffer.get_device()))
            for read in _reads(inputs.captured[table.owner]):
                tile.meta = dict(read.meta)
                read.replace_all_uses_with(tile)
                graph.erase_node(read)
        graph.eliminate_dead_code()
        module.recompile()
        return made


def tile_tables(score_mod: GraphModule, kernel_options: dict[str, Any], captured: Sequence[Any]) -> TileTables:
    """The captured tensors that a score_mod reads by tile: what hoisting made for it, and pairs of the user's own."""
    described = descriptor.read(kernel_options)
    inputs = ScoreMod.of(score_mod.graph)
    found = []
    for owner, placeholder in enumerate(inputs.captured):
        reads = [[_root(index) for index in read.args[1]] for read in _reads(placeholder)]
        # A table of integers is what an index is made of: its tile is no term of the scores.
        if not reads or not captured[owner].get_dtype().is_floating_point:
            continue
        axes = [inputs.b in reads[0], inputs.h in reads[0]]
        pair = [p for p, used in zip((inputs.b, inputs.h), axes, strict=True) if used] + [inputs.q, inputs.k]
        kind = described.get(owner) or (PAIR if all(read == pair for read in reads) else None)
        if kind is not None and kind.readable(captured[owner]):
            found.append(TileTable(len(found), owner, kind, *axes))
    return TileTables(tuple(found), captured)


def _reads(table: Node) -> list[Node]:
    return [user for user in list(table.users) if user.target is aten.index.Tensor and user.args[0] is table]


def _root(index: Any) -> Any:
    """The node that an index is a cast of."""
    while isinstance(index, Node) and index.target in _CASTS:
        index = index.args[0]
    return index
