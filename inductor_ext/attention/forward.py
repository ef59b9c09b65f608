"""Lowering of ``flex_attention`` in training onto ``flex_forward.py.jinja``.

It is used if the logsumexp is needed. Stock's lowering keeps inference, queries as short as in decoding, explicit backends,
and dtypes that the template does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule

from ..core.kernels import LARGEST_TILE
from ..core.report import STOCK, leave_to_stock, record, user_line
from ..core.target import Target
from ..core.templates import load
from ..options import Options
from ..torch_api.higher_order import inherited_block_options
from ..torch_api.ir import dense_strides, fixed_layout, realize
from ..torch_api.lowering import V, empty_strided
from ..torch_api.sizes import hint
from ..torch_api.template import Template, autotune, keep_alone
from . import common, gluon_forward, kernel_dropout, score_factors, score_graphs
from .calls import ForwardCall, lengths
from .inlining import Inlining, LoweredScore
from .kinds import DIAGONAL
from .max_autotune import timed
from .no_mask import hides_nothing
from .tile_tables import TileTables, tile_tables
from .tiles import forward_config

NAME = "flex_attention"


_FILE = "flex_forward.py.jinja"
_SOURCE = load(
    "attention/flex_forward", "attention/flex_tiles", "attention/flex_tables", "attention/kinds/*", "attention/dropout"
)
_template = Template("gradfuse_flex_forward", common.grid_of_queries, _SOURCE)


def lower(options: Options, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the lowering that replaces Inductor's. It falls back to ``stock``, and then records the reason."""

    def flex_attention(*args: Any) -> Any:
        call = ForwardCall(*args)
        where = user_line(V.graph.current_node)
        inference = not call.kernel_options.get("OUTPUT_LOGSUMEXP")
        reason = common.why_stock(call)
        reason = (
            reason or common.not_scalar(call.score_mod.graph_module) or common.not_scalar(call.mask.mask_mod.graph_module)
        )
        if inference:
            # Stock's kernel is as good if no gradient is needed.
            record(NAME, "flex_attention", STOCK, "inference needs no logsumexp", where)
        elif reason is not None:
            leave_to_stock(options.strict, NAME, "flex_attention", reason, where, common.ADVICE)
        if reason is not None:
            kernel_dropout.check_not_stock(call, reason, where)
        if inference or reason is not None:
            return stock(*args)
        return _lower(call, options)

    return flex_attention


def _lower(call: ForwardCall, options: Options) -> tuple[Any, Any, Any]:
    common.check_head_dims(call.query, call.value)
    node = V.graph.current_node
    nothing_hidden = hides_nothing(ForwardCall.of(node), call.mask.mask_mod.graph_module)
    call = call.realized("query", "key", "value", mask=not nothing_hidden)
    query, device, dtype = call.query, call.query.get_device(), call.query.get_dtype()
    batch, heads, length, _ = query.get_size()

    with_scale = score_factors.with_scale(call.score_mod.graph_module, call.scale)
    score_graph, mask_graph = with_scale or call.score_mod.graph_module, call.mask.mask_mod.graph_module
    tables = tile_tables(score_graph, call.kernel_options, call.captured, lengths(node))
    inlining = Inlining(device, lengths(node), call.captured, call.mask_captured, tables)
    score = inlining.score(score_graph)
    subgraphs = [score.score, inlining.mask(mask_graph), *score.before]

    size = [batch, heads, length, call.value.get_size()[-1]]
    layout = fixed_layout(device, dtype, size, dense_strides(size, query.get_stride()))
    logsumexp = empty_strided([batch, heads, length], None, dtype=torch.float32, device=device)
    max_scores = empty_strided([batch, heads, length], None, dtype=torch.float32, device=device)
    mask = common.mask_operands(call.mask, ["KV"], nothing_hidden)
    inputs = [query, call.key, call.value, logsumexp, max_scores]
    generators = mask.generators(len(inputs))
    inputs += mask.tensors

    template_options = common.template_options(call) | mask.options() | kernel_dropout.template_options(call)
    seeds = realize([kernel_dropout.seed_of(call)]) if template_options["DROPOUT"] else []
    template_options["IDENTITY_SCORE_MOD"] = score_graphs.is_identity(score_graph) and call.scale > 0
    template_options["SCORE_MOD_SCALES"] = with_scale is not None
    template_options["TRIVIAL_MASK_MOD"] = score_graphs.is_always_true(mask_graph)
    template_options["WIDE_INDEX"] = score_graphs.is_wide([*call.captured, *call.mask_captured])
    template_options.update(tables.options() | inlining.options() | score.options())
    template_options["SLICES"] = common.slices(call, nothing_hidden)
    (stock, competing), _ = inherited_block_options(device, dtype, template_options["QK_HEAD_DIM"], length)
    features = _features(call, template_options, score, tables, score_graph)
    head_dim = template_options["QK_HEAD_DIM_ROUNDED"]
    configs = [forward_config(stock, Target.of(device).family, features, head_dim=head_dim), *competing]
    operands = [*inputs, *tables.buffers(), *seeds]

    def choices_of(template: Template, tiles: Iterator[dict[str, Any]]) -> list[Any]:
        choices: list[Any] = []
        fixed = {"input_nodes": operands, "layout": layout, "subgraphs": subgraphs, "call_sizes": query.get_size()}
        for tiled in tiles:
            template.maybe_append_choice(choices, **fixed, mutated_inputs=[logsumexp, max_scores], **tiled)
        return choices

    choices, file = [], gluon_forward.FILE
    if gluon_forward.takes(call, options, template_options, score):
        choices = gluon_forward.built(choices_of(gluon_forward.TEMPLATE, gluon_forward.tiles(template_options)))
    if not choices:
        choices, file = choices_of(_template, _tiles(call, template_options, configs, tables.longest_tile)), _FILE
    captured = [*call.captured, *call.mask_captured]
    out = autotune(
        "gradfuse_flex_attention",
        choices,
        [*operands, *captured],
        layout,
        generators,
        captured,
        subgraphs,
    )
    if file == gluon_forward.FILE:
        # What follows would be in Triton's language, of which not all is possible in Gluon, and spill registers.
        keep_alone(out)
    record(NAME, "flex_attention", file, _shape_note(query, call.key), user_line(node))
    return out, logsumexp, max_scores


