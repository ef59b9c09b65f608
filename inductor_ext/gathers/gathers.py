"""Gathers by an index in which every row occurs k times: on the joint graph, read each row once and store it k times.

``x[permutation // k]`` reads every row of x k times. The k reads are far apart, so if x is larger than the L2 cache, each of
them goes to device memory. If the work runs in the order of x instead, the k reads follow one another, and the permutation
moves to the stores:

    y = f(x[perm // k], other)     becomes     y[inverse[s * k + j]] = f(x[s], other[inverse[s * k + j]])

f is the whole region of element-wise ops (and sums over a row) that depends on the gather. In the gradient of a weighted
combine, for example, this region computes the gradient of the experts' outputs and the gradient of the weights. The rewrite
stores only tensors that would have been stored anyway.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from ..core.fx import DECOMPOSED_VIEWS, SAME_ORDER, cast_of, fake_tensor, same_sizes, value_of
from ..core.joint_graph import Builder, after_tangents
from ..core.report import record, user_line
from ..core.target import Target
from ..options import Options
from ..torch_api.sizes import size_hint, statically_known_true
from .inverses import inverse
from .permutations import Repeated, repeated
from .scatter_adds import row_index

NAME = "gathers"

aten = torch.ops.aten

_REDUCTIONS = {
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.var_mean.correction,
    aten.any.default,
}


@dataclass
class _Region:
    """A gather and the nodes that depend on it.

    gather: the node ``x[index]``. proof: the proof about its index. nodes: the gather and the nodes that are computed from
    it, in the graph's order.
    """

    gather: Node
    x: Node
    proof: Repeated
    nodes: list[Node] = field(default_factory=list)

    def stored(self) -> Iterator[Node]:
        """The nodes whose values are used outside of the region."""
        inside = set(self.nodes)
        yield from (n for n in self.nodes if any(user not in inside for user in n.users))


def rewrite(build: Builder, options: Options) -> None:
    """Rewrite, in place, every gather that reads a large tensor several times, to run in the order of that tensor."""
    backward = after_tangents(build.graph)
    for node in list(build.graph.nodes):
        region = _match(node)
        if region is None:
            continue
        _grow(region, backward)
        if all(_is_materialised(n) for n in region.stored()):
            _reorder(build, region)
            why = f"every row is read once, not {region.proof.times} times"
            record(NAME, str(node.target), "stores", why, user_line(node))


def needs_tuning(nodes: Collection[Node]) -> bool:
    """Whether one kernel, which computes these nodes, stores rows by a permutation and also sums rows.

    Inductor's first choice of a tile for such a kernel takes a fifth longer than the best tile (docs/notes/gathers.md).
    """
    placed = (n for n in nodes if n.target is torch.ops.gradfuse.place_rows.default)
    sums = any(n.target is aten.sum.dim_IntList for n in nodes)
    return sums and any(value_of(n).dim() > 1 for n in placed)


def cache_bytes(device: torch.device) -> float:
    """The size in bytes of the last cache before memory; infinite on a CPU, whose caches do not need the rewrite."""
    return Target.of(device).l2


def _match(node: Node) -> _Region | None:
    """A gather of rows by ``permutation // k`` with k > 1 from a tensor larger than the cache."""
    if node.target is aten.index.Tensor:
        x, (index, *others) = node.args
        whole = isinstance(index, Node) and not others and value_of(index).dim() == 1
    elif node.target is aten.gather.default:
        x, dim, expanded = node.args[:3]
        index = row_index(expanded, expanded, 0) if dim == 0 else None
        whole = index is not None and same_sizes(value_of(x).shape[1:], value_of(node).shape[1:])
    else:
        return None
    proof = repeated(index) if whole else None
    if proof is None or proof.permutation is None or proof.strided or not isinstance(proof.times, int) or proof.times < 2:
        return None
    sizes = [size_hint(n) for n in value_of(x).shape]
    if None in sizes or not proof.covers(value_of(x).shape[0]):
        return None
    large = math.prod(sizes) * value_of(x).dtype.itemsize > cache_bytes(value_of(x).device)
    return _Region(node, x, proof) if large and len(sizes) > 1 else None


