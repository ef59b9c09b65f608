"""Lowering of ``flex_attention_backward`` onto ``flex_backward.py.jinja``.

The joint graph of the score_mod is split into the gradient of the score and the contributions to each captured gradient.
The template gets the value, the offset and the bounds of each contribution as separate subgraphs, and captured.py decides
how each is reduced. Captured gradients are accumulated in fp32 and cast once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy
import torch

from ..core.report import leave_to_stock, record, user_line, warn_of_cost
from ..core.target import TMA_ALIGNMENT, Target
from ..core.templates import load
from ..options import Options
from ..torch_api.higher_order import inherited_block_options
from ..torch_api.ir import dense_strides, fixed_layout, full, realize, require_contiguous, zeros_beside
from ..torch_api.lowering import V, empty_strided, lowerings
from ..torch_api.sizes import known_at_most
from ..torch_api.template import SymbolicGridFn, Template, autotune
from . import batch_sums, common, kernel_dropout, score_graphs
from .calls import BackwardCall, lengths
from .captured import CapturedGradients, NotInOrder, plan_gradients
from .captured_grads import JointGraph, NotUnderstood, take_apart
from .inlining import Inlining
from .kinds.diagonals import STRIP_ROWS
from .max_autotune import timed
from .no_mask import hides_nothing
from .tile_tables import tile_tables
from .tiles import backward_config

aten = torch.ops.aten
NAME = "flex_attention_backward"
#: As many atomic adds take a quarter of a millisecond on an H200.
MANY_SCORES = 2**24
ADVICE_ON_ATOMICS = (
    "An index that is computed from the distance of query and key, or from one value for each of them, is reduced without "
    "atomics. So is one that is read for each pair, if it is the same for all heads, has few values, and there are at most "
    "134 million scores. If the tensor needs no gradient, detach it."
)


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
    return query_programs + cdiv(keys, meta["BLOCK_N1"]), cdiv(batch, meta["SLICES"]), kv_heads


_TEMPLATES = ("flex_backward", "flex_tiles", "flex_tables", "dropout", "kinds/*", "backward/*")
_SOURCE = load(*(f"attention/{name}" for name in _TEMPLATES))
_template = Template("gradfuse_flex_backward", _grid, _SOURCE)


def lower(options: Options, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the lowering that replaces Inductor's. It falls back to ``stock``, and then records the reason."""

    def flex_attention_backward(*args: Any) -> Any:
        call = BackwardCall(*args)
        where = user_line(V.graph.current_node)
        reason = common.why_stock(call)
        joint = None
        if reason is None:
            try:
                joint = take_apart(call.joint_graph.graph_module)
            except NotUnderstood as error:
                reason, where = str(error), user_line(error.node) or where
        if joint is None:
            kernel_dropout.check_not_stock(call, reason, where)
            leave_to_stock(options.strict, NAME, "flex_attention_backward", reason, where, common.ADVICE)
            return stock(*args)
        try:
            return _lower(options, joint, call)
        except NotInOrder:
            raise RuntimeError(
                "gradfuse cannot compute deterministic gradients here: the gradient of a tensor captured by this score_mod "
                f"can only be accumulated with atomics, because its index depends on the score ({where}). "
                "Detach the tensor, index it with positions, or compile without deterministic."
            ) from None

    return flex_attention_backward


