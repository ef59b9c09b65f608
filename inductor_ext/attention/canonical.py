"""Rewrite score_mods that stock refuses into ones that all later stages understand. This pass works on Dynamo's graph.

Dynamo gives us ``flex_attention(q, k, v, score_mod, block_mask, ..., captured, mask_captured)`` with the score_mod as a
small FX graph of ``getitem``, ``add``, ``where`` and so on. Each of these rules keeps its value and its gradient:

    in-place operations      x.mul_(2); no_grad regions  -> x * 2; detached values
    a lookup by embedding    embedding(i, table)         -> table[i]
    nested indexing          table[i][j]                 -> table[i, j]
    captured-only work       softplus(table)[h], w[0]    -> computed once outside, the result captured
    0-d captures             score * temperature         -> score * temperature.view(1)[0]
    a cast to bool           k.bool()                    -> k != 0
    constants of a tensor    zeros_like(table[h])        -> 0, so that no gradient is expected of the table
    unused captures          _ = w[h]; return score      -> not captured at all
    no score in the output   return table[h, k]          -> where(q >= 0, table[h, k], score), whose gradient is the same

The pass also requests the logsumexp if a gradient will need it, because the front end does not do that for CPU tensors.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..core.dynamo_graph import Inserter
from ..core.fx import HALF, called, dtype_of, fake_tensor, name_of, value_of
from ..core.purity import is_pure
from ..core.report import leave_to_stock, record, user_line
from ..options import Options
from ..torch_api.higher_order import flex_attention_hop
from .calls import ForwardCall
from .footprints import TRUTH_CASTS
from .functional import Impure, functionalise
from .score_mod import ScoreMod

NAME = "score_mods"


def rewrite(gm: GraphModule, options: Options) -> None:
    """Rewrite every flex_attention of a Dynamo graph in place."""
    for node in gm.graph.find_nodes(op="call_function", target=flex_attention_hop):
        _rewrite_node(gm, node, options)
    gm.recompile()


def _rewrite_node(gm: GraphModule, node: Node, options: Options) -> None:
    call = ForwardCall.of(node)
    captured = list(call.captured)
    module = getattr(gm, call.score_mod.target)
    graph = Graph()
    copies: dict[Node, Node] = {}
    returned = graph.graph_copy(module.graph, copies)
    graph.output(returned)
    done: list[str] = []

    new_score_mod, outer = call.score_mod, Inserter(gm.graph, node)
    try:
        done += functionalise(graph)
        with gm.graph.inserting_before(node):
            _fill_constants(graph)
            _lookups(graph, done)
            _compare_with_zero(graph)
            _flatten_nested_indexing(graph, done)
            captured = _compute_outside(outer, graph, captured, done)
            captured = drop_unused(graph, captured, done)
            captured = detach_frozen(outer, graph, captured)
            captured = _index_scalars(outer, graph, captured, call.query, done)
            _connect_score(graph, done)
            new_score_mod = install(gm, call.score_mod.target, GraphModule(module, graph))
    except Impure as error:
        why = f"the score_mod is left as it is, because {error}"
        leave_to_stock(options.strict, NAME, "flex_attention", why, user_line(node), "Write it without in-place operations.")

    kernel_options = dict(call.kernel_options)
    if not kernel_options.get("OUTPUT_LOGSUMEXP") and needs_grad([call.query, call.key, call.value, *captured]):
        kernel_options["OUTPUT_LOGSUMEXP"] = True
    rewritten = replace(call, score_mod=new_score_mod, kernel_options=kernel_options, captured=tuple(captured))
    node.args = rewritten.operands()
    if done:
        record(NAME, "flex_attention", "rewritten", "; ".join(done), user_line(node))


def install(gm: GraphModule, name: str, module: GraphModule) -> Node:
    """Add ``module`` beside the score_mod that it replaces, which other nodes may share, and return a node for it."""
    powers = [n for n in module.graph.find_nodes(op="call_function", target=operator.pow) if fake_tensor(n) is not None]
    for power in powers:
        # FX prints an operator as Python's, and ``-1 ** k`` is -(1 ** k).
        power.target = torch.pow
    if powers:
        module.recompile()
    fresh, i = f"{name}_gradfuse", 0
    while hasattr(gm, fresh):
        i += 1
        fresh = f"{name}_gradfuse_{i}"
    gm.add_module(fresh, module)
    return gm.graph.get_attr(fresh)


def needs_grad(operands: list[Any]) -> bool:
    """Return whether any of these Dynamo nodes may need a gradient."""
    return torch.is_grad_enabled() and any(fake_tensor(o) is not None and fake_tensor(o).requires_grad for o in operands)


def placeholders(graph: Graph) -> list[Node]:
    """Return the inputs of a graph."""
    return list(graph.find_nodes(op="placeholder"))


def _scalar_indices(index: Any) -> tuple[Any, ...] | None:
    """Return an index as a tuple of scalars (0-d tensors and ints), or None if it is anything else."""
    indices = index if isinstance(index, tuple) else (index,)
    for i in indices:
        scalar = isinstance(i, int) and not isinstance(i, bool)
        if not scalar and not (
            fake_tensor(i) is not None and fake_tensor(i).dim() == 0 and fake_tensor(i).dtype != torch.bool
        ):
            return None
    return indices


def _lookups(graph: Graph, done: list[str]) -> None:
    """Replace ``embedding(i, table)`` by ``table[i]``, unless it pads or renormalises."""
    for node in list(graph.find_nodes(op="call_function", target=torch.nn.functional.embedding)):
        index, table, *rest = node.args
        if not any(x not in (None, False) for x in (*rest[:2], *rest[3:], *_without_defaults(node.kwargs))):
            with graph.inserting_before(node):
                read = graph.call_function(operator.getitem, (table, (index,)))
            read.meta = dict(node.meta)
            node.replace_all_uses_with(read)
            graph.erase_node(node)
            done.append("an embedding lookup is now an index")


def _compare_with_zero(graph: Graph) -> None:
    """Write where an integer is taken as a bool as ``!= 0``.

    Outside of a kernel, Inductor ignores a cast of a position to bool, and its C++ for that does not compile.
    """
    for node in list(graph.nodes):
        logical = name_of(node).startswith("logical_")
        if not logical and not (name_of(node) in TRUTH_CASTS and dtype_of(node) is torch.bool):
            continue
        for operand in [n for n in node.all_input_nodes if _is_integer(n)][: None if logical else 1]:
            with graph.inserting_before(node):
                compared = graph.call_function(operator.ne, (operand, 0))
            compared.meta = {**operand.meta, "example_value": fake_tensor(operand).bool()}
            node.replace_input_with(operand, compared)


def _is_integer(node: Node) -> bool:
    dtype = dtype_of(node)
    return not (dtype is None or dtype is torch.bool or dtype.is_floating_point or dtype.is_complex)


def _without_defaults(kwargs: dict[str, Any]) -> list[Any]:
    return [value for name, value in kwargs.items() if name != "norm_type"]


def _flatten_nested_indexing(graph: Graph, done: list[str]) -> None:
    for outer in list(graph.find_nodes(op="call_function", target=operator.getitem)):
        inner = outer.args[0]
        while isinstance(inner, Node) and inner.target is operator.getitem and fake_tensor(inner.args[0]) is not None:
            first, second = _scalar_indices(inner.args[1]), _scalar_indices(outer.args[1])
            if first is None or second is None:
                break
            outer.args = (inner.args[0], (*first, *second))
            done.append("nested indices are now one index")
            inner = outer.args[0]
    graph.eliminate_dead_code()


def detach_frozen(outer: Inserter, graph: Graph, captured: list[Any]) -> list[Any]:
    """Detach the captured tensors that no gradient reaches, because their gradient in stock's joint graph would be None."""
    learned: set[Node] = set()
    pending = list(graph.find_nodes(op="output")[0].all_input_nodes)
    while pending:
        node = pending.pop()
        value = fake_tensor(node)
        # A node whose value is not known may carry a gradient.
        stops = called(node) == "detach" or (value is not None and not (value.is_floating_point() or value.is_complex()))
        if not stops and node not in learned:
            learned.add(node)
            pending += node.all_input_nodes
    result = []
    for placeholder, operand in zip(ScoreMod.of(graph).captured, captured, strict=True):
        if placeholder not in learned and needs_grad([operand]):
            operand = outer.method("detach", operand)
            placeholder.meta = {**placeholder.meta, "example_value": value_of(operand)}
        result.append(operand)
    return result


