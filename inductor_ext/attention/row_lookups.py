"""Lookups in the rows of a learned tensor: ``x[b, h, q, f(q, k)]`` or ``x[b, h, k, f(q, k)]``, as in DeBERTa.

In a kernel such a lookup is a load for every score, and its gradient an atomic addition. Outside, it is a ``torch.gather``
by an index that is the same for all batch elements and heads, whose gradient needs no atomics (gathers/entry_sums.py). The
table that results has a number for each score, so this pays as long as that fits into memory easily. Where f is a sum of
positions, as in a relative shift, each element has one reader, and nothing is added (shifts.py).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from ..core.fx import fake_tensor, indices_of
from ..core.kernels import FEWEST_SLICES, SUPPORTED_DTYPES
from ..core.target import Target
from .footprints import Footprint, polynomials
from .kinds import COLUMN, NONE, ROW
from .score_mod import ScoreMod

#: The largest number of elements of such a table: a quarter of a gigabyte, which may be kept for the backward, and the same
#: for its gradient. With twice as many, DeBERTa's lookups at clamped distances are no faster outside
#: (docs/notes/attention.md).
LARGEST_TABLE = 2**26


def row_lookups(graph: Graph, footprints: dict[Node, Footprint], extents: Sequence[Any]) -> dict[Node, bool]:
    """Return the lookups in rows that are gathers in a score_mod's graph, and whether the key chooses the row.

    extents: the numbers of values of b, h, q and k.
    """
    if not all(isinstance(n, int) for n in extents) or extents[0] * extents[1] < FEWEST_SLICES:
        return {}
    lookups = lookups_in_rows(graph, footprints, extents)
    sums = polynomials(graph, extents) if lookups else {}
    return {node: by_key for node, by_key in lookups.items() if indices_of(node)[-1] not in sums}


def lookups_in_rows(graph: Graph, footprints: dict[Node, Footprint], extents: Sequence[int]) -> dict[Node, bool]:
    """Return the lookups in rows at any index of positions, and whether the key chooses the row."""
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target is operator.getitem]
    found = {node: _by_key(node, graph, footprints, extents) for node in nodes}
    return {node: by_key for node, by_key in found.items() if by_key is not None}


def _by_key(node: Node, graph: Graph, footprints: dict[Node, Footprint], extents: Sequence[Any]) -> bool | None:
    """Return whether the key, and not the query, chooses the row of a lookup in rows; None for any other read."""
    positions = ScoreMod.of(graph).positions
    table, indices = fake_tensor(node.args[0]), indices_of(node)
    if node.args[0].op != "placeholder" or table is None or not len(indices) == table.dim() == 4:
        return None
    if not (table.requires_grad and table.dtype in SUPPORTED_DTYPES and Target.of(table.device).triton):
        return None
    batch, head, row, place = indices
    if (batch, head) != positions[:2] or row not in positions[2:] or not _depends_on_both(place, footprints):
        return None
    by_key = row is positions[3]
    rows = extents[3] if by_key else extents[2]
    return by_key if tuple(table.shape[:3]) == (extents[0], extents[1], rows) else None


def _depends_on_both(index: Any, footprints: dict[Node, Footprint]) -> bool:
    """Return whether an index depends on the query and the key, and on nothing else."""
    if not isinstance(index, Node) or index not in footprints or fake_tensor(index).is_floating_point():
        return False
    footprint = footprints[index]
    others = footprint.batch or footprint.head or footprint.score or footprint.unknown
    return not others and footprint.kind not in (NONE, ROW, COLUMN)
