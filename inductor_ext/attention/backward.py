"""Lowering of ``flex_attention_backward`` onto ``flex_backward.py.jinja``.

The joint graph of the score_mod is taken apart into the gradient of the score and the contributions to each captured
gradient; the template gets each contribution's value, offset and bounds as subgraphs of their own, and
captured_gradients.py says how each is reduced. Captured gradients are accumulated in fp32 and cast once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch

from .. import compat
from ..compat import FlexBlockMask, SymbolicGridFn, V, lowerings
from ..core import subgraphs
from ..core.report import leave_to_stock, record, user_line
from ..core.templates import load
from ..options import Options
from . import common, score_graphs
from .bounds import extents_of
from .captured import CapturedGradients, NotInOrder, plan_gradients
from .captured_grads import JOINT_INPUTS, JointGraph, NotUnderstood, returning, take_apart
from .diagonals import STRIP_ROWS
from .forward import mask_subgraph, score_subgraph
from .tile_tables import TileTables, tile_tables
from .tiles import backward_config

aten = torch.ops.aten
NAME = "flex_attention_backward"


@SymbolicGridFn
def _grid(
    batch: Any,
    heads: Any,
    queries: Any,
    _dim: Any,
    kv_heads: Any,
    keys: Any,
    meta: dict[str, Any],
    *,
    cdiv: Callable[..., Any],
) -> tuple:
    query_programs = 0 if meta["ONE_PASS"] else cdiv(queries, meta["BLOCK_M2"]) * (heads // kv_heads)
    return query_programs + cdiv(keys, meta["BLOCK_N1"]), batch, kv_heads


_template = compat.make_template("gradfuse_flex_backward", _grid, load("attention/flex_backward", "attention/flex_tables"))


def lower(own: Options, stock: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of Inductor's lowering, falling back to ``stock`` with the reason in the report."""

    def flex_attention_backward(*args: Any, **kwargs: Any) -> Any:
        query, key, value = args[:3]
        where = user_line(V.graph.current_node)
        reason = common.why_stock(query, key, value, args[11])
        joint = None
        if reason is None:
            try:
                joint = take_apart(args[8].graph_module)
            except NotUnderstood as error:
                reason, where = str(error), user_line(error.node) or where
        if joint is None:
            leave_to_stock(own.strict, NAME, "flex_attention_backward", reason, where, common.ADVICE)
            return stock(*args, **kwargs)
        try:
            return _lower(own, joint, *args)
        except NotInOrder:
            raise RuntimeError(
                "gradfuse: deterministic gradients were asked for, but the gradient of a tensor captured by this "
                f"score_mod can only be accumulated with atomics ({where}): its index depends on the score. "
                "Detach the tensor, index it with positions, or compile without deterministic."
            ) from None

    return flex_attention_backward