def _compute_outside(outer: Inserter, graph: Graph, captured: list[Any], done: list[str]) -> list[Any]:
    """Move values that depend only on captured tensors out of the score_mod. They become new operands."""
    inputs = ScoreMod.of(graph)
    of_a_score = {inputs.score, *inputs.positions}
    operands = dict(zip(inputs.captured, captured, strict=True))
    movable: dict[Node, bool] = {p: True for p in operands}
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op in ("call_function", "call_method") and sources and is_pure(node):
            movable[node] = of_a_score.isdisjoint(sources) and all(movable.get(i, False) for i in sources)

    moved: dict[Node, Node] = {}

    def outside(node: Node) -> Any:
        if node not in moved:
            moved[node] = _widened(outer, operands[node]) if node in operands else outer.copy(node, outside)
        return moved[node]

    roots = [
        n
        for n in graph.nodes
        if movable.get(n) and n not in operands and fake_tensor(n) is not None and not all(movable.get(u) for u in n.users)
    ]
    for root in roots:
        with graph.inserting_after(placeholders(graph)[-1]):
            operand = graph.placeholder(f"captured_{root.name}")
        operand.meta = {**root.meta, "example_value": _wide(fake_tensor(root))}
        captured = [*captured, outside(root)]
        root.replace_all_uses_with(operand)
        done.append(f"{root.format_node().split(' : ')[0].lstrip('%')} is computed outside the score_mod")
    graph.eliminate_dead_code()
    return captured


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in HALF else value