def _lower(options: Options, joint: JointGraph, call: BackwardCall) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    node = V.graph.current_node
    if call.grad_out is None:
        size = [*call.query.get_size()[:3], call.value.get_size()[-1]]
        call = replace(call, grad_out=full(size, 0, call.query.get_dtype(), call.query.get_device()))
    delta = _delta(call)
    nothing_hidden = hides_nothing(BackwardCall.of(node), call.mask.mask_mod.graph_module)
    call = call.realized("query", "key", "value", "logsumexp", "grad_out", mask=not nothing_hidden)
    device = call.query.get_device()

    score_graph, mask_graph = call.score_mod.graph_module, call.mask.mask_mod.graph_module
    tables = tile_tables(score_graph, call.kernel_options, call.captured, lengths(node))
    inlining = Inlining(device, lengths(node), call.captured, call.mask_captured, tables)
    tma_allowed = _tma_allowed(options, device, call.kernel_options)
    grad_score_buffer, contributions = inlining.joint(joint, options.deterministic)
    over_batch = batch_sums.pays(call, options, nothing_hidden)
    captured = plan_gradients(
        contributions, inlining, tma_allowed=tma_allowed, in_order=options.deterministic, over_batch=over_batch
    )
    score = inlining.score(score_graph)
    transposed = _may_transpose_dq(call, captured, bool(tables.tables), score.reads_each_score)
    late = transposed and _may_add_late(call, captured)
    one_pass = _one_pass(options, call, captured, late)
    mask = common.mask_operands(call.mask, ["KV", "Q"], nothing_hidden)

    template_options = common.template_options(call) | mask.options() | kernel_dropout.template_options(call)
    seeds = realize([kernel_dropout.seed_of(call)]) if template_options["DROPOUT"] else []
    template_options["IDENTITY_SCORE_MOD"] = score_graphs.is_identity(score_graph)
    template_options["TRIVIAL_MASK_MOD"] = score_graphs.is_always_true(mask_graph)
    template_options["WIDE_INDEX"] = score_graphs.is_wide([*call.captured, *call.mask_captured])
    template_options.update(tables.options())
    template_options["ONE_PASS"] = one_pass
    # A one-hot is exact in TF32, and 11 bits of the other operand are more than the result keeps.
    half = call.query.get_dtype().itemsize == 2
    template_options["ONE_HOT_PRECISION"] = "'tf32'" if half else template_options["FLOAT32_PRECISION"]
    template_options["SLICES"] = common.slices(call, nothing_hidden) if one_pass else 1
    scores = [score.score, grad_score_buffer, inlining.mask(mask_graph)]
    inlined = [*scores, *captured.inlined, *score.before]
    template_options.update(inlining.options() | score.options())
    tilings = _tilings(call, template_options, captured, tables.longest_tile, score.reads_each_score)
    one_key_tile = one_pass and nothing_hidden and _holds_all_keys(call, tilings[0])
    if one_key_tile:
        # The others would need dQ in memory, and fewer programs for each batch element.
        tilings = [tiled for tiled in tilings if _holds_all_keys(call, tiled)]
    in_memory = one_pass and not one_key_tile
    rows_aligned = 4 * template_options["QK_HEAD_DIM"] % TMA_ALIGNMENT == 0
    form = {"DQ_IN_MEMORY": in_memory, "TMA_ADDS": in_memory and Target.of(device).tma and rows_aligned}
    form |= {"DQ_TRANSPOSED": form["TMA_ADDS"] and transposed, "DQ_LATE": form["TMA_ADDS"] and late}
    # All keys of a query are in one tile.
    form["SUMS_DELTA"] = one_pass and not in_memory and call.grad_logsumexp is None
    tile = ("BLOCK_M1", "BLOCK_N1")
    tilings = [common.with_slices(call, tiled | form, tile, allowed=one_pass and not in_memory) for tiled in tilings]

    grad_key_layout, grad_value, grad_query = _gradients(call, in_memory)
    inputs = [call.query, call.key, call.value, call.logsumexp, call.grad_out, grad_query, grad_value]
    deltas = [] if form["SUMS_DELTA"] and captured.apart is None else realize([delta])
    inputs += [] if form["SUMS_DELTA"] else deltas
    generators = mask.generators(len(inputs))
    inputs += mask.tensors
    captured.allocate(call.captured, nothing_hidden, device, tilings)
    choices: list[Any] = []
    for tiled in tilings:
        _template.maybe_append_choice(
            choices=choices,
            input_nodes=[*inputs, *tables.buffers(), *captured.targets, *seeds],
            layout=grad_key_layout,
            subgraphs=inlined,
            mutated_inputs=[grad_query, grad_value, *captured.written],
            call_sizes=[*call.query.get_size(), *call.key.get_size()[1:3]],
            **tiled,
            **captured.options(),
        )
    all_captured = [*call.captured, *call.mask_captured]
    grad_key = autotune(
        "gradfuse_flex_attention_backward",
        choices,
        [*inputs, *tables.buffers(), *captured.targets, *seeds, *all_captured],
        grad_key_layout,
        generators,
        all_captured,
        [*inlined, *captured.written],
    )
    if captured.apart is not None:
        parts = [*scores, *captured.inlined_apart, *score.before]
        operands = [*deltas, *tables.buffers(), *seeds]
        captured.gradient_apart = batch_sums.lower(call, captured.apart, operands, tilings[0] | captured.options(), parts)
    if not V.graph.sizevars.evaluate_expr(sympy.Eq(call.query.get_size()[0], call.key.get_size()[0])):
        grad_key, grad_value = (lowerings[aten.sum](g, axis=0, keepdims=True) for g in (grad_key, grad_value))
    if in_memory:
        grad_query = lowerings[torch.ops.prims.convert_element_type](grad_query, call.query.get_dtype())
    _warn_of_atomics(call, captured.atomics, user_line(node))
    note = f"the gradients take {'one pass' if one_pass else 'two passes'}; {captured.note}"
    record(NAME, "flex_attention_backward", "flex_backward.py.jinja", note, user_line(node), captured.reductions)
    return grad_query, grad_key, grad_value, captured.results(call.captured)


