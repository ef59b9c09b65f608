"""Replace associative_scan on Dynamo's graph by the same scan with a correct gradient.

In "pointwise" mode the gradient that torch computes for the op scans once for every element, and is zero for some leaves
(seen with the gated recurrence in torch 2.11). In "generic" mode Dynamo expands the op before the passes see it, and the
gradient of autograd is correct.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from ..core.dynamo_graph import Inserter
from ..core.fx import requires_grad
from ..core.outside import Outside, is_returned
from ..core.purity import changes_in_place
from ..core.report import record, user_line
from ..core.terms import op
from ..options import Options
from ..torch_api.higher_order import associative_scan_hop
from .plan import NAME
from .scan import scan


def rewrite(gm: GraphModule, options: Options) -> None:
    """Replace, in place, every pointwise associative_scan by ``scan.scan.scan``."""
    for node in gm.graph.find_nodes(op="call_function", target=associative_scan_hop):
        node.target = scan
        _turn(node)
        record(NAME, "associative_scan", "scan", "its gradient is computed in one pass backwards in time", user_line(node))
    gm.recompile()


def _turn(node: Node) -> None:
    """Scan from the end instead of scanning flipped leaves and flipping the results back.

    torch writes ``reverse=True`` with such flips, and keeps these copies for the backward. So what is outside is copied.
    """
    combine, xs, *additional = node.args
    if not _just_flipped(xs, node) or any(user.target is not operator.getitem for user in node.users) or _changes(node):
        return
    straight = {x: x.args[0] for x in xs}
    if any(map(requires_grad, straight.values())):
        outside = Outside(node.graph)
        straight = {x: _copied(before, node) if outside.has(before) else before for x, before in straight.items()}
    node.args = (combine, [straight[x] for x in xs], *additional)
    node.kwargs = {**node.kwargs, "reverse": True}
    for result in list(node.users):
        with node.graph.inserting_after(result):
            flipped = node.graph.call_function(torch.flip, (result, [0]))
        flipped.meta = dict(result.meta)
        result.replace_all_uses_with(flipped, delete_user_cb=lambda user, new=flipped: user is not new)
        for user in filter(_flipped, list(flipped.users)):
            user.replace_all_uses_with(_copied(result, user) if requires_grad(user) and is_returned(user) else result)
            node.graph.erase_node(user)
        if not flipped.users:
            node.graph.erase_node(flipped)
    for x in dict.fromkeys(xs):
        if not x.users:
            node.graph.erase_node(x)


def _copied(x: Node, before: Node) -> Node:
    with x.graph.inserting_before(before):
        return Inserter(x.graph, x).function(torch.ops.gradfuse.copied.default, x, False)


def _just_flipped(xs: Sequence[Node], node: Node) -> bool:
    """Whether ``xs`` are flipped along dim 0 right before ``node``.

    No node between the flips and ``node`` may be able to change the tensors that are flipped.
    """

    def harmless(before: Node) -> bool:
        of_flips = bool(before.all_input_nodes) and set(before.all_input_nodes) <= set(xs) and not changes_in_place(before)
        return before.op == "get_attr" or before in xs or of_flips

    before = node.prev
    while harmless(before):
        before = before.prev
    return all(_flipped(x) and x > before for x in xs)


def _changes(node: Node) -> bool:
    """Whether an op writes in place to something that is computed from ``node``.

    A flip is a copy, and may be written to. The results of a scan may not, because they are saved for the backward.
    """
    seen: set[Node] = set()
    ahead = [node]
    while ahead:
        for user in ahead.pop().users:
            if user not in seen:
                seen.add(user)
                ahead.append(user)
    return any(map(changes_in_place, seen))


def _flipped(node: Node) -> bool:
    """Whether ``node`` is a ``flip`` along dim 0 only."""
    if op(node) != "flip" or node.kwargs:
        return False
    dims = node.args[1:]
    return dims in ((0,), ((0,),), ([0],))
