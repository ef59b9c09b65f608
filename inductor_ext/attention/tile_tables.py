"""Captured tables that a kernel reads a tile at a time instead of an element at a time.

The tile reaches the score_mod's subgraphs as one more input (``table_0``, ``table_1``...) in place of their reads. Kinds:

    diagonal   M + N - 1 elements of a hoisted diagonal (attention/diagonals.py), loaded as a vector and spread over the tile
    pair       ``t[b?, h?, q, k]``, a block of the captured tensor itself, by TMA where the GPU has it and strides allow it
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from ..core.target import Target
from ..torch_api.ir import input_buffer, is_aligned
from ..torch_api.lowering import V
from .diagonals import ANTIDIAGONAL_OPTION, DIAGONAL_OPTION

aten = torch.ops.aten

_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
#: TMA wants addresses and strides that are multiples of this many bytes.
TMA_ALIGNMENT = 16


class TableKind(enum.Enum):
    """What a table holds of a (query, key) plane."""

    DIAGONAL = "k - q"
    ANTIDIAGONAL = "k + q"
    PAIR = "q, k"


@dataclass(frozen=True)
class TileTable:
    """One table: which captured tensor it is, what it holds, and whether by batch and by head."""

    owner: int
    kind: TableKind
    by_batch: bool
    by_head: bool


@dataclass(frozen=True)
class TileTables:
    """The tables that one score_mod reads by tile, in the order of ``table_0``, ``table_1``..., and the captured tensors."""

    tables: tuple[TileTable, ...]
    captured: Sequence[Any]

    def options(self) -> dict[str, Any]:
        """The templates' options: bit i of each mask speaks of table i."""
        return {
            "NUM_TABLES": len(self.tables),
            "TABLES_BY_BATCH": sum(t.by_batch << i for i, t in enumerate(self.tables)),
            "TABLES_BY_HEAD": sum(t.by_head << i for i, t in enumerate(self.tables)),
            "ANTIDIAGONALS": sum((t.kind is TableKind.ANTIDIAGONAL) << i for i, t in enumerate(self.tables)),
            "PAIRS": sum((t.kind is TableKind.PAIR) << i for i, t in enumerate(self.tables)),
        }

    def of(self, owner: int) -> TileTable | None:
        """The table that a captured tensor is, if it is one."""
        return next((t for t in self.tables if t.owner == owner), None)

    def buffers(self) -> list[Any]:
        """The tables themselves, which the template takes as inputs."""
        return [self.captured[t.owner] for t in self.tables]

    def read_by_tile(self, module: GraphModule, inputs: int) -> list[Any]:
        """Replace, in place, the reads of the tables by inputs of their own; return the placeholders to lower these with.

        ``inputs`` come before the captured tensors in ``module``.
        """
        graph = module.graph
        captured = graph.find_nodes(op="placeholder")[inputs:]
        last = graph.find_nodes(op="placeholder")[-1]
        made = []
        for i, table in enumerate(self.tables):
            buffer = self.captured[table.owner]
            with graph.inserting_after(last):
                tile = last = graph.placeholder(f"table_{i}")
            made.append(input_buffer(f"table_{i}", buffer.get_dtype(), buffer.get_device()))
            for read in _reads(captured[table.owner]):
                tile.meta = dict(read.meta)
                read.replace_all_uses_with(tile)
                graph.erase_node(read)
        graph.eliminate_dead_code()
        module.recompile()
        return made


def tile_tables(score_mod: GraphModule, kernel_options: dict[str, Any], captured: Sequence[Any]) -> TileTables:
    """The captured tensors that a score_mod reads by tile: pairs, and those that ``kernel_options`` say hold diagonals."""
    antidiagonals = kernel_options.get(ANTIDIAGONAL_OPTION, 0)
    bits = kernel_options.get(DIAGONAL_OPTION, 0) | antidiagonals
    _, batch, head, query, key, *placeholders = score_mod.graph.find_nodes(op="placeholder")
    found = []
    for owner, placeholder in enumerate(placeholders):
        reads = [[_root(index) for index in read.args[1]] for read in _reads(placeholder)]
        # A table of integers is what an index is made of: its tile is no term of the scores.
        if not reads or not captured[owner].get_dtype().is_floating_point:
            continue
        planes = [batch in reads[0], head in reads[0]]
        if (bits >> owner) & 1:
            kind = TableKind.ANTIDIAGONAL if (antidiagonals >> owner) & 1 else TableKind.DIAGONAL
            found.append(TileTable(owner, kind, *planes))
            continue
        pair = [p for p, used in zip((batch, head), planes, strict=True) if used] + [query, key]
        if all(read == pair for read in reads) and tma_takes(captured[owner]):
            found.append(TileTable(owner, TableKind.PAIR, *planes))
    return TileTables(tuple(found), captured)


def tma_takes(tensor: Any) -> bool:
    """Whether blocks of a tensor (2 to 4 dims) can be moved by TMA: rows of consecutive elements, aligned."""
    if not Target.of(tensor.get_device()).tma:
        return False
    *outer, inner = tensor.get_stride()
    known, itemsize = V.graph.sizevars.statically_known_true, tensor.get_dtype().itemsize
    rows_aligned = all(known(sympy.Eq(stride * itemsize % TMA_ALIGNMENT, 0)) for stride in outer)
    return known(sympy.Eq(inner, 1)) and rows_aligned and is_aligned(tensor, TMA_ALIGNMENT)


def _reads(table: Node) -> list[Node]:
    return [user for user in list(table.users) if user.target is aten.index.Tensor and user.args[0] is table]


def _root(index: Any) -> Any:
    """The node that an index is a cast of."""
    while isinstance(index, Node) and index.target in _CASTS:
        index = index.args[0]
    return index