def _lower(
    own: Options,
    joint: JointGraph,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    grad_out: Any,
    grad_logsumexp: Any,
    score_mod: Any,
    _joint_graph: Any,
    block_mask: Any,
    scale: float,
    kernel_options: dict[str, Any],
    score_captured: Any,
    mask_captured: Any,
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    device, dtype = query.get_device(), query.get_dtype()
    node = V.graph.current_node
    query_size, key_size, value_size = query.get_size(), key.get_size(), value.get_size()
    batch, heads, length, qk_dim = query_size
    if grad_out is None:
        grad_out = compat.full([batch, heads, length, value_size[-1]], 0, dtype, device)
    delta = _delta(out, grad_out, grad_logsumexp)
    query, key, value, logsumexp, grad_out, delta = compat.realize([query, key, value, logsumexp, grad_out, delta])
    block_mask = FlexBlockMask.of(block_mask)
    block_mask = FlexBlockMask(*compat.realize(block_mask[:-1]), block_mask.mask_mod)
    score_captured, mask_captured = compat.realize(score_captured), compat.realize(mask_captured)

    score_graph, mask_graph = score_mod.graph_module, block_mask.mask_mod.graph_module
    tables = tile_tables(score_graph, kernel_options, score_captured)
    score_buffer = score_subgraph(score_graph, node, device, score_captured, tables)
    mask_buffer = mask_subgraph(mask_graph, node, device, mask_captured)
    grad_score_buffer = _grad_score(joint, node, device, score_captured, tables)
    captured = plan_gradients(
        joint,
        node,
        device,
        score_captured,
        tables,
        tma_allowed=_tma_allowed(own, device, kernel_options),
        in_order=own.deterministic,
    )

    # A batch of 1 in key and value is broadcast: their gradients are computed per batch element and summed after.
    grad_key_size = [batch, *key_size[1:]]
    grad_value_size = [batch, *value_size[1:]]
    layout = compat.fixed_layout(device, dtype, grad_key_size, compat.dense_strides(grad_key_size, key.get_stride()))
    one_pass = _one_pass(own, query, kernel_options, captured)
    grad_value = compat.empty_strided(
        grad_value_size, compat.dense_strides(grad_value_size, value.get_stride()), dtype=dtype, device=device
    )
    if one_pass:
        grad_query = compat.full(query_size, 0, torch.float32, device)
    else:
        strides = compat.dense_strides(query_size, query.get_stride())
        grad_query = compat.empty_strided(query_size, strides, dtype=dtype, device=device)
    full_kv_num_blocks, full_kv_blocks, full_q_num_blocks, full_q_blocks = common.full_block_lists(block_mask, device)
    inputs = [query, key, value, logsumexp, delta, grad_out, grad_query, grad_value]
    inputs += [block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.q_num_blocks, block_mask.q_indices]
    inputs += [full_kv_num_blocks, full_kv_blocks, full_q_num_blocks, full_q_blocks]

    options = common.template_options(query, key, value, block_mask, scale, kernel_options)
    options["IDENTITY_SCORE_MOD"] = score_graphs.is_identity(score_graph)
    options["TRIVIAL_MASK_MOD"] = score_graphs.is_always_true(mask_graph)
    options["WIDE_INDEX"] = score_graphs.is_wide([*score_captured, *mask_captured])
    options.update(tables.options())
    options["ONE_PASS"] = one_pass
    options["TMA_ADDS"] = one_pass and compat.has_tma(device) and qk_dim % 4 == 0
    _, configs = compat.inherited_block_options(device, dtype, options["QK_HEAD_DIM"], length)
    if len(configs) == 1:
        form = {
            "head_dim": options["QK_HEAD_DIM_ROUNDED"],
            "one_pass": one_pass,
            "mask_mod": not options["TRIVIAL_MASK_MOD"],
        }
        configs = [backward_config(configs[0], compat.architecture(device), captured, **form)]
    tiles = {"BLOCK_M1": "block_m1", "BLOCK_N1": "block_n1", "BLOCK_M2": "block_m2", "BLOCK_N2": "block_n2"}
    inlined = [score_buffer, grad_score_buffer, mask_buffer, *captured.inlined]
    tilings = list(common.tile_choices(options, "bwd", configs, tiles, captured.tallest_tile))
    captured.allocate(score_captured, block_mask, device, tilings)
    choices: list[Any] = []
    for tiled in tilings:
        _template.maybe_append_choice(
            choices=choices,
            input_nodes=[*inputs, *tables.buffers(), *captured.targets],
            layout=layout,
            subgraphs=inlined,
            mutated_inputs=[grad_query, grad_value, *captured.written],
            call_sizes=[*query_size, *key_size[1:3]],
            **tiled,
            **captured.options(),
        )
    generators: dict[int, Any] = {}
    for i in range(8, 16, 2):
        generators[i] = common.num_blocks_for_autotuning(inputs[i + 1])
        generators[i + 1] = common.indices_for_autotuning
    all_captured = [*score_captured, *mask_captured]
    grad_key = compat.autotune(
        "gradfuse_flex_backward",
        choices,
        [*inputs, *tables.buffers(), *captured.targets, *all_captured],
        layout,
        generators,
        all_captured,
        [*inlined, *captured.written],
    )
    if not V.graph.sizevars.evaluate_expr(sympy.Eq(batch, key_size[0])):
        grad_key, grad_value = (lowerings[aten.sum](g, axis=0, keepdims=True) for g in (grad_key, grad_value))
    if one_pass:
        grad_query = lowerings[torch.ops.prims.convert_element_type](grad_query, dtype)
    note = f"{'one pass' if one_pass else 'two passes'}; {captured.note}"
    reductions = tuple((plan.owner, plan.kind.value) for plan in captured.plans)
    record(NAME, "flex_attention_backward", "flex_backward.py.jinja", note, user_line(node), reductions)
    return grad_query, grad_key, grad_value, captured.results(score_captured)


def _delta(out: Any, grad_out: Any, grad_logsumexp: Any) -> Any:
    """rowsum(out ∘ grad_out) in fp32, less the gradient of the logsumexp (which the caller has in base 2)."""
    out, grad = (lowerings[torch.ops.prims.convert_element_type](x, torch.float32) for x in (out, grad_out))
    delta = lowerings[aten.sum](lowerings[aten.mul](out, grad), axis=-1)
    if grad_logsumexp is not None:
        delta = lowerings[aten.sub](delta, lowerings[aten.mul](grad_logsumexp, 1 / math.log(2)))
    return compat.require_contiguous(delta)


def _joint_placeholders(device: torch.device) -> list[Any]:
    return score_graphs.score_placeholders(device, torch.float32, gradient=True)


def _grad_score(
    joint: JointGraph, node: torch.fx.Node, device: torch.device, captured: list[Any], tables: TileTables
) -> Any:
    if joint.grad_score is None:
        module = returning(joint.module, [])
        zero = module.graph.find_nodes(op="output")[0]
        with module.graph.inserting_before(zero):
            constant = module.graph.call_function(aten.full.default, ([], 0.0), {"dtype": torch.float32, "device": device})
        zero.args = ([constant],)
    else:
        module = returning(joint.module, [joint.grad_score])
    tiles = tables.read_by_tile(module, JOINT_INPUTS)
    score_graphs.clamp_reads(module, extents_of(module, common.extents(node), first=1))
    (buffer,) = subgraphs.inline(module, _joint_placeholders(device), [*captured, *tiles])
    return buffer


#: Widest head for which five matmuls with dQ in memory beat seven with dQ in registers, and the same with a strip's tiles to
#: add besides (benchmarks/NOTES.md).
WIDEST_ONE_PASS = 64
WIDEST_WITH_STRIPS = 128


def _one_pass(own: Options, query: Any, kernel_options: dict[str, Any], captured: CapturedGradients) -> bool:
    """Whether dQ is reduced in memory; ``kernel_options={"bwd_ONE_PASS": ...}`` decides it."""
    if own.deterministic:
        return False
    wanted = kernel_options.get("bwd_ONE_PASS", kernel_options.get("ONE_PASS"))
    if wanted is not None:
        return bool(wanted)
    half = query.get_dtype().itemsize == 2
    widest = WIDEST_WITH_STRIPS if captured.has_strips else WIDEST_ONE_PASS
    fits = V.graph.sizevars.guard_int(query.get_size()[-1]) <= widest
    suits = captured.has_strips or not captured.sums_along_keys
    return half and fits and suits and compat.architecture(query.get_device()) >= 90


def _tma_allowed(own: Options, device: torch.device, kernel_options: dict[str, Any]) -> bool:
    """Whether whole tiles may be added in memory by TMA: not where the user asks for tiles taller than a strip."""
    short = all(size <= STRIP_ROWS for name, size in kernel_options.items() if name.endswith(("BLOCK_M1", "BLOCK_M2")))
    return compat.has_tma(device) and not own.deterministic and short
