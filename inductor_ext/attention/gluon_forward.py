"""Which attentions ``flex_forward_hopper.py.jinja`` computes, the forward in Gluon, and with which tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..core.fx import HALF
from ..core.kernels import tiles_asked_for
from ..core.report import record, user_line
from ..core.target import TMA_ALIGNMENT, Target
from ..core.templates import load
from ..options import Options
from ..torch_api.ir import rows_are_aligned
from ..torch_api.lowering import V
from ..torch_api.sizes import hint
from ..torch_api.template import GluonTemplate, build_failure
from . import common, score_graphs
from .calls import ForwardCall
from .inlining import LoweredScore

#: The name that ``disable`` takes.
NAME = "gluon"
HEAD_DIM = 128
#: The fewest queries and keys. Without a mask 1024 take 5 % less time than in Triton, and 512 take 13 % more.
SHORTEST = 1024
FILE = "flex_forward_hopper.py.jinja"
TEMPLATE = GluonTemplate(
    "gradfuse_flex_forward_hopper", common.grid_of_queries, load("attention/flex_forward_hopper", "attention/flex_tiles")
)


class _Tile(NamedTuple):
    """The queries of a program, the keys of a tile, and what Triton is told: the warps of one warpgroup."""

    block_m: int = 128
    block_n: int = 128
    num_warps: int = 4
    num_stages: int = 1


#: Warpgroups that compute, queries of each, and places for tiles of keys: 164 KB of shared memory.
_GROUPS = {"CONSUMERS": 2, "ROWS": 64, "STAGES": 2}


def takes(call: ForwardCall, options: Options, chosen: dict[str, Any], score: LoweredScore) -> bool:
    """Return whether the kernel computes this attention, and is the faster one. chosen: the options of the template.

    The score_mod reads nothing by tile or for each pair of a query and a key, and there is no dropout. TMA must be able to
    read the rows of all operands.
    """
    own_tiles = tiles_asked_for(call.kernel_options) or any("num_" in name for name in call.kernel_options)
    if not options.enabled(NAME) or not Target.of(call.query.get_device()).gluon or own_tiles:
        return False
    head_dims = {chosen["QK_HEAD_DIM_ROUNDED"], chosen["V_HEAD_DIM_ROUNDED"]}
    if head_dims != {HEAD_DIM} or call.query.get_dtype() not in HALF or chosen["DROPOUT"]:
        return False
    if any(hint(x.get_size()[2]) < SHORTEST for x in (call.query, call.key)):
        return False
    by_tile = chosen["TABLES"] or chosen["COORDINATES"] or any(read.unless is not None for read in score.reads)
    score_graph, mask_graph = call.score_mod.graph_module, call.mask.mask_mod.graph_module
    if by_tile or score.reads_each_score or not score_graphs.is_arithmetic(score_graph):
        return False
    # In the kernel constants are numbers without a width.
    if any(score_graphs.makes_long_integers(graph) for graph in (score_graph, mask_graph)):
        return False
    # Values of the keys and a mask do not fit into the registers together.
    if any(read.by_key for read in score.reads) and not chosen["TRIVIAL_MASK_MOD"]:
        return False
    return _has_whole_blocks(chosen) and all(rows_are_aligned(x, TMA_ALIGNMENT) for x in (call.query, call.key, call.value))


def _has_whole_blocks(chosen: dict[str, Any]) -> bool:
    """Whether the sparse blocks of the mask, if there are any, consist of whole tiles."""
    tile = _Tile()
    whole = chosen["SPARSE_Q_BLOCK_SIZE"] % tile.block_m == 0 and chosen["SPARSE_KV_BLOCK_SIZE"] % tile.block_n == 0
    return chosen["NO_MASK"] or (whole and not chosen["DENSE"])


def tiles(chosen: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the template options."""
    names = {"BLOCK_M": "block_m", "BLOCK_N": "block_n"}
    largest = {"M": _Tile().block_m, "N": _Tile().block_n}
    for tiled in common.tile_choices(chosen, "fwd", [_Tile()], names, largest):
        yield tiled | _GROUPS


def built(choices: list[Any]) -> list[Any]:
    """Return the choices, which are one, or none if it does not build: a score_mod may have an op that Gluon lacks."""
    whys = [why for choice in choices if (why := build_failure(choice)) is not None]
    if not whys:
        return choices
    record(
        NAME, "flex_attention", "Triton", f"the kernel in Gluon does not build: {whys[0]}", user_line(V.graph.current_node)
    )
    return []