def _widened(outer: Inserter, operand: Any) -> Any:
    """Cast a half-precision operand to fp32, in which a kernel would have computed with it too."""
    value = fake_tensor(operand)
    return outer.method("float", operand) if value is not None and _wide(value) is not value else operand


def drop_unused(graph: Graph, captured: list[Any], done: list[str]) -> list[Any]:
    """Remove the captured tensors that a score_mod does not read, and return the others."""
    kept = []
    for placeholder, operand in zip(ScoreMod.of(graph).captured, captured, strict=True):
        if placeholder.users:
            kept.append(operand)
        else:
            graph.erase_node(placeholder)
            if fake_tensor(operand) is not None and fake_tensor(operand).requires_grad:
                done.append("a captured tensor that is not used is dropped")
    return kept


def _index_scalars(outer: Inserter, graph: Graph, captured: list[Any], query: Node, done: list[str]) -> list[Any]:
    """Capture a 0-d tensor as a vector of one element, on the query's device, and index it."""
    result = []
    for placeholder, operand in zip(ScoreMod.of(graph).captured, captured, strict=True):
        value = fake_tensor(operand)
        if value is not None and value.dim() == 0:
            device = fake_tensor(query).device if fake_tensor(query) is not None else value.device
            if value.device != device:
                operand = outer.method("to", operand, device)
            operand = outer.method("view", operand, (1,))
            with graph.inserting_after(placeholders(graph)[-1]):
                element = graph.call_function(operator.getitem, (placeholder, (0,)))
            element.meta = dict(placeholder.meta)
            placeholder.replace_all_uses_with(element, delete_user_cb=lambda user, new=element: user is not new)
            placeholder.meta = dict(operand.meta)
            done.append("a captured 0-d tensor is now a vector that is indexed")
        result.append(operand)
    return result


def _connect_score(graph: Graph, done: list[str]) -> None:
    """Make an output formally depend on the score if it does not. Its value and its gradient do not change."""
    inputs = ScoreMod.of(graph)
    output = graph.find_nodes(op="output")[0]
    reached = {inputs.score}
    for node in graph.nodes:
        if reached & set(node.all_input_nodes):
            reached.add(node)
    if output in reached:
        return
    with graph.inserting_before(output):
        always = graph.call_function(operator.ge, (inputs.q, 0))
        connected = graph.call_function(torch.where, (always, output.args[0], inputs.score))
    output.args = (connected,)
    done.append("the output, which did not depend on the score, now formally depends on it")


def _fill_constants(graph: Graph) -> None:
    """Replace ``zeros_like(x)`` and similar ops by constants: they use only the dtype of ``x``, not its values."""
    for node in list(graph.nodes):
        value, name = fake_tensor(node), called(node)
        if value is None or value.dim() > 0:
            continue
        number = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}.get(name)
        if name in ("full_like", "new_full"):
            at = 1 if name == "full_like" else 2
            number = node.args[at] if len(node.args) > at else node.kwargs.get("fill_value")
        if isinstance(number, (bool, int, float)):
            with graph.inserting_before(node):
                constant = graph.call_function(torch.full, ((), number), {"dtype": value.dtype, "device": value.device})
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
            graph.erase_node(node)