def _warn_of_atomics(call: BackwardCall, atomics: int, where: str) -> None:
    batch, heads, queries, _ = call.query.get_size()
    scores = batch * heads * queries * call.key.get_size()[2]
    if atomics and isinstance(scores, (int, sympy.Integer)) and scores >= MANY_SCORES:
        millions = int(scores) // 10**6
        why = f"the gradients of captured tensors take up to {atomics} atomic adds for each of {millions} million scores"
        warn_of_cost(NAME, why, where, ADVICE_ON_ATOMICS)


def _holds_all_keys(call: BackwardCall, tiled: dict[str, Any]) -> bool:
    """Return whether all keys are in one tile, so that one tile of dscores · K is a tile of dQ."""
    return known_at_most(call.key.get_size()[2], tiled["BLOCK_N1"])


def _gradients(call: BackwardCall, in_memory: bool) -> tuple[Any, Any, Any]:
    """Return the layout of dK, and the buffers of dV and dQ.

    If key and value have a batch of 1, they are broadcast, and their gradients are computed for each batch element and
    summed afterwards. ``in_memory``: dQ is accumulated in fp32 in memory.
    """
    device, dtype = call.query.get_device(), call.query.get_dtype()
    batch = call.query.get_size()[0]
    key_size, value_size = [batch, *call.key.get_size()[1:]], [batch, *call.value.get_size()[1:]]
    layout = fixed_layout(device, dtype, key_size, dense_strides(key_size, call.key.get_stride()))
    grad_value = empty_strided(value_size, dense_strides(value_size, call.value.get_stride()), dtype=dtype, device=device)
    size = call.query.get_size()
    if in_memory and [*size] == [*call.grad_out.get_size()]:
        # The kernel that computes delta reads the gradient.
        return layout, grad_value, zeros_beside(call.grad_out, torch.float32)
    if in_memory:
        return layout, grad_value, full(size, 0, torch.float32, device)
    return layout, grad_value, empty_strided(size, dense_strides(size, call.query.get_stride()), dtype=dtype, device=device)


def _tilings(
    call: BackwardCall,
    template_options: dict[str, Any],
    captured: CapturedGradients,
    longest: int,
    reads_each_score: bool,
) -> list[dict[str, Any]]:
    """Return the template's options for each choice of tiles: one choice, or several under max-autotune.

    longest: the largest number of queries, and of keys, in a tile. reads_each_score: something is read for each score.
    """
    device, dtype, length = call.query.get_device(), call.query.get_dtype(), call.query.get_size()[2]
    _, (stock, competing) = inherited_block_options(device, dtype, template_options["QK_HEAD_DIM"], length)
    target = Target.of(device)
    form = {
        "head_dim": template_options["QK_HEAD_DIM_ROUNDED"],
        "one_pass": template_options["ONE_PASS"],
        "mask_mod": not template_options["TRIVIAL_MASK_MOD"],
        "one_tile": common.in_tiles(call, 1),
        "few_tiles": common.in_tiles(call, 4),
        "slices": template_options["SLICES"] > 1 and not reads_each_score,
        "dropout": template_options["DROPOUT"],
    }
    configs = [backward_config(stock, target.family, captured, **form), *competing]
    largest = common.largest_tile(call, longest)
    largest["M"] = min(largest["M"], captured.tallest_tile)
    tiles = {"BLOCK_M1": "block_m1", "BLOCK_N1": "block_n1", "BLOCK_M2": "block_m2", "BLOCK_N2": "block_n2"}
    choices = list(common.tile_choices(template_options, "bwd", configs, tiles, largest))
    return timed(choices, "backward", dtype.itemsize, target.shared_memory)


def _delta(call: BackwardCall) -> Any:
    """Compute rowsum(out ∘ grad_out) in fp32, minus the gradient of the logsumexp (which the caller has in base 2)."""
    out, grad = (lowerings[torch.ops.prims.convert_element_type](x, torch.float32) for x in (call.out, call.grad_out))
    delta = lowerings[aten.sum](lowerings[aten.mul](out, grad), axis=-1)
    if call.grad_logsumexp is not None:
        delta = lowerings[aten.sub](delta, lowerings[aten.mul](call.grad_logsumexp, 1 / math.log(2)))
    return require_contiguous(delta)


