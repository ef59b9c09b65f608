"""Lay out captured tensors for the reads of a kernel that looks something up for every score: ``t[index[b, q, k], h]``.

This pass works on Dynamo's graph, after hoisting. Neighbouring scores read neighbouring elements of ``index``, but any
elements of ``t``. What such reads cost is the number of cache lines that they touch.

    a table      gets the dims last whose index depends on both positions. The elements that one head reads are then beside
                 each other: 512 of them in bf16 are in 8 cache lines, and in ``t`` itself in 512.
    an index     of 64 bits becomes one of 32 bits, which is half of the bytes of every head. A number that does not fit
                 becomes the largest that does, which is out of range as well.

Only tensors are copied that are much smaller than the scores, or that all heads read.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..core.dynamo_graph import Inserter
from ..core.fx import cone, dtype_of, fake_tensor, indices_of, value_of
from ..core.report import record, user_line
from ..options import Options
from ..torch_api.higher_order import flex_attention_hop
from ..torch_api.sizes import size_hint
from .calls import ForwardCall
from .canonical import install, needs_grad
from .expressions import expression
from .functional import impurity
from .score_mod import ScoreMod

NAME = "layouts"

#: A tensor is copied if a kernel reads at least this many elements for each element that it has.
FEWEST_READS = 4
_LAST_INT32 = 2**31 - 1


def rewrite(gm: GraphModule, options: Options) -> None:
    """Change the layouts of what every score_mod of a Dynamo graph looks up, if it will need a gradient. Changes ``gm``."""
    for node in gm.graph.find_nodes(op="call_function", target=flex_attention_hop):
        call = ForwardCall.of(node)
        module = getattr(gm, call.score_mod.target)
        trains = needs_grad([call.query, call.key, call.value, *call.captured])
        if trains and impurity(module.graph) is None:
            _rewrite_node(gm, node)
    gm.recompile()


def _rewrite_node(gm: GraphModule, node: Node) -> None:
    call = ForwardCall.of(node)
    captured, shape = list(call.captured), fake_tensor(call.query).shape
    scores = [*shape[:3], fake_tensor(call.key).shape[2]]
    module = getattr(gm, call.score_mod.target)
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    outer = Inserter(gm.graph, node)
    done = []
    with gm.graph.inserting_before(node):
        for i, placeholder in enumerate(ScoreMod.of(graph).captured):
            value = fake_tensor(captured[i])
            lookups = [] if value is None else _lookups(placeholder, value.dim(), ScoreMod.of(graph))
            if not lookups or not _much_smaller(value, scores):
                continue
            for change in (_varying_dims_last, _in_32_bits):
                changed = change(outer, captured[i], lookups)
                if changed is not None:
                    captured[i], why = changed
                    done.append((expression(placeholder), why))
        if not done:
            return
        new_score_mod = install(gm, call.score_mod.target, GraphModule(module, graph))
    node.args = replace(call, score_mod=new_score_mod, captured=tuple(captured)).operands()
    for what, why in done:
        record(NAME, "flex_attention", "layout", f"{what} {why}", user_line(node))


def _lookups(tensor: Node, rank: int, inputs: ScoreMod) -> list[Node]:
    """Return the reads of a captured tensor if each is one element for every score, and nothing else uses the tensor."""
    for user in tensor.users:
        if user.target is not operator.getitem or user.args[0] is not tensor or tensor in indices_of(user):
            return []
        indices = indices_of(user)
        numbers = all(isinstance(i, int) or _is_number(i) for i in indices)
        if not numbers or len(indices) != rank or not {inputs.q, inputs.k} <= cone(user):
            return []
    return list(tensor.users)


def _is_number(index: Any) -> bool:
    value = fake_tensor(index)
    return value is not None and value.dim() == 0 and value.dtype is not torch.bool


def _much_smaller(tensor: torch.Tensor, scores: list[Any]) -> bool:
    """Return whether a tensor has much fewer elements than there are scores. Symbolic sizes count as they were traced."""
    sizes, scores = ([size_hint(n) for n in shape] for shape in (tensor.shape, scores))
    return None not in (*sizes, *scores) and FEWEST_READS * math.prod(sizes) <= math.prod(scores)


def _varying_dims_last(outer: Inserter, tensor: Node, lookups: list[Node]) -> tuple[Node, str] | None:
    """Permute the dims of a tensor so that those whose index depends on the query or the key come last."""
    inputs = ScoreMod.of(lookups[0].graph)

    def varies(index: Any) -> bool:
        return isinstance(index, Node) and not {inputs.q, inputs.k}.isdisjoint(cone(index))

    varying = {tuple(map(varies, indices_of(read))) for read in lookups}
    if len(varying) > 1:
        return None
    (last,) = varying
    order = sorted(range(len(last)), key=lambda dim: last[dim])
    if order == sorted(order):
        return None
    for read in lookups:
        read.args = (read.args[0], tuple(indices_of(read)[dim] for dim in order))
    permuted = outer.method("contiguous", outer.method("permute", tensor, order))
    _has_value(lookups[0].args[0], permuted)
    return permuted, f"has the dims {order} of the captured tensor, so that the elements of one head are beside each other"


def _in_32_bits(outer: Inserter, tensor: Node, lookups: list[Node]) -> tuple[Node, str] | None:
    """Cast a tensor of 64-bit integers that are only indices of other tensors."""
    if dtype_of(tensor) is not torch.int64 or not all(_is_index(read) for read in lookups):
        return None
    narrow = outer.method("to", outer.method("clamp", tensor, -_LAST_INT32 - 1, _LAST_INT32), torch.int32)
    _has_value(lookups[0].args[0], narrow)
    for read in lookups:
        read.meta = {**read.meta, "example_value": fake_tensor(read).to(torch.int32)}
    return narrow, "has 32-bit integers, because it is only an index"


def _is_index(read: Node) -> bool:
    """Return whether an integer that is read is used as it is, and only as an index."""
    return all(user.target is operator.getitem and user.args[0] is not read for user in read.users)


def _has_value(placeholder: Node, operand: Node) -> None:
    placeholder.meta = {**placeholder.meta, "example_value": value_of(operand)}