def _grow(region: _Region, backward: set[Node]) -> None:
    """Add the nodes that can be computed row by row from the gather: element-wise ops of its shape, and sums over a row."""
    inside = {region.gather}
    region.nodes.append(region.gather)
    shape = value_of(region.gather).shape
    node = region.gather
    while (node := node.next).op != "output":
        operands = [a for a in node.all_input_nodes if fake_tensor(a) is not None]
        from_rows = any(a in inside and same_sizes(value_of(a).shape, shape) for a in operands)
        # If the forward computes a value and the backward uses it, it is saved in between, in the order that it has.
        same_pass = (node in backward) == (region.gather in backward)
        if from_rows and same_pass and (_is_elementwise(node, shape, operands, inside) or _is_row_sum(node)):
            inside.add(node)
            region.nodes.append(node)


def _is_elementwise(node: Node, shape: torch.Size, operands: list[Node], inside: set[Node]) -> bool:
    pointwise = node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())
    # These ops keep every value at its index if they keep the shape.
    in_place = cast_of(node) is not None or node.target in SAME_ORDER or node.target is aten.expand.default
    value = fake_tensor(node)
    if not (pointwise or in_place) or value is None or not same_sizes(value.shape, shape):
        return False
    sums = [a for a in operands if a in inside and not same_sizes(value_of(a).shape, shape)]
    return not sums and all(len(value_of(a).shape) in (0, len(shape)) for a in operands)


def _is_row_sum(node: Node) -> bool:
    if node.target is not aten.sum.dim_IntList:
        return False
    rank = value_of(node.args[0]).dim()
    return bool(node.args[1]) and all(d % rank != 0 for d in node.args[1])


def _is_materialised(node: Node) -> bool:
    """Whether a node is a sum over a row, which is small, or none of its users would be fused with it."""
    if node.target is aten.sum.dim_IntList:
        return True
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user.target in DECOMPOSED_VIEWS:
            pending.extend(user.users)
        elif user.target in _REDUCTIONS or torch.Tag.pointwise in getattr(user.target, "tags", ()):
            return False
    return True


def _reorder(build: Builder, region: _Region) -> None:
    """Compute the region in the order of x, and store each row of its results at its index."""
    indices = inverse(build, region.proof.permutation)
    rows = region.proof.length
    reordered: dict[Node, Node] = {}

    def operand(node: Node) -> Node:
        if node not in reordered:
            # A node may also be a symbolic size.
            shape = value_of(node).shape if fake_tensor(node) is not None else ()
            by_row = len(shape) > 0 and statically_known_true(shape[0] == rows)
            # The unchecked op is not used: the partitioner would save its result for the backward, not recompute it.
            reordered[node] = build.call(aten.index.Tensor, node, [indices]) if by_row else node
        return reordered[node]

    stored = set(region.stored())
    for node in region.nodes:
        with build.before(node):
            if node is region.gather:
                reordered[node] = _repeated(build, region)
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), operand)
                reordered[node] = build.call(node.target, *args, **kwargs)
            if node in stored:
                result = build.call(torch.ops.gradfuse.place_rows.default, reordered[node], indices)
                outside = [user for user in node.users if user not in region.nodes]
                for user in outside:
                    user.replace_input_with(node, result)
                build.refresh_views(result)
    for node in reversed(region.nodes):
        build.graph.erase_node(node)


def _repeated(build: Builder, region: _Region) -> Node:
    """Repeat every row of x [S, ...] k times: [S * k, ...]. This costs nothing until the result is stored."""
    sizes = build.sizes(region.x, range(value_of(region.x).dim()))
    spread = build.call(aten.unsqueeze.default, region.x, 1)
    spread = build.call(aten.expand.default, spread, [sizes[0], region.proof.times, *sizes[1:]])
    spread = build.call(aten.clone.default, spread, memory_format=torch.contiguous_format)
    return build.call(aten.view.default, spread, [build.size(region.gather, 0), *sizes[1:]])