def _features(
    call: ForwardCall, options: dict[str, Any], score: LoweredScore, tables: TileTables, score_graph: GraphModule
) -> set[str]:
    """Return the features of the kernel that decide about its tile (tiles.py)."""
    # Those that no block needs as a rule do not decide.
    chained = [] if score.conditional else score_graphs.chained_reads(score_graph)
    blocks = tables.has_pairs and not options["DROPOUT"]
    half = call.query.get_dtype() is not torch.float32
    has = {
        "a mod": not (options["IDENTITY_SCORE_MOD"] and options["TRIVIAL_MASK_MOD"]),
        "reads": score.reads_each_score,
        "chained reads": bool(chained),
        "rows and columns": bool(chained) and not any(score_graphs.differs_by_pair(n) for n in chained),
        "one tile": common.in_tiles(call, 1),
        "few tiles": common.in_tiles(call, 4),
        "blocks": blocks and half,
        "few blocks": blocks and common.in_tiles(call, 4),
        "slices": options["SLICES"] > 1 and not score.reads_each_score,
        "images": tables.longest_tile < LARGEST_TILE,
        "dropout": options["DROPOUT"],
        "fp32": not half,
    }
    same_width = options["QK_HEAD_DIM_ROUNDED"] == options["V_HEAD_DIM_ROUNDED"]
    shortest = min(hint(x.get_size()[2]) for x in (call.query, call.key))
    if half and same_width and not options["DROPOUT"] and shortest > 4 * common.SHORT:
        has[f"only {_only(options, score_graph, call.mask.mask_mod.graph_module, tables)}"] = True
    return {name for name, there in has.items() if there}


def _only(options: dict[str, Any], score_graph: GraphModule, mask_graph: GraphModule, tables: TileTables) -> str:
    """Return the one thing that is inlined into the kernel, or "more or less" if that is nothing or several things."""
    reads = score_graphs.reads(score_graph)
    if options["IDENTITY_SCORE_MOD"]:
        alone = not options["TRIVIAL_MASK_MOD"] and not score_graphs.reads(mask_graph)
        return "a mask" if alone and not options["COORDINATES"] else "more or less"
    if not options["TRIVIAL_MASK_MOD"] or options["COORDINATES"]:
        return "more or less"
    if len(reads) == 1 and [table.kind for table in tables.tables] == [DIAGONAL]:
        return "a diagonal"
    return "more or less" if any(map(score_graphs.differs_by_position, reads)) else "a function"


def _tiles(call: ForwardCall, options: dict[str, Any], configs: list[Any], limit: int) -> Iterator[dict[str, Any]]:
    """Yield the template options for each config. limit: the longest tile with which the kernel is right."""
    tiles, largest = {"BLOCK_M": "block_m", "BLOCK_N": "block_n"}, common.largest_tile(call, limit)
    choices = list(common.tile_choices(options, "fwd", configs, tiles, largest))
    itemsize, memory = call.query.get_dtype().itemsize, Target.of(call.query.get_device()).shared_memory
    for tiled in timed(choices, "forward", itemsize, memory):
        yield common.with_slices(call, tiled, ("BLOCK_M", "BLOCK_N"), allowed=True)


def _shape_note(query: Any, key: Any) -> str:
    return f"this is training; query has the shape {tuple(query.get_size())}, key {tuple(key.get_size())}"
