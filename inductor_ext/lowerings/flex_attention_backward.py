"""Lowering of ``flex_attention_backward`` onto ``flex_backward.py.jinja``.

The joint graph of the score_mod is taken apart into the gradient of the score and the contributions to each captured
gradient; the template gets each contribution's value, offset and bounds as subgraphs of their own and decides what to do
with them. Captured gradients are accumulated in fp32 and cast once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from .. import compat
from ..analysis.bounds import extents_of
from ..analysis.captured_grads import JOINT_INPUTS, Contribution, JointGraph, NotUnderstood, axes_of, returning, take_apart
from ..compat import FlexBlockMask, SymbolicGridFn, V, lowerings
from ..options import Options
from ..report import STOCK, record, user_line
from . import flex_common as common
from . import subgraphs
from .flex_attention import extents, mask_subgraph, score_subgraph
from .flex_tiles import backward_config
from .templates import load

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


_template = compat.make_template("gradfuse_flex_backward", _grid, load("flex_backward"))


@dataclass
class _CapturedGradients:
    """Accumulators of the captured tensors that need a gradient, and what is added to them.

    accumulators: one buffer a captured tensor, None where it needs no gradient: zeroed and fp32, or in the tensor's own
        dtype where each element has one writer.
    targets: the accumulator of each contribution.
    subgraphs: value, offset and in_bounds of each contribution, flat.
    checked, query_free, key_free, one_writer: bit i is set where contribution i's offset may be out of bounds, does not
        depend on the query, does not depend on the key, is reached by one score alone.
    """

    accumulators: list[Any] = field(default_factory=list)
    targets: list[Any] = field(default_factory=list)
    subgraphs: list[Any] = field(default_factory=list)
    checked: int = 0
    query_free: int = 0
    key_free: int = 0
    one_writer: int = 0

    @property
    def note(self) -> str:
        """How each contribution is reduced, for the report."""
        kinds = []
        for i in range(len(self.targets)):
            bits = [(mask >> i) & 1 for mask in (self.one_writer, self.query_free, self.key_free)]
            if bits[0]:
                kinds.append("stored by its one writer")
            elif any(bits[1:]):
                kinds.append("summed in registers, one fp32 add a program" if bits[1] else "summed along keys")
            else:
                kinds.append("one fp32 add a score")
        return f"{len(kinds)} contributions to captured gradients" + (": " + ", ".join(kinds) if kinds else "")


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
                line = user_line(error.node) or where
                reason = f"{error}, at {line}" if line else str(error)
                if own.strict:
                    raise common.refuse(reason) from error
        if joint is None:
            record(NAME, "flex_attention_backward", STOCK, reason, where)
            return stock(*args, **kwargs)
        if own.deterministic and any(joint.captured):
            raise RuntimeError(
                "gradfuse: deterministic gradients were asked for, but the gradient of a tensor captured by this "
                f"score_mod is accumulated with atomics ({where}). Detach the tensor, add it to the mask instead, or "
                "compile without deterministic."
            )
        return _lower(own, joint, *args)

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
    score_buffer = score_subgraph(score_graph, node, device, score_captured)
    mask_buffer = mask_subgraph(mask_graph, node, device, mask_captured)
    grad_score_buffer = _grad_score(joint, node, device, score_captured)
    captured = _captured_gradients(joint, node, device, score_captured, block_mask)

    # A batch of 1 in key and value is broadcast: their gradients are computed per batch element and summed after.
    grad_key_size = [batch, *key_size[1:]]
    grad_value_size = [batch, *value_size[1:]]
    layout = compat.fixed_layout(device, dtype, grad_key_size, compat.dense_strides(grad_key_size, key.get_stride()))
    one_pass = _one_pass(own, device, qk_dim, kernel_options)
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
    options["IDENTITY_SCORE_MOD"] = subgraphs.is_identity(score_graph)
    options["TRIVIAL_MASK_MOD"] = subgraphs.is_always_true(mask_graph)
    options["WIDE_INDEX"] = subgraphs.is_wide([*score_captured, *mask_captured])
    options["NUM_CONTRIBUTIONS"] = len(captured.targets)
    options["CHECKED_CONTRIBUTIONS"] = captured.checked
    options["QUERY_FREE_CONTRIBUTIONS"] = captured.query_free
    options["KEY_FREE_CONTRIBUTIONS"] = captured.key_free
    options["ONE_WRITER_CONTRIBUTIONS"] = captured.one_writer
    options["ONE_PASS"] = one_pass
    options["TMA_ADDS"] = one_pass and compat.has_tma(device) and qk_dim % 4 == 0
    _, configs = compat.inherited_block_options(device, dtype, options["QK_HEAD_DIM"], length)
    if len(configs) == 1:
        configs = [backward_config(configs[0], compat.architecture(device), contributions=bool(captured.targets))]
    tiles = {"BLOCK_M1": "block_m1", "BLOCK_N1": "block_n1", "BLOCK_M2": "block_m2", "BLOCK_N2": "block_n2"}
    inlined = [score_buffer, grad_score_buffer, mask_buffer, *captured.subgraphs]
    accumulators = [a for a in captured.accumulators if a is not None]
    choices: list[Any] = []
    for tiled in common.tile_choices(options, "bwd", configs, tiles):
        _template.maybe_append_choice(
            choices=choices,
            input_nodes=[*inputs, *captured.targets],
            layout=layout,
            subgraphs=inlined,
            mutated_inputs=[grad_query, grad_value, *accumulators],
            call_sizes=[*query_size, *key_size[1:3]],
            **tiled,
        )
    generators: dict[int, Any] = {}
    for i in range(8, 16, 2):
        generators[i] = common.num_blocks_for_autotuning(inputs[i + 1])
        generators[i + 1] = common.indices_for_autotuning
    all_captured = [*score_captured, *mask_captured]
    grad_key = compat.autotune(
        "gradfuse_flex_backward",
        choices,
        [*inputs, *captured.targets, *all_captured],
        layout,
        generators,
        all_captured,
        [*inlined, *accumulators],
    )
    if not V.graph.sizevars.evaluate_expr(sympy.Eq(batch, key_size[0])):
        grad_key, grad_value = (lowerings[aten.sum](g, axis=0, keepdims=True) for g in (grad_key, grad_value))
    if one_pass:
        grad_query = lowerings[torch.ops.prims.convert_element_type](grad_query, dtype)
    note = f"{'one pass' if one_pass else 'two passes'}; {captured.note}"
    record(NAME, "flex_attention_backward", "flex_backward.py.jinja", note, user_line(node))
    return grad_query, grad_key, grad_value, _rounded_once(captured, score_captured)


def _delta(out: Any, grad_out: Any, grad_logsumexp: Any) -> Any:
    """rowsum(out ∘ grad_out) in fp32, less the gradient of the logsumexp (which the caller has in base 2)."""
    out, grad = (lowerings[torch.ops.prims.convert_element_type](x, torch.float32) for x in (out, grad_out))
    delta = lowerings[aten.sum](lowerings[aten.mul](out, grad), axis=-1)
    if grad_logsumexp is not None:
        delta = lowerings[aten.sub](delta, lowerings[aten.mul](grad_logsumexp, 1 / math.log(2)))
    return compat.require_contiguous(delta)


def _joint_placeholders(device: torch.device) -> list[Any]:
    return subgraphs.score_placeholders(device, torch.float32, gradient=True)


def _grad_score(joint: JointGraph, node: torch.fx.Node, device: torch.device, captured: list[Any]) -> Any:
    if joint.grad_score is None:
        module = returning(joint.module, [])
        zero = module.graph.find_nodes(op="output")[0]
        with module.graph.inserting_before(zero):
            constant = module.graph.call_function(aten.full.default, ([], 0.0), {"dtype": torch.float32, "device": device})
        zero.args = ([constant],)
    else:
        module = returning(joint.module, [joint.grad_score])
    subgraphs.clamp_reads(module, extents_of(module, extents(node), first=1))
    (buffer,) = subgraphs.inline(module, _joint_placeholders(device), captured)
    return buffer


#: Widest head for which five matmuls with dQ in memory beat seven with dQ in registers (benchmarks/NOTES.md).
WIDEST_ONE_PASS = 64


def _one_pass(own: Options, device: torch.device, head_dim: Any, kernel_options: dict[str, Any]) -> bool:
    """Whether dQ is reduced in memory; ``kernel_options={"bwd_ONE_PASS": ...}`` decides it otherwise."""
    if own.deterministic:
        return False
    wanted = kernel_options.get("bwd_ONE_PASS", kernel_options.get("ONE_PASS"))
    if wanted is not None:
        return bool(wanted)
    return compat.architecture(device) >= 90 and V.graph.sizevars.guard_int(head_dim) <= WIDEST_ONE_PASS


def _writes_once(contributions: Sequence[Contribution], shape: Sequence[Any], ranges: dict[Any, Any]) -> bool:
    """Whether every element of a gradient of ``shape`` gets one value, of one score: ``t[b, h, q, k]`` in any order."""
    if len(contributions) != 1 or not all(i in ranges for i in contributions[0].indices):
        return False
    indices = contributions[0].indices
    whole = all(compat.statically_known_true(ranges[i] == n) for i, n in zip(indices, shape, strict=True))
    rest = [n for position, n in ranges.items() if position not in indices]
    return whole and len(set(indices)) == len(indices) and all(compat.statically_known_true(n == 1) for n in rest)


def _captured_gradients(
    joint: JointGraph, node: torch.fx.Node, device: torch.device, captured: list[Any], block_mask: FlexBlockMask
) -> _CapturedGradients:
    result = _CapturedGradients()
    ranges = extents_of(joint.module, extents(node), first=1)
    placeholders = joint.module.graph.find_nodes(op="placeholder")[JOINT_INPUTS:]
    for contributions, placeholder, buffer in zip(joint.captured, placeholders, captured, strict=True):
        if contributions is None:
            result.accumulators.append(None)
            continue
        one_writer = _writes_once(contributions, subgraphs.shape_of(placeholder), ranges)
        if one_writer and common.is_unmasked(block_mask):
            size = buffer.get_size()
            accumulator = compat.empty_strided(
                size, compat.contiguous_strides(size), dtype=buffer.get_dtype(), device=device
            )
        else:
            accumulator = compat.full(buffer.get_size(), 0, buffer.get_dtype() if one_writer else torch.float32, device)
        result.accumulators.append(accumulator)
        for contribution in contributions:
            value = returning(joint.module, [contribution.value])
            subgraphs.clamp_reads(value, extents_of(value, extents(node), first=1))
            address, checked = subgraphs.address(joint.module, contribution, subgraphs.shape_of(placeholder), ranges)
            subgraphs.clamp_reads(address, extents_of(address, extents(node), first=1))
            _, _, on_query, on_key = axes_of(joint.module, contribution)
            bit = 1 << len(result.targets)
            result.checked |= bit * checked
            result.query_free |= bit * (not on_query)
            result.key_free |= bit * (not on_key)
            result.one_writer |= bit * one_writer
            result.targets.append(accumulator)
            for module in (value, address):
                result.subgraphs.extend(subgraphs.inline(module, _joint_placeholders(device), captured))
    return result


def _rounded_once(captured: _CapturedGradients, tensors: list[Any]) -> tuple[Any, ...]:
    """The accumulators in the captured tensors' own dtypes."""
    convert = lowerings[torch.ops.prims.convert_element_type]
    return tuple(
        accumulator if accumulator is None else convert(accumulator, tensor.get_dtype())
        for accumulator, tensor in zip(captured.accumulators, tensors, strict=True)
    )