def _may_transpose_dq(call: BackwardCall, captured: CapturedGradients, reads_tiles: bool, reads_each_score: bool) -> bool:
    """Return whether one pass computes dQ as a transpose, which takes 3 to 13 % less time on Hopper.

    This is so if little but the tiles of the matmuls is in registers for each score, or tiles are added to strips. Other
    gradients have not been timed (docs/notes/attention.md).
    """
    head_dim, value_dim = (V.graph.sizevars.guard_int(x.get_size()[-1]) for x in (call.query, call.value))
    target = Target.of(call.query.get_device())
    fits = head_dim >= 32 and max(head_dim, value_dim) <= WIDEST_WITH_LATE_DQ and 4 * head_dim % TMA_ALIGNMENT == 0
    alone = captured.strips_only or (captured.sums_only and (captured.apart is not None or not reads_tiles))
    kernel_has_room = alone and not reads_each_score and not kernel_dropout.probability(call)
    return target.family == "hopper" and target.tma and fits and kernel_has_room


def _may_add_late(call: BackwardCall, captured: CapturedGradients) -> bool:
    """Return whether registers can also hold a tile of dQ until the next iteration, which adds it to memory ("late").

    At head dim 64 this saves 5 to 13 %, but costs 3 % beside strips. Wider tiles have eight warps, and room beside strips.
    At head dim 32 it saves 32 % with a causal mask, saves nothing without a mask, and costs 3 to 13 % with a score_mod.
    """
    head_dim = V.graph.sizevars.guard_int(call.query.get_size()[-1])
    if captured.strips_only:
        return head_dim > WIDEST_ONE_PASS
    return head_dim > 32 or score_graphs.is_identity(call.score_mod.graph_module)


#: The widest head for which one pass (five matmuls, dQ in memory) is faster than two (seven matmuls, dQ in registers). The
#: second number holds if dQ is added late, or if tiles are also added to a strip (docs/notes/attention.md).
WIDEST_ONE_PASS = 64
WIDEST_WITH_LATE_DQ = 128
#: The narrowest head for which one pass is faster if blocks of pairs are added in memory too, and there are several tiles.
#: AlphaFold's pairs at head dim 32 take 0.55 ms in two passes, and 0.64 in one.
NARROWEST_WITH_BLOCKS = 33


def _one_pass(options: Options, call: BackwardCall, captured: CapturedGradients, late: bool) -> bool:
    """Return whether dQ is reduced in memory. ``kernel_options={"bwd_ONE_PASS": ...}`` overrides the default.

    late: the kernel may add a tile of dQ in the next iteration.
    """
    if options.deterministic:
        return False
    wanted = call.kernel_options.get("bwd_ONE_PASS", call.kernel_options.get("ONE_PASS"))
    if wanted is not None:
        return bool(wanted)
    half = call.query.get_dtype().itemsize == 2
    # The distances of 64 x 64 places take 5.5 ms at head dim 128, and 2.65 in two passes.
    long_strips = captured.has_strips and not captured.has_strips_of_short_rows
    widest = WIDEST_WITH_LATE_DQ if late or long_strips else WIDEST_ONE_PASS
    head_dim = V.graph.sizevars.guard_int(call.query.get_size()[-1])
    narrow = head_dim < NARROWEST_WITH_BLOCKS and not common.in_tiles(call, 1)
    fits = head_dim <= widest and not (captured.adds_blocks and narrow)
    # Tiles whose rows are keys are slow to sum along the keys: DeBERTa's biases take 2.75 ms, and 2.0 in two passes.
    along_keys = captured.sums_along_keys or captured.shares_rows or captured.repeats or captured.in_large_tables
    worthwhile = captured.has_strips or not along_keys
    return half and fits and worthwhile and Target.of(call.query.get_device()).adds_tiles


def _tma_allowed(options: Options, device: torch.device, kernel_options: dict[str, Any]) -> bool:
    """Return whether TMA may add whole tiles in memory. It may not if the user asks for tiles taller than a strip."""
    short = all(size <= STRIP_ROWS for name, size in kernel_options.items() if name.endswith(("BLOCK_M1", "BLOCK_M2")))
    return Target.of(device).tma and not options.deterministic and short
